"""Bodies of Triton's generate endpoints: requests to JSON, events to output tensors.

Knows nothing of connections.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from clients.errors import RequestRefused, StreamBroken, from_message

_STRINGS = frozenset(
    {"text_output", "finish_reason", "logprobs", "logprobs_distribution", "prompt_logprobs", "tool_calls", "warnings"}
)
_NO_TENSORS = frozenset({"id", "model_name", "model_version", "sequence_id", "sequence_start", "sequence_end"})


def generate_body(request_id: str, tensors: Iterable[tuple[str, str, Any]]) -> bytes:
    """The JSON body for /generate and /generate_stream.

    Raises:
        RequestRefused: a tensor cannot travel as JSON.
    """
    body: dict[str, Any] = {"id": request_id}
    for name, _, value in tensors:
        if isinstance(value, np.ndarray):
            raise RequestRefused(f"{name} is an array, which Triton's generate endpoint cannot take; use gRPC for it.")
        body[name] = value
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise RequestRefused(f"The request cannot be written as JSON ({error}).") from None


def stop_body(request_id: str) -> bytes:
    """The JSON body of a stop request to `tensorrt_llm`."""
    stop = {"input_ids": [0], "input_lengths": 0, "request_output_len": 0, "stop": True}
    return json.dumps({"id": request_id, **stop}).encode()


def headers(request_id: str) -> dict[str, str]:
    """Newer servers read the request id from a header, older ones from the body."""
    return {"Content-Type": "application/json", "triton-request-id": request_id}


def outputs(text: str | bytes, so_far: str = "") -> dict[str, Any]:
    """The output tensors of one answer or event, as clients.wire.decode gives them, but flat: JSON has no shapes.

    Raises:
        StreamBroken: the text is no JSON object.
        ClientError: the event is an error.
    """
    try:
        event = json.loads(text)
    except ValueError:
        event = None
    if not isinstance(event, Mapping):
        shown = text if isinstance(text, str) else text.decode("utf-8", "replace")
        raise StreamBroken(f"The server sent {shown[:200]!r}, which is no answer.", so_far)
    if "error" in event:
        raise from_message(str(event["error"]), so_far)
    return {name: _values(name, value) for name, value in event.items() if name not in _NO_TENSORS}


def _values(name: str, value: Any) -> Any:
    if name in _STRINGS:
        return value if isinstance(value, list) else [value]
    return np.atleast_1d(np.asarray(value))
