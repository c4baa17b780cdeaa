"""Histograms and counters of constrained decoding. Knows nothing of Triton or of any constraint library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from python_backend.guided.guide import KINDS
from python_backend.telemetry.families import FamilySpec, Series

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from python_backend.telemetry.families import MetricFactory

COMPILE_TIME = FamilySpec(
    "llm_guide_compile_seconds",
    "Time to compile a structure that was not in the cache, from the moment a worker took it",
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
)
MASK_TIME = FamilySpec(
    "llm_guide_mask_seconds",
    "Time to find out which tokens may come next, for one token of one sequence",
    buckets=(0.00001, 0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1),
)
HISTOGRAMS = (COMPILE_TIME, MASK_TIME)
CACHE = FamilySpec("llm_guide_cache_total", "Look-ups of compiled structures, by result", "result", ("hit", "miss"))
REQUESTS = FamilySpec(
    "llm_guide_requests_total", "Requests with a guide that have ended, by its type", "guide_type", KINDS
)
COUNTERS = (CACHE, REQUESTS)

MASKS_PER_UPDATE = 32


class GuideMetrics:
    """An observation costs about 0.03 ms, so of the masks of each period a few are observed."""

    def __init__(self, factory: MetricFactory, labels: Mapping[str, str]) -> None:
        self._histograms = {spec.name: Series(factory, factory.HISTOGRAM, spec, labels) for spec in HISTOGRAMS}
        self._cache = Series(factory, factory.COUNTER, CACHE, labels)
        self._requests = Series(factory, factory.COUNTER, REQUESTS, labels)
        self._counted = dict.fromkeys(CACHE.values, 0)

    def ended(self, kind: str) -> None:
        """Count one request with a guide of that type."""
        self._requests[kind].increment(1)

    def compiled(self, seconds: float) -> None:
        """Observe one compilation."""
        self._histograms[COMPILE_TIME.name][""].observe(seconds)

    def masks(self, times_s: Iterable[float]) -> None:
        """Observe a sample of the masks since the last call, evenly spread over them."""
        times = list(times_s)
        for seconds in times[:: -(-len(times) // MASKS_PER_UPDATE) or 1]:
            self._histograms[MASK_TIME.name][""].observe(seconds)

    def cache(self, hits: int, misses: int) -> None:
        """Bring the counters to these totals."""
        for result, total in (("hit", hits), ("miss", misses)):
            if total > self._counted[result]:
                self._cache[result].increment(total - self._counted[result])
                self._counted[result] = total
