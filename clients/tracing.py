"""A client span for each request of a program that traces with OpenTelemetry; nothing for one that does not.

Uses the program's own tracer provider, and never imports OpenTelemetry by itself.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clients.types import GenerateRequest, Result

OPERATION = "text_completion"  # names of the conventions for generative AI
_ATTRIBUTES = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "seed": "gen_ai.request.seed",
}


def open_span(request: GenerateRequest, request_id: str) -> Any:
    """A span that is open until `close_span`; None when the program does not trace."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    values = {name: getattr(request, field, None) for field, name in _ATTRIBUTES.items()}
    attributes = {name: value for name, value in values.items() if value is not None}
    attributes |= {"gen_ai.operation.name": OPERATION, "gen_ai.response.id": request_id}
    return api.get_tracer("clients").start_span(OPERATION, kind=api.SpanKind.CLIENT, attributes=attributes)


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
    usage = {"input": result.usage.prompt_tokens, "output": result.usage.completion_tokens}
    span.set_attributes({f"gen_ai.usage.{kind}_tokens": count for kind, count in usage.items() if count is not None})
    span.set_attribute("gen_ai.response.finish_reasons", reasons)
    if error is not None:
        span.set_attribute("error.type", type(error).__name__)
        status = sys.modules["opentelemetry.trace"].Status
        span.set_status(status(sys.modules["opentelemetry.trace"].StatusCode.ERROR, str(error)))
    span.end()
