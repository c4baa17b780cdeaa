"""What the blocking clients share, whatever the transport. Knows nothing of gRPC or HTTP."""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from clients import wire
from clients.answer import Answer, AnswerStream
from clients.errors import unreachable
from clients.model_info import ModelInfo
from clients.types import Chunk, GenerateRequest, Prompt, Result

if TYPE_CHECKING:
    from typing_extensions import Self


class BlockingStream(AnswerStream, ABC):
    """Iterates over the chunks of one answer. Leaving it early, in any way, cancels the request on the server."""

    def __iter__(self) -> Self:
        return self

    @abstractmethod
    def __next__(self) -> Chunk: ...

    @abstractmethod
    def cancel(self) -> None:
        """End the request on the server; the iteration then ends quietly. Safe from any thread, and twice."""

    def close(self) -> None:
        """The same as cancel()."""
        self.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.cancel()

    def __del__(self) -> None:
        # A loop left by `break` drops its stream without closing it.
        if not sys.is_finalizing():
            self.cancel()


StreamT = TypeVar("StreamT", bound=BlockingStream)


class BlockingClient(ABC, Generic[StreamT]):
    """Talks to one model of one server; a transport adds how requests are sent."""

    def __init__(self, url: str, model: str, stop_model: str) -> None:
        self.url = url
        self.model = model
        self.stop_model = stop_model
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
    ) -> StreamT:
        """The answer as it is made; the request is sent at once, and over HTTP taken by the server on return.

        Arguments and errors as in generate().
        """
        return self._start(GenerateRequest.of(prompt, **{**values, "stream": True}), timeout, request_id)

    @abstractmethod
    def stop(self, request_id: str) -> None:
        """End a running request; an unknown id is no error.

        Raises:
            ClientError: the stop request did not get through.
        """

    def info(self) -> ModelInfo:
        """What the model declares; asked once.

        Raises:
            ClientError: the server does not answer or has no such model.
        """
        with self._info_lock:
            if self._info is None:
                self._info = self._ask_info()
            return self._info

    @abstractmethod
    def ready(self) -> bool:
        """Whether the server would answer a request for the model now."""

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

    @abstractmethod
    def close(self) -> None:
        """Close the connections."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _start(self, request: GenerateRequest, timeout: float | None, request_id: str | None) -> StreamT:
        answer = Answer(request, request_id or wire.new_request_id(), timeout, self.model)
        try:
            info = self.info()
            if not request.stream:
                request = info.with_usage(request)
            return self._send(request, info, answer)
        except Exception as error:
            answer.failed(error)
            raise

    @abstractmethod
    def _send(self, request: GenerateRequest, info: ModelInfo, answer: Answer) -> StreamT: ...

    @abstractmethod
    def _ask_info(self) -> ModelInfo: ...
