from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from python_backend.engine.candidates import (
    Candidates,
    draw,
    draw_from_row,
    padded_size,
    softmax_weights,
    top_k_ids,
    top_p_candidates,
    top_p_prefix,
)
from python_backend.engine.random_stream import RandomStream


def make_row(vocab: int, seed: int, scale: float, levels: int | None) -> np.ndarray:
    """A padded row of logits; with levels, rounded to few values so that ties abound."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(vocab) * scale
    if levels is not None:
        values = np.round(values * levels) / levels
    values[rng.random(vocab) < 0.1] = -np.inf
    values[0] = 0.0
    row = np.full(padded_size(vocab), -np.inf, dtype=np.float32)
    row[:vocab] = values
    return row


rows = st.builds(
    make_row,
    vocab=st.sampled_from([1, 2, 63, 511, 512, 513, 3000]),
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([0.0, 0.01, 1.0, 4.0, 20.0]),
    levels=st.sampled_from([None, 1, 3]),
)


@settings(max_examples=200, deadline=None)
@given(row=rows, k=st.sampled_from([1, 2, 5, 50, 511, 512, 2000]))
def test_top_k_is_the_head_of_the_sorted_row(row: np.ndarray, k: int) -> None:
    expected = [i for i in np.argsort(-row, kind="stable")[:k].tolist() if row[i] > -np.inf]
    assert top_k_ids(row, k).tolist() == expected


@settings(max_examples=200, deadline=None)
@given(row=rows, top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.99, 0.9999]))
def test_top_p_is_the_shortest_head_of_the_sorted_row_that_reaches_the_share(row: np.ndarray, top_p: float) -> None:
    weights = np.empty_like(row)
    total = float(softmax_weights(row, row.max(), out=weights).sum())
    found = top_p_candidates(weights, total, top_p).token_ids
    order = np.argsort(-weights, kind="stable")
    cumulative = np.cumsum(weights[order], dtype=np.float64)
    assert sorted(found.tolist()) == sorted(order[: len(found)].tolist())
    slack = 1e-5 * total  # the sum of all weights is rounded to float32
    assert cumulative[len(found) - 1] >= top_p * total - slack
    assert len(found) == 1 or cumulative[len(found) - 2] < top_p * total + slack


@pytest.mark.parametrize(("top_p", "expected"), [(0.01, 1), (0.5, 1), (0.51, 2), (0.8, 2), (0.81, 3), (1.0, 3)])
def test_a_prefix_ends_where_its_share_is_reached(top_p: float, expected: int) -> None:
    assert top_p_prefix(np.array([5.0, 3.0, 2.0]), top_p) == expected


def test_a_draw_takes_the_token_whose_share_covers_the_number() -> None:
    candidates = Candidates(np.array([7, 3, 9]), np.array([2.0, 0.0, 6.0]))
    assert [draw(candidates, uniform) for uniform in (0.0, 0.249, 0.25, 0.999)] == [7, 7, 9, 9]


@settings(max_examples=100, deadline=None)
@given(row=rows, uniform=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2**-53])))
def test_a_draw_from_a_row_never_gives_a_token_without_weight(row: np.ndarray, uniform: float) -> None:
    weights = np.empty_like(row)
    sums = softmax_weights(row, row.max(), out=weights)
    assert weights[draw_from_row(weights, sums, uniform)] > 0


def test_numbers_are_even_and_repeatable() -> None:
    numbers = np.array([RandomStream(5).uniform(step) for step in range(5000)])
    assert np.histogram(numbers, bins=10, range=(0, 1))[0] == pytest.approx(500, abs=90)
    assert numbers[17] == RandomStream(3, index=2).uniform(17)
    assert len(set(numbers.tolist())) == 5000


def test_the_first_numbers_of_neighbouring_seeds_are_unrelated() -> None:
    numbers = np.array([RandomStream(seed).uniform(0) for seed in range(5000)])
    assert np.histogram(numbers, bins=10, range=(0, 1))[0] == pytest.approx(500, abs=90)
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.06


def test_the_largest_seed_is_a_seed_like_any_other() -> None:
    assert 0 <= RandomStream(2**64 - 1, index=3).uniform(0) < 1
