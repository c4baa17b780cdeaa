"""Gauges and counters of adapters. Knows nothing of Triton or of files."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from python_backend.telemetry.families import FamilySpec, Series

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from python_backend.telemetry.families import MetricFactory

ADAPTERS = FamilySpec("llm_lora_adapters", "Adapters in host memory")
BYTES = FamilySpec("llm_lora_bytes", "Bytes of the adapters in host memory")
GAUGES = (ADAPTERS, BYTES)
CACHE = FamilySpec("llm_lora_cache_total", "Look-ups of adapters in host memory", "result", ("hit", "miss"))
EVICTIONS = FamilySpec("llm_lora_evictions_total", "Adapters that made room for others")
OTHER = "other"
MAX_NAMES = 1000  # series cost the server and whoever collects them
REQUESTS = FamilySpec("llm_lora_requests_total", "Requests that have ended, by adapter", "adapter", (OTHER,))
TOKENS = FamilySpec("llm_lora_tokens_total", "Tokens generated with an adapter", "adapter", (OTHER,))
COUNTERS = (CACHE, EVICTIONS, REQUESTS, TOKENS)
LOAD_TIME = FamilySpec(
    "llm_lora_load_seconds",
    "Time to read, check and scale an adapter",
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
)
HISTOGRAMS = (LOAD_TIME,)


class AdapterMetrics:
    """The series of one engine: one for each name, `other` for what came as tensors and for names over MAX_NAMES."""

    def __init__(self, factory: MetricFactory, labels: Mapping[str, str], names: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._names = set(names[:MAX_NAMES])
        values = tuple(dict.fromkeys((*names[:MAX_NAMES], OTHER)))
        gauge, counter, histogram = factory.GAUGE, factory.COUNTER, factory.HISTOGRAM
        self._gauges = {spec: Series(factory, gauge, spec, labels) for spec in GAUGES}
        self._cache = Series(factory, counter, CACHE, labels)
        self._evictions = Series(factory, counter, EVICTIONS, labels)
        self._requests = Series(factory, counter, replace(REQUESTS, values=values), labels)
        self._tokens = Series(factory, counter, replace(TOKENS, values=values), labels)
        self._load_time = Series(factory, histogram, LOAD_TIME, labels)
        self._counted = {"hit": 0, "miss": 0, "evictions": 0}

    def loaded(self, seconds: float) -> None:
        """Observe one load."""
        self._load_time[""].observe(seconds)

    def ended(self, name: str, tokens: int) -> None:
        """Count one request of an adapter."""
        value = name if self._known(name) else OTHER
        self._requests[value].increment(1)
        if tokens:
            self._tokens[value].increment(tokens)

    def _known(self, name: str) -> bool:
        """Whether a name has series; one that came later gets them now."""
        with self._lock:
            if name and name not in self._names and len(self._names) < MAX_NAMES:
                self._requests.add(name)
                self._tokens.add(name)
                self._names.add(name)
            return name in self._names

    def update(self, adapters: int, nbytes: int, hits: int, misses: int, evictions: int) -> None:
        """Set the gauges, and bring the counters to these totals."""
        self._gauges[ADAPTERS][""].set(adapters)
        self._gauges[BYTES][""].set(nbytes)
        metrics = {"hit": self._cache["hit"], "miss": self._cache["miss"], "evictions": self._evictions[""]}
        for key, total in (("hit", hits), ("miss", misses), ("evictions", evictions)):
            if total > self._counted[key]:
                metrics[key].increment(total - self._counted[key])
                self._counted[key] = total
