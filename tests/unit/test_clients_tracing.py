"""Spans of the clients: one for each request, with the error that the caller gets, whatever the transport."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra `tracing` is not installed")

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import clients
from clients import tracing
from python_backend.telemetry import semconv
from tests.unit.client_fakes import FakeServer, Step, send
from tests.unit.client_runs import EVERY_CLIENT, generate, make_client, stream

_FULL = "Maximum queue size of 4 has been reached, please try again later"
FAILURES: dict[str, tuple[list[Step], dict[str, Any], type[clients.ClientError]]] = {
    "refused": (
        [Step("error", message="temperature is -1; allowed: >= 0.", code=grpc.StatusCode.INVALID_ARGUMENT)],
        {"temperature": -1.0},
        clients.RequestRefused,
    ),
    "full queue": (
        [Step("error", message=_FULL, code=grpc.StatusCode.UNAVAILABLE, http_status=503)],
        {},
        clients.QueueFull,
    ),
    "error in the stream": ([send("half"), Step("error", message="the engine fell over")], {}, clients.ServerFailure),
    "connection cut": ([send("a"), Step("cut")], {}, clients.StreamBroken),
    "rubbish": ([send("a"), Step("garbage"), Step("wait_for_stop")], {}, clients.StreamBroken),
    "no last response": ([send("a")], {}, clients.StreamBroken),
    "out of time": ([send("a"), Step("wait_for_stop")], {"timeout": 0.3}, clients.DeadlineExceeded),
    "out of time at once": ([Step("wait_for_stop")], {"timeout": 0.3}, clients.DeadlineExceeded),
    "stopped by another": ([send("a"), send("b", "cancelled")], {}, clients.Cancelled),
}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        running.inputs.remove("timeout_ms")  # keeps no time, so that the client has to
        yield running


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Where the spans of this test go; the program's one tracer provider stays as it is."""
    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return kept


def the_span(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exporter.get_finished_spans()
    return span


@EVERY_CLIENT
@pytest.mark.parametrize("what", FAILURES)
def test_a_request_that_fails_has_its_error_in_its_span(
    kind: str, what: str, server: FakeServer, exporter: InMemorySpanExporter
) -> None:
    steps, values, error = FAILURES[what]
    server.scripts["hi"] = steps
    with pytest.raises(error) as caught:
        stream(kind, server, "hi", **values)
    span = the_span(exporter)
    assert span.attributes is not None
    assert span.attributes["error.type"] == error.__name__
    assert span.status.status_code is trace.StatusCode.ERROR
    assert span.status.description == str(caught.value)


@EVERY_CLIENT
def test_a_request_that_nobody_listens_to_has_a_span_as_well(kind: str, exporter: InMemorySpanExporter) -> None:
    with FakeServer() as gone:
        pass
    with pytest.raises(clients.ServerUnavailable):
        generate(kind, gone, "hi")
    assert (the_span(exporter).attributes or {})["error.type"] == "ServerUnavailable"


def test_a_server_that_goes_away_between_two_requests_is_an_error_of_the_second(exporter: InMemorySpanExporter) -> None:
    with FakeServer() as server:
        client = make_client("grpc", server)
        server.scripts["hi"] = [send("a", "stop")]
        client.generate("hi")
    with client, pytest.raises(clients.ServerUnavailable):
        client.generate("hi")
    first, second = exporter.get_finished_spans()
    assert "error.type" not in (first.attributes or {})
    assert (second.attributes or {})["error.type"] == "ServerUnavailable"


@EVERY_CLIENT
def test_a_stream_that_its_reader_leaves_did_not_fail(
    kind: str, server: FakeServer, exporter: InMemorySpanExporter
) -> None:
    server.scripts["hi"] = [send("a"), Step("wait_for_stop"), send("b", "cancelled")]
    stream(kind, server, "hi", leave_after=1)
    span = the_span(exporter)
    assert "error.type" not in (span.attributes or {})
    assert span.status.status_code is trace.StatusCode.UNSET


def test_the_span_ends_with_the_failure_and_not_with_the_farewell(
    server: FakeServer, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threading.Event()
    server.scripts["hi"] = [Step("wait_for_stop")]
    with make_client("http", server) as client:
        monkeypatch.setattr(client, "stop", lambda _: told.set() if exporter.get_finished_spans() else None)
        with pytest.raises(clients.DeadlineExceeded):
            client.generate("hi", timeout=0.2, num_return_sequences=1)
    assert told.is_set()
    server.stop_event(server.seen[0].request_id).set()


@EVERY_CLIENT
def test_a_span_says_what_was_asked_of_whom_and_what_came(
    kind: str, server: FakeServer, exporter: InMemorySpanExporter
) -> None:
    server.scripts["hi"] = [send("ho", "length")]
    result = generate(kind, server, "hi", temperature=0.5, seed=7, max_tokens=3)
    span = the_span(exporter)
    assert span.name == "text_completion ensemble"
    assert dict(span.attributes or {}) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "triton_llm_stack",
        "gen_ai.request.model": "ensemble",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 7,
        "gen_ai.response.id": result.request_id,
        "gen_ai.response.finish_reasons": ("length",),
    }


def test_names_are_those_of_the_server() -> None:
    names = {name: value for name, value in vars(tracing).items() if name.isupper() and isinstance(value, str)}
    assert len(names) >= 12
    assert names == {name: getattr(semconv, name) for name in names}
