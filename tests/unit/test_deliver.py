"""The delivering thread when something goes wrong: each prompt is counted once, and nobody else is harmed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit import fake_triton
from tests.unit.fake_triton import Sender

fake_triton.install()

from python_backend.engine.output import RequestOutput, SequenceOutput  # noqa: E402
from python_backend.errors import EngineFailure  # noqa: E402
from python_backend.request import GenerationRequest, SamplingParams  # noqa: E402
from python_backend.triton.deliver import Deliverer  # noqa: E402
from python_backend.triton.inflight import Answer, InFlight, Part  # noqa: E402


class BrokenSender(Sender):
    """Cannot send responses with tensors, or nothing at all."""

    def __init__(self, errors_too: bool = False) -> None:
        super().__init__()
        self._errors_too = errors_too

    def send(self, response: Any = None, flags: int = 0) -> None:
        if self._errors_too or response.error is None:
            raise RuntimeError("no shared memory is left")
        super().send(response, flags)


class Writer:
    """In the place of a responder."""

    def arrays(self, event: RequestOutput) -> list[tuple[str, Any]]:
        return [("output_ids", np.array(event.sequences[0].token_ids, np.int32))]


class Desk:
    """A deliverer, and what it tells."""

    def __init__(self) -> None:
        self.in_flight = InFlight()
        self.cancelled: list[str] = []
        self.counted: list[tuple[str, str | None, int, Exception | None]] = []
        self.deliverer = Deliverer(self.in_flight, self.cancelled.append, self.count, lambda answer: None)

    def count(self, event: RequestOutput, part: Part) -> None:
        self.counted.append((part.request.request_id, part.finish_reason, part.output_tokens, part.error))

    def answer(self, sender: Sender, *engine_ids: str) -> dict[str, GenerationRequest]:
        requests = {name: GenerationRequest(name, [1], SamplingParams(max_tokens=9)) for name in engine_ids}
        parts: dict[str, Any] = {name: Part(request, Writer()) for name, request in requests.items()}  # type: ignore[arg-type]
        self.in_flight.add(Answer("", sender, parts))
        return requests

    def run(self, *events: RequestOutput) -> None:
        self.deliverer.start()
        for event in events:
            self.deliverer.put([event])
        self.deliverer.stop()


def news(request: GenerationRequest, reason: Any = None, tokens: int = 1) -> RequestOutput:
    return RequestOutput(request, [SequenceOutput(0, [5] * tokens, [], reason)], finished=reason is not None)


def failure(request: GenerationRequest, error: EngineFailure) -> RequestOutput:
    return RequestOutput(request, [], finished=True, error=error)


def test_a_prompt_whose_response_cannot_be_sent_is_cancelled_and_counted_once_as_an_error():
    desk, sender = Desk(), BrokenSender()
    request = desk.answer(sender, "a")["a"]
    desk.run(news(request), news(request), news(request, "cancelled", tokens=3))
    assert desk.cancelled == ["a"]
    ((name, _, tokens, error),) = desk.counted
    assert (name, tokens) == ("a", 3)
    assert isinstance(error, RuntimeError)
    assert "no shared memory is left" in sender.error.message()


@pytest.mark.parametrize("errors_too", [False, True])
def test_a_last_response_that_cannot_be_sent_is_an_error_and_harms_no_other(errors_too):
    desk, sender, other = Desk(), BrokenSender(errors_too), Sender()
    request, good = desk.answer(sender, "a")["a"], desk.answer(other, "b")["b"]
    desk.run(news(request, "length"), news(good, "length"))
    assert [(name, error is None) for name, _, _, error in desk.counted] == [("a", False), ("b", True)]
    assert sender.final.is_set() is not errors_too
    assert other.final.is_set()


def test_prompts_beside_one_that_fails_are_cancelled_and_counted_when_they_have_ended():
    desk, sender, error = Desk(), Sender(), EngineFailure("broken")
    requests = desk.answer(sender, "a", "b", "c", "d")
    desk.run(
        news(requests["d"], "stop", tokens=2),
        failure(requests["b"], error),
        news(requests["a"]),
        news(requests["a"], "cancelled", tokens=4),
        news(requests["c"], "length", tokens=9),
    )
    assert set(desk.cancelled) >= {"a", "c"}
    assert desk.counted == [
        ("d", "stop", 2, None),
        ("b", None, 0, error),
        ("a", "cancelled", 4, None),
        ("c", "length", 9, None),
    ]
    assert [response.error is None for response in sender.responses] == [True, False]


def test_a_count_that_fails_harms_nobody(monkeypatch):
    desk, sender, other = Desk(), Sender(), Sender()
    request, good = desk.answer(sender, "a")["a"], desk.answer(other, "b")["b"]
    count = desk.count
    monkeypatch.setattr(
        desk.deliverer, "_on_part_ended", lambda event, part: 1 / 0 if event.request is request else count(event, part)
    )
    desk.run(news(request, "length"), news(good, "length"))
    assert [len(s.responses) for s in (sender, other)] == [1, 1]
    assert [name for name, *_ in desk.counted] == ["b"]


def test_what_is_refused_after_a_part_of_it_was_submitted_is_not_counted():
    desk, sender = Desk(), Sender()
    requests = desk.answer(sender, "a", "b")
    for answer in desk.in_flight.answers():
        desk.in_flight.drop(answer)
    desk.run(news(requests["a"], "cancelled"))
    assert desk.counted == []
    assert sender.responses == []
