"""Small tensors are made once; large ones and other types are not kept."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit import fake_triton

fake_triton.install()

from python_backend.triton.tensors import TensorCache  # noqa: E402


def ints(*values):
    return np.array([[values]], np.int32)


def test_equal_small_tensors_are_one_object_and_others_are_not():
    cache = TensorCache()
    one = cache.make("output_ids", ints(7))
    assert cache.make("output_ids", ints(7)) is one
    assert cache.make("output_ids", ints(8)) is not one
    assert cache.make("sequence_length", ints(7)) is not one
    assert cache.make("output_ids", ints(7).reshape(1, 1)) is not one
    assert one.as_numpy().tolist() == [[[7]]]


@pytest.mark.parametrize("array", [ints(1, 2, 3, 4, 5), np.array([[1.0]], np.float32), np.array([[b"x"]], object)])
def test_large_tensors_and_other_types_are_made_anew(array):
    cache = TensorCache()
    assert cache.make("x", array) is not cache.make("x", array)


def test_the_ones_used_last_are_kept():
    cache = TensorCache(capacity=2)
    first, second = (cache.make("x", ints(n)) for n in (1, 2))
    assert cache.make("x", ints(1)) is first
    cache.make("x", ints(3))  # drops 2
    assert cache.make("x", ints(1)) is first
    assert cache.make("x", ints(2)) is not second
