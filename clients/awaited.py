"""What the asyncio clients share, whatever the transport: clients.blocking, awaited. Knows nothing of gRPC or HTTP."""

from __future__ import annotations

import asyncio
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


class AwaitedStream(AnswerStream, ABC):
    """Iterates over the chunks of one answer; leaving its `async with` early cancels the request on the server."""

    def __aiter__(self) -> Self:
        return self

    @abstractmethod
    async def __anext__(self) -> Chunk: ...

    @abstractmethod
    async def cancel(self) -> None:
        """End the request on the server; the iteration then ends quietly. Safe to call twice."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        # The stop request must get out even when this task is being cancelled.
        await asyncio.shield(asyncio.ensure_future(self.cancel()))


StreamT = TypeVar("StreamT", bound=AwaitedStream)


class AwaitedClient(ABC, Generic[StreamT]):
    """Talks to one model of one server; a transport adds how requests are sent."""

    def __init__(self, url: str, model: str, stop_model: str) -> None:
        self.url = url
        self.model = model
        self.stop_model = stop_model
        self._info: ModelInfo | None = None

    async def generate(
        self, prompt: Prompt, *, timeout: float | None = None, request_id: str | None = None, **values: Any
    ) -> Result:
        """The whole answer at once; see BlockingClient.generate. Cancelling the task cancels on the server."""
        values["stream"] = False
        async with await self._start(GenerateRequest.of(prompt, **values), timeout, request_id) as stream:
            async for _ in stream:
                pass
            return stream.result

    async def stream(
        self, prompt: Prompt, *, timeout: float | None = None, request_id: str | None = None, **values: Any
    ) -> StreamT:
        """The answer as it is made; see BlockingClient.stream.

        Use it as `async with await client.stream(…) as stream`, so that leaving early cancels on the server.
        """
        return await self._start(GenerateRequest.of(prompt, **{**values, "stream": True}), timeout, request_id)

    @abstractmethod
    async def stop(self, request_id: str) -> None:
        """End a running request; see BlockingClient.stop."""

    async def info(self) -> ModelInfo:
        """What the model declares; see BlockingClient.info."""
        if self._info is None:
            self._info = await self._ask_info()
        return self._info

    @abstractmethod
    async def ready(self) -> bool:
        """Whether the server would answer a request for the model now."""

    async def wait_until_ready(self, timeout: float) -> None:
        """Wait for ready(); see BlockingClient.wait_until_ready."""
        deadline = asyncio.get_running_loop().time() + timeout
        while not await self.ready():
            if asyncio.get_running_loop().time() > deadline:
                raise unreachable(self.url, f"not ready after {timeout:g} s")
            await asyncio.sleep(0.1)

    @abstractmethod
    async def close(self) -> None:
        """Close the connections."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def _start(self, request: GenerateRequest, timeout: float | None, request_id: str | None) -> StreamT:
        answer = Answer(request, request_id or wire.new_request_id(), timeout, self.model)
        try:
            info = await self.info()
            if not request.stream:
                request = info.with_usage(request)
            return await self._send(request, info, answer)
        except Exception as error:
            answer.failed(error)
            raise

    @abstractmethod
    async def _send(self, request: GenerateRequest, info: ModelInfo, answer: Answer) -> StreamT: ...

    @abstractmethod
    async def _ask_info(self) -> ModelInfo: ...
