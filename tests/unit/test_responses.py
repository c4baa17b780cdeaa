"""Responses of other models: taken as they come, and kept for a while after the last one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from python_backend.triton import responses
from python_backend.triton.responses import Kept, responses_to


class _Responses:
    """Triton's iterator: it may be gone through once."""

    def __init__(self) -> None:
        self._left = [1, 2, 3]

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if not self._left:
            raise StopIteration
        return self._left.pop(0)


class _Request:
    def __init__(self) -> None:
        self.made: list[weakref.ref[_Responses]] = []

    def exec(self, decoupled: bool) -> _Responses:
        assert decoupled
        found = _Responses()
        self.made.append(weakref.ref(found))
        return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(responses, "_kept", Kept(2.0, lambda: now[0]))
    return now


def ask(request: _Request, how_many: int = 3) -> list[int]:
    found = []
    for response in responses_to(request):
        found.append(response)
        if len(found) == how_many:
            break
    return found


@pytest.mark.parametrize("how_many", [1, 3], ids=["left early", "to the end"])
def test_the_iterator_outlives_its_last_response_by_two_seconds(clock: list[float], how_many: int) -> None:
    request = _Request()
    assert ask(request, how_many) == [1, 2, 3][:how_many]
    gc.collect()
    assert request.made[0]() is not None
    clock[0] += 1.9
    ask(request)
    assert request.made[0]() is not None
    clock[0] += 0.2
    ask(request)
    gc.collect()
    assert [made() is None for made in request.made] == [True, False, False]


def test_responses_come_one_by_one(clock: list[float]) -> None:
    responses = responses_to(_Request())
    assert next(responses) == 1
    assert list(responses) == [2, 3]
