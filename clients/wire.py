"""Tensors between Python values and KServe's protobuf messages.

Knows nothing of channels, calls or what the tensors mean.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2

from clients.errors import RequestRefused

_SCALARS = {"INT32": "i", "INT64": "q", "UINT64": "Q", "FP32": "f", "BOOL": "?"}
_DTYPES = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
}
_LENGTH = struct.Struct("<I")


def new_request_id() -> str:
    """An id nobody else uses; stop requests name the request by it."""
    return uuid.uuid4().hex


def infer_request(
    model: str, request_id: str, tensors: Iterable[tuple[str, str, Any]], outputs: Iterable[str] = ()
) -> Any:
    """A ModelInferRequest for one prompt.

    Args:
        tensors: name, KServe datatype and value: a scalar or a list becomes [1, n], an array [n, …] becomes [1, n, …].
        outputs: names of the wanted output tensors; none: all.

    Raises:
        RequestRefused: a value does not fit its datatype.
    """
    message = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, datatype, value in tensors:
        shape, raw = encode(name, datatype, value)
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(raw)
    for name in outputs:
        message.outputs.add(name=name)
    return message


def encode(name: str, datatype: str, value: Any) -> tuple[list[int], bytes]:
    """Shape (with the batch dimension) and bytes of one tensor.

    Raises:
        RequestRefused: the value does not fit the datatype.
    """
    try:
        if isinstance(value, np.ndarray):
            array = np.ascontiguousarray(value, dtype=_DTYPES[datatype])
            return [1, *array.shape], array.tobytes()
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if datatype == "BYTES":
            return [1, len(values)], b"".join(_with_length(text) for text in values)
        if datatype not in _SCALARS:
            return encode(name, datatype, np.asarray(value))
        return [1, len(values)], struct.pack(f"<{len(values)}{_SCALARS[datatype]}", *values)
    except (struct.error, OverflowError, TypeError, ValueError, AttributeError) as error:
        raise RequestRefused(f"{name} is {value!r:.80}; it has to be {datatype} ({error}).") from None


def decode(message: Any) -> dict[str, Any]:
    """The output tensors of a ModelInferResponse by name: lists of str for BYTES, arrays for the rest.

    Raises:
        ValueError: the bytes do not fit the shape, or a datatype is unknown.
    """
    found: dict[str, Any] = {}
    for output, raw in zip(message.outputs, message.raw_output_contents, strict=True):
        if output.datatype == "BYTES":
            found[output.name] = _strings(raw)
        elif output.datatype in _DTYPES:
            found[output.name] = np.frombuffer(raw, _DTYPES[output.datatype]).reshape(tuple(output.shape))
        else:
            raise ValueError(f"output {output.name} has the unknown datatype {output.datatype!r}")
    return found


def stop_tensors() -> list[tuple[str, str, Any]]:
    """The inputs of a stop request to `tensorrt_llm`; the three beside `stop` are there because they are mandatory."""
    zero: list[tuple[str, str, Any]] = [
        (name, "INT32", 0) for name in ("input_ids", "input_lengths", "request_output_len")
    ]
    return [*zero, ("stop", "BOOL", True)]


def is_final(parameters: Mapping[str, Any]) -> bool:
    """Whether a response's parameters mark it as the last one."""
    return "triton_final_response" in parameters and bool(parameters["triton_final_response"].bool_param)


def _with_length(text: str | bytes) -> bytes:
    if not isinstance(text, (str, bytes)):
        raise TypeError(f"{type(text).__name__} is not text")
    raw = text.encode() if isinstance(text, str) else text
    return _LENGTH.pack(len(raw)) + raw


def _strings(raw: bytes) -> list[str]:
    texts, position = [], 0
    while position < len(raw):
        (length,) = _LENGTH.unpack_from(raw, position)
        position += _LENGTH.size
        if position + length > len(raw):
            raise ValueError("a string is cut off")
        texts.append(raw[position : position + length].decode("utf-8", "replace"))
        position += length
    return texts
