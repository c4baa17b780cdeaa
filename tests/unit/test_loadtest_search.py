"""The search for the highest rate: on servers whose limit is known, with and without noise."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.search import MARGIN, Found, crossing, find_max

MOST = 14


def server(
    limit: float, noise: float = 0.0, seed: int = 0, stalls: float = 0.0, slope: float = 2.0
) -> Callable[[float], float]:
    """Uses its limit by a power of the rate, and collapses at twice the limit."""
    rng = random.Random(seed)

    def trial(rate: float) -> float:
        if rate > 2 * limit:
            return math.inf
        stalled = 2.5 if rng.random() < stalls else 1.0
        return stalled * math.pow(rate / limit, slope) * math.exp(rng.gauss(0, noise))

    return trial


def limit_of(trial: Callable[[float], float], start: float) -> float:
    found = find_max(trial, start)
    assert found.limit is not None
    return found.limit.rate


@pytest.mark.parametrize("start", [0.1, 1.0, 3.0, 40.0])
@pytest.mark.parametrize("slope", [0.8, 1.0, 2.0, 6.0])
def test_the_limit_is_found_from_anywhere(start: float, slope: float) -> None:
    found = find_max(server(2.75, slope=slope), start)
    assert found.limit is not None
    assert found.limit.rate == pytest.approx(2.75, rel=0.03)
    assert found.limit.margin <= MARGIN
    assert found.holds is not None
    assert found.misses is not None
    assert 2.75 / 1.1 < found.holds <= found.limit.rate <= found.misses < 2.75 * 1.1
    assert len(found.trials) <= MOST


def test_searches_of_a_noisy_server_agree_within_ten_percent() -> None:
    """20 pairs; a trial is off by 6 % as a rule, and one in twenty stalls."""
    pairs = [[limit_of(server(2.0, 0.06, 2 * seed + k, 0.05, 1.0), 1.3) for k in range(2)] for seed in range(20)]
    apart = [abs(math.log(one / two)) for one, two in pairs]
    assert sum(distance < math.log(1.1) for distance in apart) >= 18
    assert sum(map(sum, pairs)) / 40 == pytest.approx(2.0, rel=0.03)


def test_the_margin_says_how_far_the_limit_is_off() -> None:
    """A standard error: about two of three searches are closer than it; few are further off than twice."""
    found = [find_max(server(2.0, 0.08, seed, slope=1.0), 1.3).limit for seed in range(40)]
    off = [abs(math.log(limit.rate / 2.0)) / limit.margin for limit in found if limit is not None]
    assert len(off) == 40
    assert sum(distance < 1 for distance in off) / 40 > 0.4
    assert sum(distance < 2 for distance in off) / 40 > 0.7


def test_a_bad_moment_at_the_beginning_does_not_hide_the_rates_above_it() -> None:
    """The first two trials fail, whatever the rate: the machine was busy with something else."""
    honest = server(3.2)
    count = 0

    def trial(rate: float) -> float:
        nonlocal count
        count += 1
        return 3.0 if count <= 2 else honest(rate)

    assert limit_of(trial, 2.0) == pytest.approx(3.2, rel=0.06)


def test_a_limit_that_comes_all_at_once_is_bracketed() -> None:
    """Errors, say: none up to a rate, and far too many beyond it."""
    assert limit_of(lambda rate: 0.0 if rate <= 1.7 else math.inf, 1.0) == pytest.approx(1.7, rel=0.08)


def test_what_is_known_by_then_can_be_asked_for_at_any_time() -> None:
    """Somebody ends the search after eight trials."""
    known = Found()
    honest = server(2.0, slope=1.0)

    def trial(rate: float) -> float:
        if len(known.trials) == 8:
            raise KeyboardInterrupt
        return honest(rate)

    with pytest.raises(KeyboardInterrupt):
        find_max(trial, 1.0, margin=0.0, found=known)
    assert known.limit is not None
    assert known.limit.rate == pytest.approx(2.0, rel=0.03)
    assert known.holds is not None
    assert known.misses is not None
    assert known.holds <= known.limit.rate <= known.misses


def test_a_server_that_holds_nothing_ends_the_search() -> None:
    found = find_max(lambda _: math.inf, 1.0, lowest=0.2)
    assert (found.limit, found.holds) == (None, None)
    assert min(rate for rate, _ in found.trials) >= 0.2
    assert found.misses == min(rate for rate, _ in found.trials)
    assert len(found.trials) == 2


def test_a_server_that_holds_everything_ends_the_search() -> None:
    found = find_max(lambda _: 0.1, 1.0)
    assert (found.limit, found.misses) == (None, None)
    assert found.holds == max(rate for rate, _ in found.trials)
    assert len(found.trials) == MOST


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0.01, 1e4), st.one_of(st.floats(0, 100), st.just(math.inf))), min_size=2))
def test_every_set_of_trials_has_a_crossing(trials: list[tuple[float, float]]) -> None:
    found = crossing(trials)
    assert 0 < found.rate < math.inf
    assert found.margin >= 0


@settings(max_examples=30)
@given(limit=st.floats(0.05, 500), slope=st.floats(0.7, 5), scale=st.floats(0.1, 10))
def test_a_crossing_scales_with_the_rates(limit: float, slope: float, scale: float) -> None:
    rates = [limit * (0.8 + 0.05 * step) for step in range(9)]
    one = crossing([(rate, (rate / limit) ** slope) for rate in rates])
    two = crossing([(scale * rate, (rate / limit) ** slope) for rate in rates])
    assert one.rate == pytest.approx(limit, rel=0.02)
    assert two.rate == pytest.approx(scale * one.rate)


def test_nothing_tried_is_nothing_found() -> None:
    assert find_max(lambda _: 1.0, 0.1, lowest=0.2) == Found()
