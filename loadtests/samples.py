"""Percentiles of a sample, without rounding.

Knows nothing of what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

PERCENTILES = ("p50", "p90", "p95", "p99")


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` percent of the sample lies, linear between neighbours as numpy and AIPerf do.

    `values` need not be sorted; there has to be at least one.
    """
    ordered = sorted(values)
    position = (len(ordered) - 1) * share / 100
    low = math.floor(position)
    if low + 1 >= len(ordered):
        return ordered[-1]
    return ordered[low] + (ordered[low + 1] - ordered[low]) * (position - low)


def statistic(values: Sequence[float], name: str) -> float:
    """One of mean, min, max, p0 to p100."""
    if name == "mean":
        return math.fsum(values) / len(values)
    if name in ("min", "max"):
        return min(values) if name == "min" else max(values)
    return percentile(values, float(name.removeprefix("p")))


def summary(values: Sequence[float]) -> dict[str, float]:
    """count, mean, min, p50 to p99 and max; only the count of an empty sample."""
    if not values:
        return {"count": 0}
    names = ("mean", "min", *PERCENTILES, "max")
    return {"count": len(values), **{name: statistic(values, name) for name in names}}


def ecdf(values: Sequence[float], points: int = 60) -> list[tuple[float, float]]:
    """Up to `points` pairs (value, share of the sample at or below it), for a drawing."""
    ordered = sorted(values)
    count = len(ordered)
    if not count:
        return []
    places = sorted({round(i * (count - 1) / max(1, points - 1)) for i in range(points)})
    return [(ordered[place], (place + 1) / count) for place in places]
