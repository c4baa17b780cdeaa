"""A server made of scripts, on real sockets: it answers over gRPC and HTTP, and misbehaves when the script says so."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

INPUTS = [
    "text_input",
    "messages",
    "max_tokens",
    "stream",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "stop_words",
    "timeout_ms",
    "top_logprobs",
    "logprobs_mode",
    "top_prompt_logprobs",
    "num_return_sequences",
    "beam_width",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_log_probs",
    "lora_weights",
]
OUTPUTS = [
    "text_output",
    "finish_reason",
    "warnings",
    "logprobs",
    "logprobs_distribution",
    "prompt_logprobs",
    "sequence_index",
    "num_input_tokens",
    "num_output_tokens",
    "cum_log_probs",
    "output_log_probs",
]
_DTYPES = {"INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32, "BOOL": np.bool_, "FP16": np.float16}


@dataclass
class Step:
    """One thing the server does: send tensors, fail, cut the connection, send rubbish, or wait for a stop request."""

    kind: str  # send, error, cut, garbage, wait_for_stop
    outputs: dict[str, Any] = field(default_factory=dict)
    final: bool = False
    message: str = ""
    code: grpc.StatusCode = grpc.StatusCode.INTERNAL
    http_status: int = 400


def send(text: str, reason: str | None = None, **outputs: Any) -> Step:
    """A response; with a finish reason it is the last one."""
    found = {"text_output": [text], **outputs}
    if reason is not None:
        found["finish_reason"] = [reason]
    return Step("send", found, final=reason is not None)


@dataclass
class Seen:
    """One request as it arrived."""

    protocol: str
    model: str
    request_id: str
    tensors: dict[str, Any]
    outputs: list[str]
    parameters: dict[str, Any]


class FakeServer:
    """Scripts by prompt. Use as a context manager; `grpc_url` and `http_url` are where it listens."""

    def __init__(self) -> None:
        self.scripts: dict[str, list[Step]] = {}
        self.seen: list[Seen] = []
        self.stops: list[str] = []
        self.inputs = list(INPUTS)
        self.outputs = list(OUTPUTS)
        self._stopped: dict[str, threading.Event] = {}
        self._grpc = grpc.server(futures.ThreadPoolExecutor(max_workers=16))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_Servicer(self), self._grpc)
        self.grpc_url = f"127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"
        self._http = _QuietServer(("127.0.0.1", 0), _handler(self))
        self.http_url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> FakeServer:
        self._grpc.start()
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for event in self._stopped.values():
            event.set()
        self._grpc.stop(0).wait()
        self._http.shutdown()
        self._http.server_close()

    def stop_event(self, request_id: str) -> threading.Event:
        return self._stopped.setdefault(request_id, threading.Event())

    def take(self, seen: Seen) -> list[Step]:
        """Note a request and give its script; a stop request has none."""
        if seen.model == "tensorrt_llm":
            assert bool(np.all(seen.tensors["stop"]))
            assert {"input_ids", "input_lengths", "request_output_len"} <= set(seen.tensors)
            self.stops.append(seen.request_id)
            self.stop_event(seen.request_id).set()
            return [Step("send", {}, final=True)]
        self.seen.append(seen)
        prompt = seen.tensors.get("text_input") or seen.tensors["messages"]
        return self.scripts[prompt[0] if isinstance(prompt, list) else prompt]

    def metadata(self, name: str) -> dict[str, Any]:
        sides = {"inputs": self.inputs, "outputs": self.outputs}
        return {"name": name, **{side: [{"name": n} for n in names] for side, names in sides.items()}}


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are part of the tests."""


class _Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, server: FakeServer) -> None:
        self._server = server

    def ModelMetadata(self, request: Any, context: Any) -> Any:
        if request.name == "nope":
            context.abort(grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'nope' is not found")
        reply = service_pb2.ModelMetadataResponse(name=request.name)
        for name in self._server.inputs:
            reply.inputs.add(name=name)
        for name in self._server.outputs:
            reply.outputs.add(name=name)
        return reply

    def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=request.name != "nope")

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        for request in requests:
            parameters = {name: value.bool_param for name, value in request.parameters.items()}
            tensors = {t.name: _read(t, raw) for t, raw in zip(request.inputs, request.raw_input_contents, strict=True)}
            wanted = [output.name for output in request.outputs]
            seen = Seen("grpc", request.model_name, request.id, tensors, wanted, parameters)
            for step in self._server.take(seen):
                if step.kind == "wait_for_stop":
                    self._server.stop_event(request.id).wait(10)
                elif step.kind == "error":
                    context.abort(step.code, step.message)
                elif step.kind == "cut":
                    return
                elif step.kind == "garbage":
                    yield _response(request.id, {"text_output": [b"\xff\xff\xff\x7f"]}, final=False, raw=True)
                else:
                    yield _response(request.id, step.outputs, final=step.final)


def _read(tensor: Any, raw: bytes) -> Any:
    if tensor.datatype == "BYTES":
        return [text.decode() for text in deserialize_bytes_tensor(raw)]
    return np.frombuffer(raw, _DTYPES[tensor.datatype]).reshape(tuple(tensor.shape))


def _response(request_id: str, outputs: dict[str, Any], *, final: bool, raw: bool = False) -> Any:
    reply = service_pb2.ModelStreamInferResponse()
    response = reply.infer_response
    response.id = request_id
    response.parameters["triton_final_response"].bool_param = final
    for name, value in outputs.items():
        if isinstance(value, list):
            array = np.array([str(v).encode() for v in value], dtype=object)
            content = value[0] if raw else serialize_byte_tensor(array).item()
            response.outputs.add(name=name, datatype="BYTES", shape=[len(value)])
        else:
            content = value.tobytes()
            datatype = next(k for k, v in _DTYPES.items() if v == value.dtype)
            response.outputs.add(name=name, datatype=datatype, shape=value.shape)
        response.raw_output_contents.append(content)
    return reply


def _handler(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # as Triton: else a body waits 40 ms for the receipt of its head

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            model = self.path.split("/")[3]
            if model == "nope":
                self._whole(404, {"error": "Request for unknown model: 'nope' is not found"})
            else:
                self._whole(200, {} if self.path.endswith("/ready") else server.metadata(model))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            _, _, _, model, verb = self.path.split("/")
            steps = server.take(Seen("http", model, body.pop("id", ""), body, [], {}))
            request_id = self.headers["triton-request-id"]
            if verb == "generate":
                self._single(steps, request_id)
            else:
                self._stream(steps, request_id)

        def _single(self, steps: list[Step], request_id: str) -> None:
            if steps[0].kind == "wait_for_stop":
                server.stop_event(request_id).wait(10)
                steps = steps[1:]
            if steps[0].kind == "error":
                self._whole(steps[0].http_status, {"error": steps[0].message})
            elif steps[0].kind == "garbage":
                self._whole(200, "rubbish")
            else:
                self._whole(200, _as_json(steps[0].outputs))

        def _stream(self, steps: list[Step], request_id: str) -> None:
            begun = False
            for step in steps:
                if step.kind == "wait_for_stop":
                    server.stop_event(request_id).wait(10)
                    continue
                failed_first = step.kind == "error" and not begun
                if not begun:
                    self._begin(step.http_status if failed_first else 200)
                    begun = True
                if step.kind == "cut":
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                if step.kind == "garbage":
                    self._chunk(b"data: rubbish\n\n")
                elif step.kind == "error":
                    self._chunk(b"data: " + json.dumps({"error": step.message}).encode() + b"\n\n")
                elif step.outputs:
                    event = b"data: " + json.dumps(_as_json(step.outputs), ensure_ascii=False).encode() + b"\n\n"
                    for start in range(0, len(event), 7):  # cut in the middle of everything, characters included
                        self._chunk(event[start : start + 7])
            self._chunk(b"")

        def _begin(self, status: int) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()

        def _whole(self, status: int, body: Any) -> None:
            content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return Handler


def _as_json(outputs: dict[str, Any]) -> dict[str, Any]:
    flat = {n: v if isinstance(v, list) else v.reshape(-1).tolist() for n, v in outputs.items()}
    scalars = {n: v[0] if len(v) == 1 else v for n, v in flat.items()}
    return {"model_name": "ensemble", "model_version": "1", "sequence_id": 0, **scalars}
