"""The unary front before a fake ensemble: one response each, errors without noise, and calls that can be stopped."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest

from tests.unit import fake_pb_utils, fake_triton
from tests.unit.fake_pb_utils import InferenceResponse, Tensor, TritonError, texts
from tests.unit.fake_triton import MetricFamily, Request

fake_triton.install()

from python_backend import bls_threads  # noqa: E402
from python_backend.triton import unary  # noqa: E402


class FakeServer:
    """Answers BLS calls; calls to the ensemble wait until `release` when a test holds them."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.release = threading.Event()
        self.release.set()
        self.answer: list[Any] = [reply([Tensor("text_output", texts("fine"))])]

    def request(self, **options: Any) -> Any:
        server = self

        class Call:
            def exec(self, decoupled: bool) -> Any:
                assert decoupled
                server.calls.append(options)
                if options["model_name"] == "tensorrt_llm":
                    server.release.set()
                    return iter([reply([])])
                assert server.release.wait(5)
                return iter(server.answer)

        return Call()


def reply(tensors: list[Tensor], error: TritonError | None = None) -> Any:
    """A response as BLS gives it."""

    class Reply(InferenceResponse):
        def has_error(self) -> bool:
            return error is not None

        def error(self) -> Any:
            return error

        def output_tensors(self) -> list[Tensor]:
            return tensors

    return Reply.__new__(Reply)


@pytest.fixture
def fake_server(monkeypatch):
    server = FakeServer()
    monkeypatch.setattr(fake_pb_utils, "InferenceRequest", server.request)
    return server


@pytest.fixture
def model(fake_server):
    model = unary.TritonPythonModel()
    model.initialize({"model_name": "ensemble_unary", "model_version": "1"})
    yield model
    fake_server.release.set()
    model.finalize()


def ask(model: unary.TritonPythonModel, id: str = "", **tensors: Any) -> Request:
    values = {"text_input": texts("hello"), "max_tokens": np.array([[5]], np.int32), **tensors}
    request = Request({name: np.asarray(value) for name, value in values.items()}, id, ("text_output",))
    request.params = '{"min_length": 3}'
    request.timeout_us = 7
    model.execute([request])
    return request


def test_a_call_is_forwarded_whole_and_answered_once(model, fake_server):
    (response,) = ask(model, id="mine").sender.wait()
    assert response["text_output"].tolist() == [[b"fine"]]
    (call,) = fake_server.calls
    assert call["model_name"] == "ensemble"
    assert call["request_id"] == "mine"
    assert call["requested_output_names"] == ["text_output"]
    assert call["parameters"] == {"min_length": 3}
    assert call["timeout"] == 7
    assert [tensor.name() for tensor in call["inputs"]] == ["text_input", "max_tokens"]


def test_calls_without_an_id_get_ids_of_their_own(model, fake_server):
    for request in [ask(model), ask(model)]:
        request.sender.wait()
    first, second = (call["request_id"] for call in fake_server.calls)
    assert first
    assert first != second


def test_an_error_comes_without_the_ensembles_prefix_and_with_its_code(model, fake_server):
    error = TritonError("in ensemble 'ensemble', temperature is -1.0; allowed: >= 0.", TritonError.INVALID_ARG)
    fake_server.answer = [reply([], error)]
    found = ask(model).sender.error
    assert found.message() == "temperature is -1.0; allowed: >= 0."
    assert found.code() == TritonError.INVALID_ARG


def test_an_empty_last_response_is_not_the_answer(model, fake_server):
    fake_server.answer = [*fake_server.answer, reply([])]
    (response,) = ask(model).sender.wait()
    assert response["text_output"].tolist() == [[b"fine"]]


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"stream": [[True]]}, "Streaming is only supported if model is deployed using decoupled mode."),
        ({"max_tokens": [[1], [2]]}, "Batch size > 1 requires the tensorrt_llm backend"),
        ({"num_return_sequences": [[2]]}, "num_return_sequences > 1 requires the tensorrt_llm backend"),
    ],
)
def test_what_has_several_responses_is_refused_and_not_forwarded(model, fake_server, tensors, text):
    assert ask(model, **tensors).sender.error.message().startswith(text)
    assert fake_server.calls == []


def test_beams_have_one_response_and_are_forwarded(model):
    (response,) = ask(model, num_return_sequences=[[2]], beam_width=[[2]]).sender.wait()
    assert response.error is None


def test_a_call_whose_client_is_gone_is_stopped_by_its_id(model, fake_server):
    fake_server.release.clear()
    request = ask(model, id="gone")
    request.sender.cancelled = True
    request.sender.wait()
    stops = [call for call in fake_server.calls if call["model_name"] == "tensorrt_llm"]
    assert stops
    assert {call["request_id"] for call in stops} == {"gone"}
    assert {tensor.name() for tensor in stops[0]["inputs"]} == {
        "input_ids",
        "input_lengths",
        "request_output_len",
        "stop",
    }


def test_calls_that_run_do_not_keep_a_stop_from_getting_through_and_what_has_not_run_is_dropped(
    fake_server, monkeypatch
):
    monkeypatch.setattr(unary, "MAX_REQUESTS", 2)
    monkeypatch.setattr(bls_threads, "for_long_answers", lambda: 1)
    fake_server.release.clear()
    model = unary.TritonPythonModel()
    model.initialize({"model_name": "ensemble_unary", "model_version": "1"})
    runs, waits = ask(model, id="runs"), ask(model, id="waits")
    waits.sender.cancelled = runs.sender.cancelled = True
    for request in (runs, waits):
        request.sender.wait()
    assert {(call["model_name"], call["request_id"]) for call in fake_server.calls} == {
        ("ensemble", "runs"),
        ("tensorrt_llm", "runs"),
    }
    model.finalize()


def refused(code: str) -> float:
    return MetricFamily.values.get(("llm_requests_refused_total", ("1", code, "ensemble_unary")), 0)


def test_only_what_is_refused_here_is_counted_and_no_question_about_health(model, fake_server):
    before = refused("INVALID_ARG")
    fake_server.answer = [reply([], TritonError("too long", TritonError.INVALID_ARG))]
    assert ask(model).sender.error.message() == "too long"
    stream = {"stream": np.array([[True]]), "max_tokens": np.array([[1]], np.int32)}
    model.execute([question := Request(stream, params='{"health": true}')])
    assert question.sender.error.code() == TritonError.INVALID_ARG
    assert refused("INVALID_ARG") == before
    model.execute([Request(stream)])
    assert refused("INVALID_ARG") == before + 1


def test_the_trace_goes_along_as_a_parameter(fake_server, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    model = unary.TritonPythonModel()
    model.initialize({"model_name": "ensemble_unary", "model_version": "1"})
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for context in (json.dumps({"traceparent": parent}), ""):
        request = TracedRequest({"max_tokens": np.array([[1]], np.int32)})
        request.context = context
        model.execute([request])
        request.sender.wait()
    model.finalize()
    assert [call["parameters"] for call in fake_server.calls] == [{"traceparent": parent}, {}]


class TracedRequest(Request):
    """One that Triton traces, or not."""

    context = ""

    def trace(self) -> Any:
        return self

    def get_context(self) -> str:
        return self.context


def test_more_calls_than_threads_are_refused_at_once(model, fake_server, monkeypatch):
    before = refused("UNAVAILABLE")
    monkeypatch.setattr(unary, "MAX_REQUESTS", 2)
    fake_server.release.clear()
    running = [ask(model) for _ in range(2)]
    rejected = ask(model)
    assert rejected.sender.final.is_set()
    assert rejected.sender.error.code() == TritonError.UNAVAILABLE
    assert refused("UNAVAILABLE") == before + 1
    fake_server.release.set()
    for request in running:
        request.sender.wait()
    assert ask(model).sender.wait()
