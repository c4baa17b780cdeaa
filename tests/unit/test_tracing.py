"""Spans of a request in the engine, from its record; whatever did not happen has none."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra `tracing` is not installed")

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from python_backend.errors import EngineFailure, InvalidRequest
from python_backend.request import GenerationRequest, SamplingParams
from python_backend.telemetry.requests import RequestRecord
from python_backend.telemetry.tracing import Tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def spans(exporter, *, scheduled=0, first=0, last=0, error=None):
    tracing = Tracing(exporter)
    now = time.monotonic_ns()
    request = GenerationRequest("1", [1, 2, 3], SamplingParams(max_tokens=8))
    record = RequestRecord(
        input_tokens=3,
        output_tokens=5,
        finish_reason="error" if error else "stop",
        arrival_ns=now,
        first_scheduled_ns=scheduled and now + scheduled,
        first_token_ns=first and now + first,
        last_token_ns=last and now + last,
        end_ns=now + 100,
    )
    tracing.request(PARENT, "demo", request, record, error)
    tracing.stop()
    finished = {span.name: span for span in exporter.get_finished_spans()}
    start = finished["text_completion demo"].start_time
    times = {name: (span.start_time - start, span.end_time - start) for name, span in finished.items()}
    return finished, times


def test_the_phases_follow_each_other(exporter):
    finished, times = spans(exporter, scheduled=10, first=30, last=90)
    assert times == {
        "text_completion demo": (0, 100),
        "queue": (0, 10),
        "prefill": (10, 30),
        "decode": (30, 90),
    }
    whole = finished["text_completion demo"]
    assert format(whole.parent.span_id, "016x") == "b7ad6b7169203331"
    assert {span.context.trace_id for span in finished.values()} == {whole.context.trace_id}


def test_a_request_that_was_never_scheduled_was_in_the_queue_to_its_end(exporter):
    assert spans(exporter)[1] == {"text_completion demo": (0, 100), "queue": (0, 100)}


def test_a_request_that_failed_in_its_prompt_has_no_decode_and_the_error(exporter):
    finished, times = spans(exporter, scheduled=10, error=EngineFailure("broken"))
    assert times == {"text_completion demo": (0, 100), "queue": (0, 10), "prefill": (10, 100)}
    whole = finished["text_completion demo"]
    assert whole.attributes["error.type"] == "EngineFailure"
    assert not whole.status.is_ok


def test_a_refused_request_has_a_span_with_the_error_and_no_phases(exporter):
    tracing = Tracing(exporter)
    tracing.refused(PARENT, "demo", InvalidRequest("temperature is -1"))
    tracing.stop()
    (span,) = exporter.get_finished_spans()
    assert span.name == "text_completion demo"
    assert format(span.parent.span_id, "016x") == "b7ad6b7169203331"
    assert dict(span.attributes) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "triton_llm_stack",
        "gen_ai.request.model": "demo",
        "error.type": "InvalidRequest",
    }
    assert not span.status.is_ok


def test_there_is_no_cost_without_prices_and_it_is_the_sum_with_them(exporter, monkeypatch):
    assert "triton_llm.cost" not in spans(exporter)[0]["text_completion demo"].attributes
    monkeypatch.setenv("LLM_PRICE_PER_MILLION_OUTPUT_TOKENS", "10")
    assert spans(InMemorySpanExporter())[0]["text_completion demo"].attributes["triton_llm.cost"] == pytest.approx(
        50e-6
    )
