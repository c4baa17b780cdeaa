"""Asynchronous gRPC client: the same calls as clients.grpc_client, awaited. One event loop per client."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf import json_format
from tritonclient.grpc import service_pb2, service_pb2_grpc

from clients import farewell, tracing, wire
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
from clients.grpc_client import CHANNEL_OPTIONS, CONTROL_TIMEOUT_S, DEFAULT_URL, TYPED_ERRORS
from clients.model_info import ModelInfo
from clients.types import Chunk, GenerateRequest, Prompt, Result

if TYPE_CHECKING:
    from typing_extensions import Self


class AsyncGrpcClient:
    """Talks to one model of one server; arguments as for GrpcClient. Make it inside the event loop that uses it."""

    def __init__(self, url: str = DEFAULT_URL, *, model: str = "ensemble", stop_model: str = "tensorrt_llm") -> None:
        self.url = url.removeprefix("grpc://")
        self.model = model
        self.stop_model = stop_model
        self._channel = grpc.aio.insecure_channel(self.url, CHANNEL_OPTIONS)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._info: ModelInfo | None = None

    async def generate(
        self, prompt: Prompt, *, timeout: float | None = None, request_id: str | None = None, **values: Any
    ) -> Result:
        """The whole answer at once; see GrpcClient.generate. Cancelling the task cancels the request on the server."""
        values["stream"] = False
        async with await self._start(GenerateRequest.of(prompt, **values), timeout, request_id) as stream:
            async for _ in stream:
                pass
            return stream.result

    async def stream(
        self, prompt: Prompt, *, timeout: float | None = None, request_id: str | None = None, **values: Any
    ) -> AsyncStream:
        """The answer as it is made; see GrpcClient.stream.

        Use it as `async with await client.stream(…) as stream`, so that leaving early cancels on the server.
        """
        return await self._start(GenerateRequest.of(prompt, **{**values, "stream": True}), timeout, request_id)

    async def stop(self, request_id: str) -> None:
        """End a running request; see GrpcClient.stop."""
        message = wire.infer_request(self.stop_model, request_id, wire.stop_tensors())
        try:
            async for _ in self.stub.ModelStreamInfer(iter([message]), timeout=CONTROL_TIMEOUT_S):
                pass
        except grpc.RpcError as error:
            raise from_grpc(error, self.url) from None

    async def info(self) -> ModelInfo:
        """What the model declares; see GrpcClient.info."""
        if self._info is None:
            try:
                metadata = await self.stub.ModelMetadata(
                    service_pb2.ModelMetadataRequest(name=self.model), timeout=CONTROL_TIMEOUT_S
                )
            except grpc.RpcError as error:
                raise from_grpc(error, self.url) from None
            self._info = ModelInfo.parse(json_format.MessageToDict(metadata))
        return self._info

    async def ready(self) -> bool:
        """Whether the server would answer a request for the model now."""
        request = service_pb2.ModelReadyRequest(name=self.model)
        try:
            return bool((await self.stub.ModelReady(request, timeout=CONTROL_TIMEOUT_S)).ready)
        except grpc.RpcError:
            return False

    async def wait_until_ready(self, timeout: float) -> None:
        """Wait for ready(); see GrpcClient.wait_until_ready."""
        deadline = asyncio.get_running_loop().time() + timeout
        while not await self.ready():
            if asyncio.get_running_loop().time() > deadline:
                raise unreachable(self.url, f"not ready after {timeout:g} s")
            await asyncio.sleep(0.1)

    async def close(self) -> None:
        """Close the channel; calls under way end with Cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def _start(self, request: GenerateRequest, timeout: float | None, request_id: str | None) -> AsyncStream:
        info = await self.info()
        if not request.stream:
            request = info.with_usage(request)
        answer = Answer(request, request_id or wire.new_request_id(), timeout)
        message = wire.infer_request(
            self.model, answer.request_id, info.tensors(request, timeout), info.wanted_outputs(request)
        )
        metadata = (*TYPED_ERRORS, *tracing.headers(answer.span).items())
        call = self.stub.ModelStreamInfer(iter([message]), timeout=info.patience(timeout), metadata=metadata)
        return AsyncStream(self, call, answer)


class AsyncStream:
    """Iterates over the chunks of one answer; leaving its `async with` early cancels the request on the server."""

    def __init__(self, client: AsyncGrpcClient, call: Any, answer: Answer) -> None:
        self._client = client
        self._call = call
        self._chunks = call.__aiter__()
        self._reading: asyncio.Future[Any] | None = None
        self._answer = answer
        self._final = False
        self._over = False

    @property
    def request_id(self) -> str:
        """The id the server knows the request by."""
        return self._answer.request_id

    @property
    def result(self) -> Result:
        """What has arrived so far; the whole answer once the iteration is over."""
        return self._answer.result()

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Chunk:
        while not self._over:
            try:
                response = await self._next_response()
            except StopAsyncIteration:
                self._over = True
                self._answer.finish(complete=self._final)
                break
            except asyncio.CancelledError:
                # grpc.aio reports a call cancelled on our side like a cancelled task.
                if self._answer.cancelled:
                    break
                raise
            except grpc.RpcError as error:
                raise await self._failed(error) from None
            if self._answer.cancelled:
                break
            chunk = await self._take(response)
            if chunk is not None:
                return chunk
        raise StopAsyncIteration

    async def _next_response(self) -> Any:
        """The next message; a task that is cancelled meanwhile does not cancel the call with it."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._chunks.__anext__())
        response = await asyncio.shield(self._reading)
        self._reading = None
        return response

    async def _read_to_the_end(self) -> None:
        with contextlib.suppress(StopAsyncIteration):
            while True:
                await self._next_response()

    async def cancel(self) -> None:
        """End the request on the server; the iteration then ends quietly. Safe to call twice."""
        if self._over:
            return
        self._over = self._answer.cancelled = True
        if await self._stop():
            await farewell.insist(self._stop, self._read_to_the_end)
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        # The stop request must get out even when this task is being cancelled.
        await asyncio.shield(asyncio.ensure_future(self.cancel()))

    async def _take(self, response: Any) -> Chunk | None:
        try:
            if response.error_message:
                raise from_message(response.error_message, self._answer.text)
            outputs = wire.decode(response.infer_response)
            self._final = wire.is_final(response.infer_response.parameters)
            return self._answer.add(outputs)
        except ValueError as error:
            await self.cancel()
            raise StreamBroken(f"The server sent something that is no answer ({error}).", self._answer.text) from None
        except ClientError:
            await self.cancel()
            raise

    async def _failed(self, error: grpc.RpcError) -> ClientError:
        self._over = True
        typed = from_grpc(error, self._client.url, self._answer.text)
        if isinstance(typed, DeadlineExceeded):
            await self._stop()
            return out_of_time(self._answer.timeout, self._answer.text)
        return typed

    async def _stop(self) -> bool:
        """Whether the server has been told."""
        try:
            await self._client.stop(self.request_id)
        except (ClientError, ValueError):  # ValueError: the channel is closed, so there is nobody to tell.
            return False
        return True
