"""Synchronous gRPC client. Every request is its own call on one shared channel, with its own deadline and cancel.

The stubs are tritonclient's generated ones; its InferenceServerClient allows one stream and one callback per client,
which leaves no way to cancel one request of many. Safe to use from many threads.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf import json_format
from tritonclient.grpc import service_pb2, service_pb2_grpc

from clients import farewell, leftovers, tracing, wire
from clients.answer import Answer
from clients.errors import (
    ClientError,
    DeadlineExceeded,
    StreamBroken,
    from_grpc,
    from_message,
    out_of_time,
    unreachable,
)
from clients.model_info import ModelInfo
from clients.types import Chunk, GenerateRequest, Prompt, Result

if TYPE_CHECKING:
    from typing_extensions import Self

CHANNEL_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
TYPED_ERRORS = (("triton_grpc_error", "true"),)
"""Makes Triton end a failed stream with a status code; otherwise an error is bare text."""

CONTROL_TIMEOUT_S = 5.0
"""For calls that do no work: health, metadata, stop."""

DEFAULT_URL = "127.0.0.1:8001"


class GrpcClient:
    """Talks to one model of one server.

    Args:
        url: host:port of the gRPC endpoint.
        model: the model that takes text; `ensemble_unary` answers with one response only.
        stop_model: the model that takes stop requests.
    """

    def __init__(self, url: str = DEFAULT_URL, *, model: str = "ensemble", stop_model: str = "tensorrt_llm") -> None:
        self.url = url.removeprefix("grpc://")
        self.model = model
        self.stop_model = stop_model
        self._channel = grpc.insecure_channel(self.url, CHANNEL_OPTIONS)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._info: ModelInfo | None = None
        self._info_lock = threading.Lock()

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, request_id: str | None = None, **values: Any
    ) -> Result:
        """The whole answer at once.

        Args:
            prompt: text, chat messages or a GenerateRequest; `values` are fields of GenerateRequest.
            timeout: seconds; the server is told, and ends the request itself.
            request_id: must be unique among running requests; made up when absent.

        Raises:
            ClientError: see clients.errors.
        """
        values["stream"] = False
        with self._start(GenerateRequest.of(prompt, **values), timeout, request_id) as stream:
            for _ in stream:
                pass
            return stream.result

    def stream(
        self, prompt: Prompt, *, timeout: float | None = None, request_id: str | None = None, **values: Any
    ) -> Stream:
        """The answer as it is made; the request is sent at once. Arguments and errors as in generate()."""
        return self._start(GenerateRequest.of(prompt, **{**values, "stream": True}), timeout, request_id)

    def stop(self, request_id: str) -> None:
        """End a running request; an unknown id is no error.

        Raises:
            ClientError: the stop request did not get through.
        """
        message = wire.infer_request(self.stop_model, request_id, wire.stop_tensors())
        try:
            for _ in self.stub.ModelStreamInfer(iter([message]), timeout=CONTROL_TIMEOUT_S):
                pass
        except grpc.RpcError as error:
            raise from_grpc(error, self.url) from None

    def info(self) -> ModelInfo:
        """What the model declares; asked once.

        Raises:
            ClientError: the server does not answer or has no such model.
        """
        with self._info_lock:
            if self._info is None:
                try:
                    metadata = self.stub.ModelMetadata(
                        service_pb2.ModelMetadataRequest(name=self.model), timeout=CONTROL_TIMEOUT_S
                    )
                except grpc.RpcError as error:
                    raise from_grpc(error, self.url) from None
                self._info = ModelInfo.parse(json_format.MessageToDict(metadata))
            return self._info

    def ready(self) -> bool:
        """Whether the server would answer a request for the model now."""
        request = service_pb2.ModelReadyRequest(name=self.model)
        try:
            return bool(self.stub.ModelReady(request, timeout=CONTROL_TIMEOUT_S).ready)
        except grpc.RpcError:
            return False

    def wait_until_ready(self, timeout: float) -> None:
        """Wait for ready().

        Raises:
            ServerUnavailable: not ready within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not self.ready():
            if time.monotonic() > deadline:
                raise unreachable(self.url, f"not ready after {timeout:g} s")
            time.sleep(0.1)

    def close(self) -> None:
        """Close the channel; calls under way end with Cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _start(self, request: GenerateRequest, timeout: float | None, request_id: str | None) -> Stream:
        info = self.info()
        if not request.stream:
            request = info.with_usage(request)
        answer = Answer(request, request_id or wire.new_request_id(), timeout)
        message = wire.infer_request(
            self.model, answer.request_id, info.tensors(request, timeout), info.wanted_outputs(request)
        )
        metadata = (*TYPED_ERRORS, *tracing.headers(answer.span).items())
        call = self.stub.ModelStreamInfer(iter([message]), timeout=info.patience(timeout), metadata=metadata)
        return Stream(self, call, answer)


class Stream:
    """Iterates over the chunks of one answer. Leaving it early, in any way, cancels the request on the server."""

    def __init__(self, client: GrpcClient, call: Any, answer: Answer) -> None:
        self._client = client
        self._call = call
        self._answer = answer
        self._final = False
        self._over = False
        leftovers.track(self)

    @property
    def request_id(self) -> str:
        """The id the server knows the request by."""
        return self._answer.request_id

    @property
    def result(self) -> Result:
        """What has arrived so far; the whole answer once the iteration is over."""
        return self._answer.result()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        while not self._over:
            try:
                response = next(self._call)
            except StopIteration:
                self._over = True
                self._answer.finish(complete=self._final)
                break
            except grpc.RpcError as error:
                if self._answer.cancelled:
                    break
                raise self._failed(error) from None
            if self._answer.cancelled:
                break
            chunk = self._take(response)
            if chunk is not None:
                return chunk
        raise StopIteration

    def cancel(self) -> None:
        """End the request on the server; the iteration then ends quietly. Safe from any thread, and twice."""
        if self._over:
            return
        self._over = self._answer.cancelled = True
        # Whatever ends the call ends the farewell; another thread may close the channel meanwhile.
        if self._stop():
            with farewell.insisting(self._stop, self._call.cancel), contextlib.suppress(Exception):
                for _ in self._call:
                    pass
        self._call.cancel()

    close = cancel

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.cancel()

    def __del__(self) -> None:
        # A loop left by `break` drops its stream without closing it.
        if not sys.is_finalizing():
            self.cancel()

    def _take(self, response: Any) -> Chunk | None:
        try:
            if response.error_message:
                raise from_message(response.error_message, self._answer.text)
            outputs = wire.decode(response.infer_response)
            self._final = wire.is_final(response.infer_response.parameters)
            return self._answer.add(outputs)
        except ValueError as error:
            self.cancel()
            raise StreamBroken(f"The server sent something that is no answer ({error}).", self._answer.text) from None
        except ClientError:
            self.cancel()
            raise

    def _failed(self, error: grpc.RpcError) -> ClientError:
        self._over = True
        typed = from_grpc(error, self._client.url, self._answer.text)
        if isinstance(typed, DeadlineExceeded):
            self._stop()
            return out_of_time(self._answer.timeout, self._answer.text)
        return typed

    def _stop(self) -> bool:
        """Whether the server has been told."""
        try:
            self._client.stop(self.request_id)
        except (ClientError, ValueError):  # ValueError: the channel is closed, so there is nobody to tell.
            return False
        return True
