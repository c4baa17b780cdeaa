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
_GROWTH_LATER = 1.25  # when an end turned out to have been a bad moment
_MAX_TRIALS = 16
_CLOSE = 1.7
_WITH_EASE = 0.5


@dataclass(slots=True)
class Found:
    """`holds` met the SLO, twice; `misses`, at most RESOLUTION above it, did not, twice. None: not found."""

    holds: float | None = None
    misses: float | None = None
    trials: list[tuple[float, float]] = field(default_factory=list)  # rate, use


def find_max(
    trial: Trial, confirm: Trial, start: float, *, lowest: float = 0.0, resolution: float = RESOLUTION
) -> Found:
    """Bracket the limit, narrow the bracket, and try both of its ends again.

    A single trial is not believed: a lucky one would find too much, and a moment in which the machine was busy with
    something else would hide all rates above it.

    Args:
        trial: see Trial.
        confirm: a trial with other arrivals, and longer; what it says of a rate is what counts.
        start: the first rate, requests per second.
        lowest: a rate below which it is not worth looking.
        resolution: how close `holds` and `misses` have to be, as a share.
    """
    return _Search(trial, confirm, resolution).run(start, lowest)


class _Search:
    def __init__(self, trial: Trial, confirm: Trial, resolution: float) -> None:
        self._trial, self._confirm, self._resolution = trial, confirm, resolution
        self._uses: dict[float, float] = {}  # what is believed of each rate
        self._sure: set[float] = set()  # rates that were confirmed, either way
        self._growth = _GROWTH
        self._trials: list[tuple[float, float]] = []

    def run(self, start: float, lowest: float) -> Found:
        """Until both ends are sure, or the trials are used up."""
        rate = start
        while len(self._trials) < _MAX_TRIALS and rate >= lowest:
            self._try(rate, self._trial)
            while (doubtful := self._doubtful()) is not None and len(self._trials) < _MAX_TRIALS:
                self._try(doubtful, self._confirm)
                self._sure.add(doubtful)
                self._growth = _GROWTH_LATER
            if self._is_narrow():
                break
            rate = self._next()
        holds, misses = self._ends()
        return Found(holds if holds in self._sure else None, misses, self._trials)

    def _try(self, rate: float, by: Trial) -> None:
        self._uses[rate] = by(rate)
        self._trials.append((rate, self._uses[rate]))

    def _ends(self) -> tuple[float | None, float | None]:
        """The lowest rate believed to miss, and the highest below it that is believed to hold."""
        misses = min((rate for rate, use in self._uses.items() if use > 1), default=None)
        below = [rate for rate, use in self._uses.items() if use <= 1 and (misses is None or rate < misses)]
        return max(below, default=None), misses

    def _is_narrow(self) -> bool:
        holds, misses = self._ends()
        return holds is not None and misses is not None and misses <= holds * (1 + self._resolution)

    def _doubtful(self) -> float | None:
        """An end of a narrow bracket that was tried only once, or a miss close above a rate that held with ease."""
        holds, misses = self._ends()
        if self._is_narrow():
            return next((end for end in (holds, misses) if end is not None and end not in self._sure), None)
        if holds is None or misses is None or misses in self._sure:
            return None
        return misses if misses < holds * _CLOSE and self._uses[holds] < _WITH_EASE else None

    def _next(self) -> float:
        holds, misses = self._ends()
        if misses is None:
            assert holds is not None
            return holds * self._growth
        if holds is None:
            return misses / _GROWTH
        low, high = math.log(holds), math.log(misses)
        below, above = self._uses[holds], self._uses[misses]
        # Where a straight line reaches the limit, but never so close to an end that the bracket hardly shrinks.
        share = 0.5 if math.isinf(above) or above <= below else (1 - below) / (above - below)
        return math.exp(low + (high - low) * min(0.75, max(0.25, share)))
