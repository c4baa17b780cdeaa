"""The search for the highest rate that still meets the SLO.

Knows nothing of requests: a trial takes a rate and says how much of the tightest limit it used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Trial = Callable[[float], float]
"""A rate -> measured / limit of the worst check: up to 1 the SLO is met. Infinite when nothing could be measured."""

MARGIN = 0.03
_GROWTH = 1.6
_LEAP, _AFAR = 3.0, 4.0  # where the use is so many times below or above 1
_ASIDE = 1.05  # trials are made this much below and above the limit as it is known by then, in turns
_MAX_TRIALS = 14
_ENOUGH = 8  # trials near the limit
_CLIP = 0.4  # in the logarithm of the use: beyond it a trial says "far below" or "far above", and not how far
_NEAR, _FAR = 0.2, 0.1  # what is further away, in the logarithm of the rate, has so much weight
_SLOPES = 0.6 * 1.1 ** np.arange(30)
_USUAL_SLOPE, _USUAL_WEIGHT = 1.2, 0.02  # what is believed of a server before the first trial
_STEPS = 201
_RESAMPLES = 100
_EASE = 0.5  # use of a trial that holds with ease


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where the SLO is just met, and the line that says so: use = (any rate / rate) ** slope."""

    rate: float  # requests per second
    margin: float  # its standard error, as a share of it
    slope: float


@dataclass(slots=True)
class Found:
    """`limit` is the figure; `holds` the highest rate below it that met the SLO, `misses` the lowest above it that did
    not. None: not found.
    """

    limit: Crossing | None = None
    holds: float | None = None
    misses: float | None = None
    trials: list[tuple[float, float]] = field(default_factory=list)  # rate, use


def find_max(
    trial: Trial, start: float, *, lowest: float = 0.0, margin: float = MARGIN, found: Found | None = None
) -> Found:
    """Bracket the limit, then try rates around it until a line through all trials says where it is.

    No single trial decides: a lucky one would find too much, and a moment in which the machine was busy with something
    else would hide all rates above it.

    Args:
        trial: see Trial.
        start: the first rate, requests per second.
        lowest: a rate below which it is not worth looking.
        margin: the standard error to reach, as a share; the search ends after 14 trials in any case.
        found: filled after every trial, for who wants to know before the end.
    """
    found = Found() if found is None else found
    believed: list[tuple[float, float]] = []
    rate, doubtful = start, None
    while len(found.trials) < _MAX_TRIALS and rate >= lowest:
        found.trials.append((rate, trial(rate)))
        believed = [seen for seen in believed if seen[0] != doubtful] + found.trials[-1:]
        _sum_up(found, believed)
        doubtful = None
        if found.limit is None:
            rate = _beyond(believed)
        elif (doubtful := _doubtful(found.trials)) is not None:
            rate = doubtful
        elif found.limit.margin <= margin:
            break
        else:
            rate = found.limit.rate * (_ASIDE if len(found.trials) % 2 else 1 / _ASIDE)
    return found


def _sum_up(found: Found, believed: Sequence[tuple[float, float]]) -> None:
    met = [rate for rate, use in believed if use <= 1]
    missed = [rate for rate, use in believed if use > 1]
    found.limit = crossing(believed) if met and missed else None
    limit = found.limit.rate if found.limit else None
    found.holds = max((rate for rate in met if limit is None or rate <= limit), default=None)
    found.misses = min((rate for rate in missed if limit is None or rate >= limit), default=None)


def _beyond(believed: Sequence[tuple[float, float]]) -> float:
    """The next rate, when all trials were on one side of the limit."""
    highest, use = max(believed)
    if use <= 1:
        return highest * (_LEAP if use * _AFAR < 1 else _GROWTH)
    least, use = min(believed)
    return least / (_LEAP if use > _AFAR else _GROWTH)


def crossing(trials: Sequence[tuple[float, float]]) -> Crossing:
    """Where a line through the trials reaches 1, both axes logarithmic, uses beyond ±0.4 clipped, and so is the line.

    It is the line with the least sum of absolute deviations, which a few bad moments do not move; of equal ones the
    middle. It is found twice: among all, then near the first one with little weight for the trials far from it. The
    margin is the standard deviation over 100 resamples of the trials (Efron's bootstrap); infinite below 8 near ones.
    """
    rates = np.log([rate for rate, _ in trials])
    uses = np.clip(np.log([max(use, 1e-9) for _, use in trials]), -_CLIP, _CLIP)
    everywhere = _Lines(rates, uses, np.linspace(rates.min(), rates.max(), _STEPS))
    _, (first,) = everywhere.best(np.ones((1, len(rates))))
    nearby = _Lines(rates, uses, first + np.linspace(-_NEAR, _NEAR, _STEPS))
    near = np.abs(rates - first) < _NEAR
    weights = np.where(near, 1.0, _FAR)
    (slope,), (where,) = nearby.best(weights[None])
    margin = math.inf
    if near.sum() >= _ENOUGH:
        drawn = np.random.default_rng(0).multinomial(len(rates), np.full(len(rates), 1 / len(rates)), size=_RESAMPLES)
        margin = float(nearby.best(drawn * weights)[1].std())
    return Crossing(math.exp(where), margin, float(slope))


class _Lines:
    """A grid of lines, by slope and place of their crossing, and how far each trial is from each of them."""

    def __init__(self, rates: Array, uses: Array, places: Array) -> None:
        lines = np.clip(_SLOPES[:, None, None] * (rates - places[:, None]), -_CLIP, _CLIP)
        self._places = places
        self._off = np.abs(uses - lines).reshape(-1, len(rates))
        self._unusual = np.repeat(_USUAL_WEIGHT * np.abs(np.log(_SLOPES / _USUAL_SLOPE)), len(places))[:, None]

    def best(self, weights: Array) -> tuple[Array, Array]:
        """Slope and place of the best line for each row of weights, float64 [n, trials]."""
        loss = np.round(self._off @ weights.T + self._unusual, 9)  # equal lines are equal
        low = loss.argmin(axis=0)
        slopes, first = np.divmod(low, len(self._places))
        of_slope = loss.reshape(len(_SLOPES), len(self._places), -1)[slopes, :, np.arange(len(slopes))]
        last = len(self._places) - 1 - of_slope[:, ::-1].argmin(axis=1)
        return _SLOPES[slopes], (self._places[first] + self._places[last]) / 2


def _doubtful(trials: Sequence[tuple[float, float]]) -> float | None:
    """A miss by far, a little above a rate that held with ease: a moment, perhaps, in which the machine was busy."""
    rate, use = min((trial for trial in trials if trial[1] > 1), key=lambda trial: trial[0])
    with_ease = max((tried for tried, seen in trials if seen < _EASE and tried < rate), default=0.0)
    once = [tried for tried, _ in trials].count(rate) == 1
    return rate if once and use > 1 / _EASE and rate <= _GROWTH * with_ease * 1.01 else None
