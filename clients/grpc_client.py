"""Synchronous gRPC client. Every request is its own call on one shared channel, with its own deadline and cancel.

The stubs are tritonclient's generated ones; its InferenceServerClient allows one stream and one callback per client,
which leaves no way to cancel one request of many. Safe to use from many threads.
"""

from __future__ import annotations

import contextlib
from typing import Any

import grpc
from google.protobuf import json_format
from tritonclient.grpc import service_pb2, service_pb2_grpc

from clients import farewell, leftovers, wire
from clients.answer import Answer
from clients.blocking import BlockingClient, BlockingStream
from clients.errors import ClientError, DeadlineExceeded, from_grpc
from clients.grpc_answer import GrpcAnswer
from clients.model_info import ModelInfo
from clients.types import Chunk, GenerateRequest

CHANNEL_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
CONTROL_TIMEOUT_S = 5.0
"""For calls that do no work: health, metadata, stop."""

DEFAULT_URL = "127.0.0.1:8001"


class GrpcClient(BlockingClient["Stream"]):
    """Talks to one model of one server.

    Args:
        url: host:port of the gRPC endpoint.
        model: the model that takes text; `ensemble_unary` answers with one response only.
        stop_model: the model that takes stop requests.
    """

    def __init__(self, url: str = DEFAULT_URL, *, model: str = "ensemble", stop_model: str = "tensorrt_llm") -> None:
        super().__init__(url.removeprefix("grpc://"), model, stop_model)
        self._channel = grpc.insecure_channel(self.url, CHANNEL_OPTIONS)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

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

    def _ask_info(self) -> ModelInfo:
        request = service_pb2.ModelMetadataRequest(name=self.model)
        try:
            metadata = self.stub.ModelMetadata(request, timeout=CONTROL_TIMEOUT_S)
        except grpc.RpcError as error:
            raise from_grpc(error, self.url) from None
        return ModelInfo.parse(json_format.MessageToDict(metadata))

    def ready(self) -> bool:
        """Whether the server would answer a request for the model now."""
        request = service_pb2.ModelReadyRequest(name=self.model)
        try:
            return bool(self.stub.ModelReady(request, timeout=CONTROL_TIMEOUT_S).ready)
        except grpc.RpcError:
            return False

    def close(self) -> None:
        """Close the channel; calls under way end with Cancelled."""
        self._channel.close()

    def _send(self, request: GenerateRequest, info: ModelInfo, answer: Answer) -> Stream:
        grpc_answer = GrpcAnswer(self.model, request, info, answer)
        call = self.stub.ModelStreamInfer(
            iter([grpc_answer.message]), timeout=info.patience(answer.timeout), metadata=grpc_answer.metadata
        )
        return Stream(self, call, grpc_answer)


class Stream(BlockingStream):
    """Iterates over the chunks of one answer. Leaving it early, in any way, cancels the request on the server."""

    def __init__(self, client: GrpcClient, call: Any, grpc_answer: GrpcAnswer) -> None:
        self._client = client
        self._call = call
        self._grpc_answer = grpc_answer
        self._answer = grpc_answer.answer
        self._over = False
        leftovers.track(self)

    def __next__(self) -> Chunk:
        while not self._over:
            try:
                response = next(self._call)
            except StopIteration:
                self._over = True
                self._grpc_answer.finish()
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
        self._over = True
        self._answer.leave()
        # Whatever ends the call ends the farewell; another thread may close the channel meanwhile.
        if self._stop():
            with farewell.insisting(self._stop, self._call.cancel), contextlib.suppress(Exception):
                for _ in self._call:
                    pass
        self._call.cancel()

    def _take(self, response: Any) -> Chunk | None:
        try:
            return self._grpc_answer.take(response)
        except ClientError as error:
            self._answer.failed(error)
            self.cancel()
            raise

    def _failed(self, error: grpc.RpcError) -> ClientError:
        self._over = True
        failure = self._grpc_answer.failure(error, self._client.url)
        self._answer.failed(failure)
        if isinstance(failure, DeadlineExceeded):
            self._stop()
        return failure

    def _stop(self) -> bool:
        """Whether the server has been told."""
        try:
            self._client.stop(self.request_id)
        except (ClientError, ValueError):  # ValueError: the channel is closed, so there is nobody to tell.
            return False
        return True
