"""What the gRPC clients share: the message of one call, and its responses made chunks and in the end a verdict.

Knows nothing of channels, and is the same for blocking and asyncio.
"""

from __future__ import annotations

from typing import Any

import grpc

from clients import tracing, wire
from clients.answer import Answer
from clients.errors import ClientError, DeadlineExceeded, StreamBroken, from_grpc, from_message, out_of_time
from clients.model_info import ModelInfo
from clients.types import Chunk, GenerateRequest

TYPED_ERRORS = (("triton_grpc_error", "true"),)
"""Makes Triton end a failed stream with a status code; otherwise an error is bare text."""


class GrpcAnswer:
    """Reads the responses of one call."""

    def __init__(self, model: str, request: GenerateRequest, info: ModelInfo, answer: Answer) -> None:
        self.answer = answer
        tensors = info.tensors(request, answer.timeout)
        self.message = wire.infer_request(model, answer.request_id, tensors, info.wanted_outputs(request))
        self.metadata = (*TYPED_ERRORS, *tracing.headers(answer.span).items())
        self._final = False

    def take(self, response: Any) -> Chunk | None:
        """The chunk of one response; None when it held no news.

        Raises:
            ClientError: the response is an error, or no answer.
        """
        try:
            if response.error_message:
                raise from_message(response.error_message, self.answer.text)
            outputs = wire.decode(response.infer_response)
            self._final = wire.is_final(response.infer_response.parameters)
            return self.answer.add(outputs)
        except ValueError as error:
            raise StreamBroken(f"The server sent something that is no answer ({error}).", self.answer.text) from None

    def finish(self) -> None:
        """Judge the end of the call; errors as in Answer.finish."""
        self.answer.finish(complete=self._final)

    def failure(self, error: grpc.RpcError, url: str) -> ClientError:
        """What the end of the call by `error` means."""
        typed = from_grpc(error, url, self.answer.text)
        return out_of_time(self.answer.timeout, self.answer.text) if isinstance(typed, DeadlineExceeded) else typed
