"""Whether an engine still serves, judged from snapshots of it; and the gauge that says so of each model.

Knows nothing of Triton or of threads: somebody calls `update` every now and then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from python_backend.telemetry.families import FamilySpec, Series

if TYPE_CHECKING:
    from collections.abc import Mapping

    from python_backend.engine.output import EngineStats
    from python_backend.telemetry.families import MetricFactory

PATIENCE_S = 30.0  # so long may an engine with work make no step, or may requests wait for KV blocks
PARTS = ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble_unary")
HEALTHY = FamilySpec(
    "llm_model_healthy", "Whether the model answers and, for tensorrt_llm, its engine serves", "part", PARTS
)
GAUGES = (HEALTHY,)


class EngineHealth:
    """Says why an engine should get no requests, if there is a reason."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._closing = False
        self._failure: BaseException | None = None
        self._iteration = self._admitted = -1
        self._stepped_s = self._not_short_s = self._now_s = 0.0
        self._waiting = 0

    def close(self) -> None:
        """The server is about to stop."""
        self._closing = True

    def update(self, stats: EngineStats, in_flight: int, failure: BaseException | None, now_s: float) -> None:
        """Take a snapshot in.

        Args:
            stats: of the engine.
            in_flight: requests that were taken and have not ended; the engine's own count stands still when it hangs.
            failure: what ended the engine.
            now_s: time.monotonic().
        """
        self._now_s, self._failure, self._waiting = now_s, failure, stats.waiting_requests
        if stats.iteration != self._iteration or not in_flight:
            self._iteration, self._stepped_s = stats.iteration, now_s
        if not stats.short_of_blocks or stats.prompt_tokens != self._admitted:
            self._admitted, self._not_short_s = stats.prompt_tokens, now_s

    def reason(self) -> str | None:
        """Why the engine does not serve; None while it does."""
        if self._closing:
            return "the server is shutting down."
        if self._failure is not None:
            return f"the engine has failed ({self._failure}); restart the server."
        stood_s, short_s = self._now_s - self._stepped_s, self._now_s - self._not_short_s
        if stood_s >= self._patience_s:
            return f"the engine has work and has made no step for {stood_s:.0f} s."
        if short_s >= self._patience_s:
            return f"no KV cache block has become free for {self._waiting} waiting requests in {short_s:.0f} s."
        return None


class HealthMetrics:
    """One series for each model that a request passes through."""

    def __init__(self, factory: MetricFactory, labels: Mapping[str, str]) -> None:
        self._healthy = Series(factory, factory.GAUGE, HEALTHY, labels)

    def set(self, part: str, healthy: bool) -> None:
        """Show what was found out of one model."""
        self._healthy[part].set(float(healthy))
