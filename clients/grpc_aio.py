"""Asynchronous gRPC client: the same calls as clients.grpc_client, awaited. One event loop per client."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
from google.protobuf import json_format
from tritonclient.grpc import service_pb2, service_pb2_grpc

from clients import farewell, wire
from clients.answer import Answer
from clients.awaited import AwaitedClient, AwaitedStream
from clients.errors import ClientError, DeadlineExceeded, from_grpc
from clients.grpc_answer import GrpcAnswer
from clients.grpc_client import CHANNEL_OPTIONS, CONTROL_TIMEOUT_S, DEFAULT_URL
from clients.model_info import ModelInfo
from clients.types import Chunk, GenerateRequest


class AsyncGrpcClient(AwaitedClient["AsyncStream"]):
    """Talks to one model of one server; arguments as for GrpcClient. Make it inside the event loop that uses it."""

    def __init__(self, url: str = DEFAULT_URL, *, model: str = "ensemble", stop_model: str = "tensorrt_llm") -> None:
        super().__init__(url.removeprefix("grpc://"), model, stop_model)
        self._channel = grpc.aio.insecure_channel(self.url, CHANNEL_OPTIONS)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def stop(self, request_id: str) -> None:
        """End a running request; see GrpcClient.stop."""
        message = wire.infer_request(self.stop_model, request_id, wire.stop_tensors())
        try:
            async for _ in self.stub.ModelStreamInfer(iter([message]), timeout=CONTROL_TIMEOUT_S):
                pass
        except grpc.RpcError as error:
            raise from_grpc(error, self.url) from None

    async def _ask_info(self) -> ModelInfo:
        request = service_pb2.ModelMetadataRequest(name=self.model)
        try:
            metadata = await self.stub.ModelMetadata(request, timeout=CONTROL_TIMEOUT_S)
        except grpc.RpcError as error:
            raise from_grpc(error, self.url) from None
        return ModelInfo.parse(json_format.MessageToDict(metadata))

    async def ready(self) -> bool:
        """Whether the server would answer a request for the model now."""
        request = service_pb2.ModelReadyRequest(name=self.model)
        try:
            return bool((await self.stub.ModelReady(request, timeout=CONTROL_TIMEOUT_S)).ready)
        except grpc.RpcError:
            return False

    async def close(self) -> None:
        """Close the channel; calls under way end with Cancelled."""
        await self._channel.close()

    async def _send(self, request: GenerateRequest, info: ModelInfo, answer: Answer) -> AsyncStream:
        grpc_answer = GrpcAnswer(self.model, request, info, answer)
        call = self.stub.ModelStreamInfer(
            iter([grpc_answer.message]), timeout=info.patience(answer.timeout), metadata=grpc_answer.metadata
        )
        return AsyncStream(self, call, grpc_answer)


class AsyncStream(AwaitedStream):
    """Iterates over the chunks of one answer; leaving its `async with` early cancels the request on the server."""

    def __init__(self, client: AsyncGrpcClient, call: Any, grpc_answer: GrpcAnswer) -> None:
        self._client = client
        self._call = call
        self._chunks = call.__aiter__()
        self._reading: asyncio.Future[Any] | None = None
        self._grpc_answer = grpc_answer
        self._answer = grpc_answer.answer
        self._over = False

    async def __anext__(self) -> Chunk:
        while not self._over:
            try:
                response = await self._next_response()
            except StopAsyncIteration:
                self._over = True
                self._grpc_answer.finish()
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
        self._over = True
        self._answer.leave()
        if await self._stop():
            await farewell.insist(self._stop, self._read_to_the_end)
        self._call.cancel()

    async def _take(self, response: Any) -> Chunk | None:
        try:
            return self._grpc_answer.take(response)
        except ClientError as error:
            self._answer.failed(error)
            await self.cancel()
            raise

    async def _failed(self, error: grpc.RpcError) -> ClientError:
        self._over = True
        failure = self._grpc_answer.failure(error, self._client.url)
        self._answer.failed(failure)
        if isinstance(failure, DeadlineExceeded):
            await self._stop()
        return failure

    async def _stop(self) -> bool:
        """Whether the server has been told."""
        try:
            await self._client.stop(self.request_id)
        except (ClientError, ValueError):  # ValueError: the channel is closed, so there is nobody to tell.
            return False
        return True
