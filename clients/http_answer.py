"""What the HTTP clients share: bytes of one response in, chunks and in the end a verdict out.

Knows nothing of connections, and is the same for blocking and asyncio.
"""

from __future__ import annotations

from collections import deque

from clients import http_wire
from clients.answer import Answer
from clients.errors import ClientError, StreamBroken
from clients.model_info import ModelInfo
from clients.sse import EventParser
from clients.types import Chunk, GenerateRequest


class HttpAnswer:
    """Reads one response. Chunks that came before an error are given out before the error is raised."""

    def __init__(self, request: GenerateRequest, info: ModelInfo, answer: Answer) -> None:
        self.answer = answer
        self.body = http_wire.generate_body(answer.request_id, info.tensors(request, answer.timeout))
        # /generate gives one response only; several sequences without streaming come as several events.
        self._single = not request.stream and request.num_sequences == 1
        self.verb = "generate" if self._single else "generate_stream"
        self._says_why = "finish_reason" in info.outputs
        self._whole = b""
        self._parser = EventParser()
        self._chunks: deque[Chunk] = deque()
        self._failure: ClientError | None = None

    def feed(self, piece: bytes) -> None:
        """Take the next bytes; none: the response ended as HTTP says it should."""
        try:
            if not piece:
                self._end()
            elif self._single:
                self._whole += piece
            else:
                for data in self._parser.feed(piece):
                    self._add(data)
        except UnicodeDecodeError as error:
            self.fail(StreamBroken(f"The server sent bytes that are not UTF-8 ({error}).", self.answer.text))
        except ClientError as error:
            self.fail(error)

    def fail(self, error: ClientError) -> None:
        """Note what ended the response; take() raises it after the chunks that came before."""
        self._failure = error

    def take(self) -> Chunk | None:
        """The next chunk; None when there is none yet, or when the answer is over.

        Raises:
            ClientError: the answer ended by it.
        """
        if self._chunks:
            return self._chunks.popleft()
        if self._failure is not None:
            raise self._failure
        return None

    def _add(self, data: str | bytes) -> None:
        chunk = self.answer.add(http_wire.outputs(data, self.answer.text))
        if chunk is not None:
            self._chunks.append(chunk)

    def _end(self) -> None:

        if self._single:
            self._add(self._whole)
        self.answer.finish(complete=self.answer.has_every_finish_reason or not self._says_why)
