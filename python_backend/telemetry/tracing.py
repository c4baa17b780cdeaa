"""Spans of what a request went through, written once it is over. Off unless an OTLP endpoint is named.

The libraries of OpenTelemetry (extra `tracing`) are imported only then. Knows nothing of Triton.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from python_backend.errors import EnvironmentFault
from python_backend.telemetry import semconv

if TYPE_CHECKING:
    from collections.abc import Mapping

    from python_backend.request import GenerationRequest
    from python_backend.telemetry.requests import RequestRecord

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
SERVICE_NAME = "triton-llm-stack"
# Price of a million tokens, in whatever unit the reader of the traces counts.
INPUT_PRICE, OUTPUT_PRICE = "LLM_PRICE_PER_MILLION_INPUT_TOKENS", "LLM_PRICE_PER_MILLION_OUTPUT_TOKENS"

Attributes = dict[str, Any]


class Tracing:
    """Sends spans to the endpoint in the background; a full queue drops them, and nobody waits.

    Args:
        exporter: where spans go instead of the endpoint of the environment.
    """

    def __init__(self, exporter: Any = None) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise EnvironmentFault(
                f"{ENDPOINT} is set, but {error.name} is not installed: make setup EXTRA=tracing."
            ) from None
        name = os.environ.get("OTEL_SERVICE_NAME", SERVICE_NAME)
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}, semconv.SCHEMA_URL))
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("python_backend", schema_url=semconv.SCHEMA_URL)
        self._extract = TraceContextTextMapPropagator().extract
        self._prices = tuple(float(os.environ.get(name) or 0) / 1e6 for name in (INPUT_PRICE, OUTPUT_PRICE))

    def stop(self) -> None:
        """Send what waits."""
        self._provider.shutdown()

    def request(
        self, parent: str, model: str, request: GenerationRequest, record: RequestRecord, error: BaseException | None
    ) -> None:
        """The span of a request in the engine, with those of queue, prefill and decode in it.

        Args:
            parent: W3C traceparent of Triton's span.
            model: the deployment's name.
            request: what was asked.
            record: when what happened; the request is over.
            error: what ended it.
        """
        from opentelemetry.trace import set_span_in_context

        attributes = _request_attributes(model, request, record, error) | self._cost(record)
        name = f"{semconv.TEXT_COMPLETION} {model}"
        offset_ns = time.time_ns() - time.monotonic_ns()
        times = (record.arrival_ns, record.first_scheduled_ns, record.first_token_ns, record.last_token_ns)
        arrival_ns, end_ns, *times_ns = (t + offset_ns if t else 0 for t in (times[0], record.end_ns, *times))
        whole = self._span(name, self._extract({"traceparent": parent}), arrival_ns, end_ns, attributes)
        context = set_span_in_context(whole)
        phases = (semconv.QUEUE, semconv.PREFILL, semconv.DECODE)
        for phase, begun_ns, over_ns in zip(phases, times_ns[:-1], times_ns[1:], strict=True):
            if begun_ns:
                self._span(phase, context, begun_ns, over_ns or end_ns, {})

    def refused(self, parent: str, model: str, error: BaseException) -> None:
        """The span of a request that never ran: a moment with its error.

        Args:
            parent: W3C traceparent of Triton's span.
            model: the deployment's name.
            error: why it was refused.
        """
        now_ns = time.time_ns()
        name, attributes = f"{semconv.TEXT_COMPLETION} {model}", _every_request(model, error)
        self._span(name, self._extract({"traceparent": parent}), now_ns, now_ns, attributes)

    def _cost(self, record: RequestRecord) -> Attributes:
        if not any(self._prices):
            return {}
        return {semconv.COST: record.input_tokens * self._prices[0] + record.output_tokens * self._prices[1]}

    def _span(self, name: str, context: Any, start_ns: int, end_ns: int, attributes: Mapping[str, Any]) -> Any:
        from opentelemetry.trace import Status, StatusCode

        span = self._tracer.start_span(name, context, attributes=attributes, start_time=start_ns)
        if semconv.ERROR_TYPE in attributes:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_ns)
        return span


def tracing_from_environment() -> Tracing | None:
    """What the standard environment variables ask for; None when no endpoint is named.

    Raises:
        EnvironmentFault: the libraries are not installed.
    """
    return Tracing() if os.environ.get(ENDPOINT) else None


def _request_attributes(
    model: str, request: GenerationRequest, record: RequestRecord, error: BaseException | None
) -> Attributes:
    sampling = request.sampling
    attributes: Attributes = {
        semconv.REQUEST_MAX_TOKENS: sampling.max_tokens,
        semconv.REQUEST_CHOICE_COUNT: sampling.num_return_sequences,
        semconv.REQUEST_TEMPERATURE: sampling.temperature,
        semconv.REQUEST_TOP_K: sampling.top_k or None,
        semconv.REQUEST_TOP_P: sampling.top_p if 0 < sampling.top_p < 1 else None,
        semconv.REQUEST_SEED: sampling.seed,
        semconv.RESPONSE_FINISH_REASONS: [record.finish_reason],
        semconv.USAGE_INPUT_TOKENS: record.input_tokens,
        semconv.USAGE_OUTPUT_TOKENS: record.output_tokens,
        semconv.GUIDE_TYPE: request.guide.kind if request.guide is not None else None,
    }
    if record.first_token_ns:
        attributes[semconv.RESPONSE_TIME_TO_FIRST_CHUNK] = (record.first_token_ns - record.arrival_ns) / 1e9
    return _every_request(model, error) | {name: value for name, value in attributes.items() if value is not None}


def _every_request(model: str, error: BaseException | None) -> Attributes:
    attributes: Attributes = {
        semconv.OPERATION_NAME: semconv.TEXT_COMPLETION,
        semconv.PROVIDER_NAME: semconv.PROVIDER,
        semconv.REQUEST_MODEL: model,
    }
    return attributes if error is None else attributes | {semconv.ERROR_TYPE: type(error).__name__}
