"""Metric families by name, and the protocol of what creates them.

Knows nothing of Triton: its MetricFamily class satisfies `MetricFactory`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


class Metric(Protocol):
    """One time series. Which call it takes depends on its kind."""

    def set(self, value: float) -> None:
        """Gauge: the value now."""

    def increment(self, value: float) -> None:
        """Counter: so much more."""

    def observe(self, value: float) -> None:
        """Histogram: one observation."""


class MetricFactory(Protocol):
    """Creates families; each call costs Triton a message, so everything is created once, at start."""

    GAUGE: Any
    COUNTER: Any
    HISTOGRAM: Any

    def __call__(self, *, name: str, description: str, kind: Any) -> Any:
        """A family, whose `Metric(labels=…, buckets=…)` makes one series."""


@dataclass(frozen=True, slots=True)
class FamilySpec:
    """A family and the one label that tells its series apart; no label, one series."""

    name: str
    description: str
    label: str = ""
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


class Series:
    """The series of one family by the value of its label ("" when it has none)."""

    def __init__(self, factory: MetricFactory, kind: Any, spec: FamilySpec, labels: Mapping[str, str]) -> None:
        # The family has to outlive its metrics.
        self._family = factory(name=spec.name, description=spec.description, kind=kind)
        self._spec, self._labels = spec, dict(labels)
        self._metrics: dict[str, Metric] = {}
        for value in spec.values or ("",):
            self.add(value)

    def add(self, value: str) -> None:
        """One more series, for a value that came later."""
        options: dict[str, Any] = {"buckets": list(self._spec.buckets)} if self._spec.buckets else {}
        labels = {**self._labels, **({self._spec.label: value} if value else {})}
        self._metrics[value] = self._family.Metric(labels=labels, **options)

    def __getitem__(self, value: str) -> Metric:
        return self._metrics[value]
