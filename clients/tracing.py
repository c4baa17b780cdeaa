"""A client span for each request of a program that traces with OpenTelemetry; nothing for one that does not.

Uses the program's own tracer provider, and never imports OpenTelemetry by itself.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clients.types import GenerateRequest, Result

# Names of OpenTelemetry's conventions for generative AI; the server has its own list, and a test compares them.
OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_SEED = "gen_ai.request.seed"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
ERROR_TYPE = "error.type"

TEXT_COMPLETION = "text_completion"
PROVIDER = "triton_llm_stack"

_FIELDS = {
    "max_tokens": REQUEST_MAX_TOKENS,
    "temperature": REQUEST_TEMPERATURE,
    "top_p": REQUEST_TOP_P,
    "seed": REQUEST_SEED,
}


def open_span(request: GenerateRequest, request_id: str, model: str) -> Any:
    """A span of a request to a model, open until `close_span`; None when the program does not trace."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    attributes = {
        OPERATION_NAME: TEXT_COMPLETION,
        PROVIDER_NAME: PROVIDER,
        REQUEST_MODEL: model,
        RESPONSE_ID: request_id,
        **{name: value for field, name in _FIELDS.items() if (value := getattr(request, field)) is not None},
    }
    name = f"{TEXT_COMPLETION} {model}"
    return api.get_tracer("clients").start_span(name, kind=api.SpanKind.CLIENT, attributes=attributes)


def headers(span: Any) -> dict[str, str]:
    """What makes the server's spans children of this one, for HTTP headers or gRPC metadata."""
    if span is None or not span.get_span_context().is_valid:
        return {}
    context = span.get_span_context()
    return {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"}


def close_span(span: Any, result: Result, error: BaseException | None) -> None:
    """Write down how the answer ended; an error is the span's as well."""
    if span is None:
        return
    reasons = [sequence.finish_reason for sequence in result.sequences if sequence.finish_reason]
    usage = {
        USAGE_INPUT_TOKENS: result.usage.prompt_tokens,
        USAGE_OUTPUT_TOKENS: result.usage.completion_tokens,
    }
    span.set_attributes({name: count for name, count in usage.items() if count is not None})
    span.set_attribute(RESPONSE_FINISH_REASONS, reasons)
    if error is not None:
        span.set_attribute(ERROR_TYPE, type(error).__name__)
        status = sys.modules["opentelemetry.trace"].Status
        span.set_status(status(sys.modules["opentelemetry.trace"].StatusCode.ERROR, str(error)))
    span.end()
