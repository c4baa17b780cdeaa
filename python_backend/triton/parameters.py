"""Triton's request parameters (not tensors): the few that mean something, and a word about those that do not.

Knows nothing of tensors.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from python_backend.errors import Unsupported, out_of_range

if TYPE_CHECKING:
    from collections.abc import Mapping

_REQUEST_TYPES = ("context_and_generation", "context_only", "generation_only")
# What upstream's clients and Triton's own protocols send along.
_KNOWN = frozenset(
    {
        "Streaming",
        "binary_data_output",
        "id",  # the request id in a body of /generate
        "logprobs",
        "prompt_logprobs",
        "priority",
        "request_type",
        "sequence_end",
        "sequence_id",
        "sequence_start",
        "timeout",
        "traceparent",  # of python_backend.triton.trace
    }
)
_RENAMED = {"min_length": "min_tokens", "random_seed": "seed"}


def parameters_of(text: str) -> dict[str, Any]:
    """Triton hands a request's parameters over as the text of a JSON object, or as no text."""
    parameters = json.loads(text) if text else {}
    return parameters if isinstance(parameters, dict) else {}


def check_request_type(parameters: Mapping[str, Any]) -> None:
    """Accept what an engine without disaggregated serving can do.

    Raises:
        RequestError: request_type is unknown, or is one of disaggregated serving.
    """
    kind = parameters.get("request_type", _REQUEST_TYPES[0])
    if kind not in _REQUEST_TYPES:
        raise out_of_range("Request parameter request_type", kind, ", ".join(_REQUEST_TYPES))
    if kind != _REQUEST_TYPES[0]:
        raise Unsupported(
            f"Request parameter request_type is {kind}, which disaggregated serving needs; prefill and decode run in "
            "one engine here. Leave the parameter out."
        )


def unknown_parameters(parameters: Mapping[str, Any]) -> list[str]:
    """Triton turns a misspelt input of /generate into a parameter, so say that it had no effect."""
    return [
        f"Parameter {name} is no input of this model and had no effect."
        + (f" Its name is {_RENAMED[name]} now." if name in _RENAMED else "")
        for name in parameters
        if name not in _KNOWN and not name.startswith("triton_")
    ]
