"""The search for the highest rate: on servers whose limit is known, with and without noise."""

from __future__ import annotations

import math
import random

import pytest

from loadtests.search import RESOLUTION, Found, find_max


def server(limit: float, noise: float = 0.0, seed: int = 0):
    """Uses its limit by the square of the rate, and collapses at twice the limit."""
    rng = random.Random(seed)

    def trial(rate: float) -> float:
        if rate > 2 * limit:
            return math.inf
        return (rate / limit) ** 2 * (1 + rng.uniform(-noise, noise))

    return trial


def found_for(limit: float, start: float, noise: float = 0.0, seed: int = 0) -> Found:
    trial = server(limit, noise, seed)
    return find_max(trial, trial, start)


@pytest.mark.parametrize("start", [0.1, 1.0, 3.0, 40.0])
def test_the_limit_is_found_from_anywhere(start: float) -> None:
    found = found_for(2.75, start)
    assert found.holds is not None
    assert found.holds <= 2.75 < found.misses <= found.holds * (1 + RESOLUTION)
    assert len(found.trials) <= 16


@pytest.mark.parametrize("seed", range(6))
def test_two_noisy_searches_agree_within_ten_percent(seed: int) -> None:
    one, two = (found_for(2.0, 1.3, noise=0.06, seed=2 * seed + k) for k in range(2))
    assert one.holds is not None
    assert two.holds is not None
    assert abs(one.holds / two.holds - 1) < 0.10


def test_both_ends_were_tried_twice() -> None:
    found = found_for(2.0, 1.0)
    rates = [rate for rate, _ in found.trials]
    assert rates.count(found.holds) == rates.count(found.misses) == 2


def test_a_bad_moment_does_not_hide_the_rates_above_it() -> None:
    """The first two trials fail, whatever the rate: the machine was busy with something else."""
    honest = server(3.2)
    count = 0

    def trial(rate: float) -> float:
        nonlocal count
        count += 1
        return 3.0 if count <= 2 else honest(rate)

    found = find_max(trial, honest, 2.0)
    assert found.holds is not None
    assert found.holds == pytest.approx(3.2, rel=0.06)


def test_a_rate_that_fails_when_it_is_tried_again_does_not_hold() -> None:
    confirmations: list[float] = []

    def confirm(rate: float) -> float:
        confirmations.append(rate)
        return (rate / 1.8) ** 2  # harder than the first trials, which allow 2.0

    found = find_max(server(2.0), confirm, 1.0)
    assert found.holds is not None
    assert found.holds <= 1.8 < confirmations[0]
    assert found.misses <= confirmations[0]


def test_a_server_that_holds_nothing_ends_the_search() -> None:
    found = find_max(lambda _: math.inf, lambda _: math.inf, 1.0, lowest=0.2)
    assert found.holds is None
    assert min(rate for rate, _ in found.trials) >= 0.2
    assert len(found.trials) == 4
