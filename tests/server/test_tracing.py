"""One trace from the client's span to the last step, as a local collector receives it; and nothing when it is off."""

from __future__ import annotations

import sys
import time

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra `tracing` is not installed")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from clients import GenerateRequest, GrpcClient, HttpClient, RequestRefused
from python_backend.telemetry import semconv
from tests.server.faulty import health, running
from tests.server.otlp_collector import Collector
from tests.server.wire import wait_until

WHOLE, ASKED = "text_completion tiny", "text_completion ensemble"
PHASES = (semconv.QUEUE, semconv.PREFILL, semconv.DECODE)
EVERY = {"InferRequest", "ensemble", "preprocessing", "tensorrt_llm", WHOLE, *PHASES, "postprocessing"}


@pytest.fixture(scope="module")
def client_spans():
    """Finished spans of this process, which traces as a program of a user would."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture(scope="module")
def traced(tiny_llm, client_spans):
    """Address and collector of a server that traces."""
    del client_spans
    with pytest.MonkeyPatch.context() as patch:
        collector = Collector()
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        patch.setenv("LLM_PRICE_PER_MILLION_INPUT_TOKENS", "2")
        patch.setenv("LLM_PRICE_PER_MILLION_OUTPUT_TOKENS", "10")
        with running(tiny_llm) as (_, server):
            yield server, collector
        collector.close()


REQUEST = GenerateRequest(text_input="Once upon a time", max_tokens=20, end_id=-1, temperature=0.5, seed=7)


def client_of(server, protocol, **options):
    return GrpcClient(server.grpc, **options) if protocol == "grpc" else HttpClient(server.http, **options)


def traced_call(collector, call):
    """Id of the trace that a call is part of; again where Triton has overlooked the metadata of a gRPC stream."""
    for _ in range(3):
        with trace.get_tracer("test").start_as_current_span("caller") as caller:
            call()
        trace_id = format(caller.get_span_context().trace_id, "032x")
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if "InferRequest" in {span.name for span in collector.of_trace(trace_id)}:
                return trace_id
            time.sleep(0.02)
    raise AssertionError("the server has written nothing into the traces of its clients")


def generate(server, collector, protocol):
    with client_of(server, protocol) as client:
        return traced_call(collector, lambda: list(client.stream(REQUEST)))


def the_span(collector, trace_id, name):
    """The one of that name in a trace, once it has come."""
    wait_until(lambda: name in {span.name for span in collector.of_trace(trace_id)}, timeout_s=30)
    (found,) = [span for span in collector.of_trace(trace_id) if span.name == name]
    return found


def client_span_of(client_spans, trace_id):
    spans = [span for span in client_spans.get_finished_spans() if format(span.context.trace_id, "032x") == trace_id]
    (found,) = [span for span in spans if span.name.startswith("text_completion")]
    return found


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_one_trace_holds_the_client_and_every_step_in_order(traced, client_spans, protocol):
    server, collector = traced
    client_spans.clear()
    trace_id = generate(server, collector, protocol)
    wait_until(lambda: {span.name for span in collector.of_trace(trace_id)} >= EVERY, timeout_s=30)
    spans = collector.of_trace(trace_id)
    named = {span.name: span for span in reversed(spans) if span.name in EVERY}

    for child, parent in (
        *((phase, WHOLE) for phase in PHASES),
        (WHOLE, "tensorrt_llm"),
        *((step, "ensemble") for step in ("preprocessing", "tensorrt_llm", "postprocessing")),
        ("ensemble", "InferRequest"),
    ):
        assert named[child].parent_id == named[parent].span_id, (child, parent)
    client_span = client_span_of(client_spans, trace_id)
    assert client_span.name == ASKED
    assert named["InferRequest"].parent_id == format(client_span.context.span_id, "016x")

    order = ["preprocessing", *PHASES]
    starts = [named[name].start_ns for name in order]
    assert starts == sorted(starts)
    assert named[semconv.QUEUE].end_ns == named[semconv.PREFILL].start_ns
    assert named[semconv.PREFILL].end_ns == named[semconv.DECODE].start_ns
    assert client_span.start_time <= starts[0]
    assert named[WHOLE].end_ns <= client_span.end_time + 50_000_000  # the span is closed once the answer has left


def test_attributes_have_the_names_of_the_conventions_and_a_cost_of_our_own(traced, client_spans):
    server, collector = traced
    client_spans.clear()
    trace_id = generate(server, collector, "grpc")
    whole = the_span(collector, trace_id, WHOLE)
    found = dict(whole.attributes)
    inputs = int(found.pop(semconv.USAGE_INPUT_TOKENS))
    assert found.pop(semconv.COST) == pytest.approx((2 * inputs + 10 * 20) / 1e6)
    assert found.pop(semconv.RESPONSE_TIME_TO_FIRST_CHUNK) > 0
    assert found.pop(semconv.RESPONSE_FINISH_REASONS)["values"] == [{"stringValue": "length"}]
    assert found == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "triton_llm_stack",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": "20",
        "gen_ai.request.choice.count": "1",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": "7",
        "gen_ai.usage.output_tokens": "20",
    }
    assert whole.service == "triton-llm-stack"
    assert client_span_of(client_spans, trace_id).attributes["gen_ai.response.finish_reasons"] == ("length",)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_refused_request_has_its_error_in_the_spans_of_client_and_engine(traced, client_spans, protocol):
    server, collector = traced
    client_spans.clear()

    def call():
        with client_of(server, protocol) as client, pytest.raises(RequestRefused, match="temperature is -1"):
            client.generate("Once upon a time", temperature=-1.0)

    trace_id = traced_call(collector, call)
    refused, step = (the_span(collector, trace_id, name) for name in (WHOLE, "tensorrt_llm"))
    assert refused.parent_id == step.span_id
    assert refused.attributes["error.type"] == "InvalidRequest"
    assert not {span.name for span in collector.of_trace(trace_id)} & set(PHASES)
    assert client_span_of(client_spans, trace_id).attributes["error.type"] == "RequestRefused"


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_trace_goes_through_the_unary_front_to_the_engine(traced, client_spans, protocol):
    server, collector = traced
    client_spans.clear()
    with client_of(server, protocol, model="ensemble_unary") as client:
        trace_id = traced_call(collector, lambda: client.generate(REQUEST))
    whole, front = (the_span(collector, trace_id, name) for name in (WHOLE, "ensemble_unary"))
    assert whole.parent_id == front.span_id
    for phase in PHASES:
        assert the_span(collector, trace_id, phase).parent_id == whole.span_id
    assert client_span_of(client_spans, trace_id).name == "text_completion ensemble_unary"


def test_questions_about_health_are_not_traced(traced):
    server, collector = traced
    for _ in range(3):
        wait_until(lambda: health(server)[0] == 200)
    trace_id = generate(server, collector, "http")
    the_span(collector, trace_id, WHOLE)
    assert not [span for span in collector.spans if span.name == "health"]


def test_nothing_is_imported_where_no_endpoint_is_named(monkeypatch):
    from python_backend.telemetry import tracing

    monkeypatch.delenv(tracing.ENDPOINT, raising=False)
    assert tracing.tracing_from_environment() is None
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    monkeypatch.setenv(tracing.ENDPOINT, "http://127.0.0.1:1")
    with pytest.raises(tracing.EnvironmentFault, match="is not installed: make setup EXTRA=tracing"):
        tracing.tracing_from_environment()
