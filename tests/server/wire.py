"""Calls to a real server by raw tritonclient and HTTP; knows nothing of this repository's clients."""

from __future__ import annotations

import json
import queue
import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tritonclient.grpc as grpcclient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.server.launched import ServerAddresses

TYPES = {"int32": "INT32", "bool": "BOOL", "float32": "FP32", "uint64": "UINT64", "object": "BYTES"}
WAIT_S = 60


@dataclass
class Reply:
    """One response of a stream, or its error."""

    outputs: dict[str, np.ndarray]
    error: str = ""
    final: bool = False

    def __getitem__(self, name: str) -> np.ndarray:
        return self.outputs[name]


def tensor(name: str, value: Any) -> grpcclient.InferInput:
    """An input; lists become int32, floats float32, texts BYTES; give other types as numpy arrays."""
    array = np.asarray(value)
    if array.dtype.kind in "US":
        array = np.array([[text.encode() for text in row] for row in np.atleast_2d(array).tolist()], dtype=object)
    elif array.dtype == np.int64:
        array = array.astype(np.int32)
    elif array.dtype == np.float64:
        array = array.astype(np.float32)
    made = grpcclient.InferInput(name, list(array.shape), TYPES[str(array.dtype)])
    made.set_data_from_numpy(array)
    return made


def engine_inputs(ids: list[int], output_len: int, **tensors: Any) -> list[grpcclient.InferInput]:
    """Inputs of tensorrt_llm for one prompt."""
    values = {"input_ids": [ids], "input_lengths": [[len(ids)]], "request_output_len": [[output_len]], **tensors}
    return [tensor(name, value) for name, value in values.items()]


def text_inputs(text: str, max_tokens: int, **tensors: Any) -> list[grpcclient.InferInput]:
    """Inputs of the ensemble for one prompt."""
    return [
        tensor(name, value) for name, value in {"text_input": [[text]], "max_tokens": [[max_tokens]], **tensors}.items()
    ]


class Stream:
    """One gRPC stream; replies are kept in order."""

    def __init__(self, server: ServerAddresses) -> None:
        self._client = grpcclient.InferenceServerClient(server.grpc)
        self._replies: queue.Queue[Reply] = queue.Queue()
        self._client.start_stream(self._take)

    def send(
        self, model: str, inputs: list[Any], request_id: str = "", outputs: tuple[str, ...] = (), **options: Any
    ) -> None:
        requested = [grpcclient.InferRequestedOutput(name) for name in outputs] or None
        self._client.async_stream_infer(model, inputs, request_id=request_id, outputs=requested, **options)

    def next(self, timeout_s: float = WAIT_S) -> Reply:
        return self._replies.get(timeout=timeout_s)

    def rest(self) -> list[Reply]:
        """Replies up to the final one or an error."""
        replies = []
        while not replies or not (replies[-1].final or replies[-1].error):
            replies.append(self.next())
        return replies

    def close(self, cancel: bool = False) -> None:
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()

    def _take(self, result: Any, error: Any) -> None:
        if error is not None:
            self._replies.put(Reply({}, error=error.message()))
            return
        response = result.get_response()
        outputs = {output.name: result.as_numpy(output.name) for output in response.outputs}
        self._replies.put(Reply(outputs, final=response.parameters["triton_final_response"].bool_param))


def ask(server: ServerAddresses, model: str, inputs: list[Any], **options: Any) -> list[Reply]:
    """All replies to one request over a gRPC stream of its own."""
    stream = Stream(server)
    try:
        stream.send(model, inputs, **options)
        return stream.rest()
    finally:
        stream.close()


def ask_one(server: ServerAddresses, model: str, inputs: list[Any], **options: Any) -> Reply:
    """The reply to a request that has only one."""
    (reply,) = ask(server, model, inputs, **options)
    return reply


def tokens(replies: list[Reply]) -> list[int]:
    """The token ids of all replies, one after another."""
    return [token for reply in replies for token in reply["output_ids"].reshape(-1).tolist()]


def text(replies: list[Reply]) -> str:
    """The text of all replies, joined."""
    return "".join(reply["text_output"].reshape(-1)[0].decode() for reply in replies)


def post(server: ServerAddresses, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """HTTP status and decoded answer of a POST to /v2/models/<path>."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{server.http}/v2/models/{path}", data, headers or {})
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def events(server: ServerAddresses, model: str, body: Any) -> Iterator[Any]:
    """The events of a generate_stream call."""
    request = urllib.request.Request(
        f"http://{server.http}/v2/models/{model}/generate_stream", json.dumps(body).encode()
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as response:
        for line in response:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


def metrics_text(server: ServerAddresses) -> str:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=10) as response:
        return str(response.read().decode())


def metric(server: ServerAddresses, name: str, **labels: str) -> float:
    """The value of one series of tensorrt_llm."""
    wanted = {"model": "tensorrt_llm", "version": "1", **labels}
    for found, value in re.findall(rf"^{name}\{{(.*)\}} (\S+)$", metrics_text(server), re.MULTILINE):
        if dict(re.findall(r'(\w+)="([^"]*)"', found)) == wanted:
            return float(value)
    raise AssertionError(f"no series {name} with {wanted}")


def wait_until(condition: Callable[[], bool], timeout_s: float = 10, period_s: float = 0.005) -> float:
    """Seconds until the condition holds; fails when it never does."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, "the condition never came true"
        time.sleep(period_s)
    return time.monotonic() - started


def active_requests(server: ServerAddresses) -> float:
    """Requests that wait or run in the engine, as it stood at most a tenth of a second ago."""
    return metric(server, "nv_trt_llm_request_metrics", request_type="active")


def used_blocks(server: ServerAddresses) -> float:
    return metric(server, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="used")


def cancelled(server: ServerAddresses) -> float:
    """Requests that have ended as cancelled since the start; counted as the last response leaves."""
    return metric(server, "llm_requests_total", finish_reason="cancelled")
