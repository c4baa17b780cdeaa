"""Requests written out tensor by tensor, the way upstream's programs send them: tritonclient and nothing of ours."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

Tensors = Mapping[str, np.ndarray]


def text(*values: str) -> np.ndarray:
    """BYTES [1, n]."""
    return np.array([[value.encode() for value in values]], dtype=object)


def ints(*values: int) -> np.ndarray:
    """INT32 [1, n]."""
    return np.array([values], np.int32)


def floats(*values: float) -> np.ndarray:
    """FP32 [1, n]."""
    return np.array([values], np.float32)


def flag(value: bool) -> np.ndarray:
    """BOOL [1, 1]."""
    return np.array([[value]], np.bool_)


def prepare(protocol: Any, tensors: Tensors) -> list[Any]:
    """InferInput objects of tritonclient.grpc or tritonclient.http."""
    inputs = []
    for name, value in tensors.items():
        tensor = protocol.InferInput(name, value.shape, np_to_triton_dtype(value.dtype))
        tensor.set_data_from_numpy(value)
        inputs.append(tensor)
    return inputs


class Responses:
    """What a gRPC stream brings, in order; raises an error where one arrives."""

    def __init__(self) -> None:
        self.queue: queue.Queue[Any] = queue.Queue()

    def callback(self, result: Any, error: InferenceServerException | None) -> None:
        self.queue.put(error or result)

    def next(self, timeout_s: float = 30) -> Any:
        found = self.queue.get(timeout=timeout_s)
        if isinstance(found, InferenceServerException):
            raise found
        return found

    def until_final(self) -> Iterator[Any]:
        """Responses up to and with the one that carries the final flag."""
        while True:
            result = self.next()
            yield result
            if result.get_response().parameters["triton_final_response"].bool_param:
                return


@contextmanager
def grpc_stream(url: str) -> Iterator[tuple[grpcclient.InferenceServerClient, Responses]]:
    """A client with an open stream and what it brings."""
    responses = Responses()
    with grpcclient.InferenceServerClient(url) as client:
        client.start_stream(responses.callback)
        try:
            yield client, responses
        finally:
            client.stop_stream(cancel_requests=True)


def stream_infer(
    url: str, model: str, tensors: Tensors, outputs: Sequence[str] | None = None, request_id: str = "1"
) -> list[Any]:
    """All responses to one request on a stream of its own."""
    with grpc_stream(url) as (client, responses):
        wanted = None if outputs is None else [grpcclient.InferRequestedOutput(name) for name in outputs]
        client.async_stream_infer(
            model,
            prepare(grpcclient, tensors),
            outputs=wanted,
            request_id=request_id,
            enable_empty_final_response=True,
        )
        return list(responses.until_final())


def http_infer(url: str, model: str, tensors: Tensors, request_id: str = "") -> Any:
    """The one response to a KServe request over HTTP."""
    with httpclient.InferenceServerClient(url, network_timeout=60) as client:
        return client.infer(model, prepare(httpclient, tensors), request_id=request_id)


def output_ids(results: Sequence[Any]) -> list[int]:
    """The tokens of all responses of a stream with one sequence."""
    found: list[int] = []
    for result in results:
        ids, lengths = result.as_numpy("output_ids"), result.as_numpy("sequence_length")
        if ids is not None:
            found += ids[0, 0, : lengths[0, 0]].tolist()
    return found
