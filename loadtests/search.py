"""The search for the highest rate that still meets the SLO.

Knows nothing of requests: a trial takes a rate and says how much of the tightest limit it used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

Trial = Callable[[float], float]
"""A rate -> measured / limit of the worst check: up to 1 the SLO is met. Infinite when nothing could be measured."""

RESOLUTION = 0.05
_GROWTH = 1.6
_MAX_TRIALS = 14


@dataclass(slots=True)
class Found:
    """`holds` met the SLO, twice; `misses` did not and is at most RESOLUTION above it. None: not found."""

    holds: float | None = None
    misses: float | None = None
    trials: list[tuple[float, float]] = field(default_factory=list)  # rate, use


def find_max(
    trial: Trial, confirm: Trial, start: float, *, lowest: float = 0.0, resolution: float = RESOLUTION
) -> Found:
    """Bracket the limit, narrow the bracket, and try its lower end again.

    Args:
        trial: see Trial.
        confirm: a trial with other arrivals, and longer; a rate that fails it does not hold.
        start: the first rate, requests per second.
        lowest: a rate below which it is not worth looking.
        resolution: how close `holds` and `misses` have to be, as a share.
    """
    found = Found()
    uses: dict[float, float] = {}

    def try_rate(rate: float, by: Trial) -> float:
        use = by(rate)
        uses[rate] = max(use, uses.get(rate, 0.0))
        found.trials.append((rate, use))
        return use

    rate = start
    confirmed: set[float] = set()
    while len(found.trials) < _MAX_TRIALS:
        if try_rate(rate, trial) <= 1:
            found.holds = rate
        else:
            found.misses = rate
            found.holds = None if found.holds is not None and found.holds >= rate else found.holds
        while _is_narrow(found, resolution) and found.holds not in confirmed and len(found.trials) < _MAX_TRIALS:
            assert found.holds is not None
            if try_rate(found.holds, confirm) <= 1:
                confirmed.add(found.holds)
            else:
                found.misses = found.holds
                found.holds = max((r for r, use in uses.items() if use <= 1 and r < found.misses), default=None)
        if _is_narrow(found, resolution) and found.holds in confirmed:
            return found
        rate = _next(found, uses)
        if rate < lowest:
            break
    return found


def _is_narrow(found: Found, resolution: float) -> bool:
    return found.holds is not None and found.misses is not None and found.misses <= found.holds * (1 + resolution)


def _next(found: Found, uses: dict[float, float]) -> float:
    if found.misses is None:
        assert found.holds is not None
        return found.holds * _GROWTH
    if found.holds is None:
        return found.misses / _GROWTH
    low, high = math.log(found.holds), math.log(found.misses)
    below, above = uses[found.holds], uses[found.misses]
    # Where a straight line reaches the limit, but never so close to an end that the bracket hardly shrinks.
    share = 0.5 if math.isinf(above) or above <= below else (1 - below) / (above - below)
    return math.exp(low + (high - low) * min(0.75, max(0.25, share)))
