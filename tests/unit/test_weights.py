"""Rounding of matrices: by blocks of rows as all at once, exact where it has to be."""

from __future__ import annotations

import numpy as np
import pytest

from python_backend.engine.weights import BF16, FP8, Weight

ROWS = [1, 255, 256, 257, 700]


def matrix(rows: int) -> np.ndarray:
    values = np.random.default_rng(rows).normal(0, 0.1, (rows, 48)).astype(np.float32)
    values[0] = 0  # a row of nothing
    return values


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", [np.float32, np.float16, BF16], ids=str)
def test_int8_has_one_step_per_row_and_reaches_127(rows: int, kind: type) -> None:
    values = matrix(rows).astype(kind)
    wide = values.astype(np.float32)
    found = Weight(values).int8()
    assert found.scale is not None
    step = np.maximum(np.abs(wide).max(1, keepdims=True), 1e-12) / np.float32(127)
    np.testing.assert_array_equal(found.scale, step)
    np.testing.assert_array_equal(found.values, np.rint(wide / step))
    assert found.values.dtype == np.int8
    assert (np.abs(found.values[1:]).max(1, initial=127) == 127).all()
    assert (np.abs(found.float32() - wide) <= step * 0.5001).all()


@pytest.mark.parametrize("rows", ROWS)
def test_bfloat16_is_the_scaled_matrix_rounded_once(rows: int) -> None:
    plain, rounded = Weight(matrix(rows)), Weight(matrix(rows)).int8()
    np.testing.assert_array_equal(plain.bfloat16(), matrix(rows).astype(BF16))
    assert rounded.scale is not None
    np.testing.assert_array_equal(rounded.bfloat16(), (rounded.values.astype(np.float32) * rounded.scale).astype(BF16))
    stored = plain.bfloat16()
    assert Weight(stored).bfloat16() is stored


def test_fp8_codes_are_scaled_before_they_are_rounded_again() -> None:
    codes, scale = np.array([[1.0, -448.0], [0.5, 2.0]], np.float32).astype(FP8), np.array([[0.5], [2.0]], np.float32)
    weight = Weight(codes, scale)
    assert weight.float32().tolist() == [[0.5, -224.0], [1.0, 4.0]]
    assert weight.int8().values.tolist() == [[0, -127], [32, 127]]
