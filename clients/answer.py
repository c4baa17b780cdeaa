"""Gathers the chunks of one answer and judges its end; the same for every transport, sync and async.

Knows nothing of gRPC or HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clients import tracing
from clients.errors import Cancelled, ServerFailure, StreamBroken, out_of_time
from clients.log_probs import LogProbs
from clients.tool_calls import GrowingCalls, parse_entries
from clients.types import Chunk, GenerateRequest, Result, SequenceResult, Usage

_LOG_PROBS = frozenset({"logprobs", "logprobs_distribution", "prompt_logprobs"})
_COUNTS = frozenset({"num_input_tokens", "num_output_tokens"})
_IN_CHUNK = _LOG_PROBS | _COUNTS | {"text_output", "finish_reason", "warnings", "sequence_index", "tool_calls"}


class _Sequence:
    """One answer as it grows."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.logprobs: list[str] = []  # as JSON
        self.tool_calls = GrowingCalls()
        self.finish_reason: str | None = None


class Answer:
    """All that has arrived for one request."""

    def __init__(self, request: GenerateRequest, request_id: str, timeout: float | None, model: str) -> None:
        self.request_id = request_id
        self.timeout = timeout
        self.cancelled = False  # by this client
        self._repeats = (request.beam_width or 1) > 1  # with beams each chunk holds the text from the start
        self._expected = request.num_sequences
        self._sequences: dict[int, _Sequence] = {}
        self._warnings: list[str] = []
        self._outputs: dict[str, Any] = {}
        self._prompt_logprobs = LogProbs()
        self._logprobs_distribution: str | None = None
        self._num_input_tokens: int | None = None
        self._num_output_tokens: int | None = None
        self.span = tracing.open_span(request, request_id, model)

    def add(self, outputs: Mapping[str, Any]) -> Chunk | None:
        """Take the output tensors of one response; None when it held no news.

        Raises:
            StreamBroken: the tensors are not those of an answer.
        """
        if not outputs:
            return None
        try:
            chunk = _chunk(outputs)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise StreamBroken(f"The server sent something that is no answer ({error!r}).", self.text) from None
        self._keep(chunk)
        return chunk

    def _keep(self, chunk: Chunk) -> None:
        if self._repeats and chunk.texts:
            self._sequences.clear()  # there may be fewer beams than before
        for beam, text in enumerate(chunk.texts):
            sequence = self._sequences.setdefault(chunk.sequence_index + beam, _Sequence())
            sequence.parts.append(text)
            if beam < len(chunk.finish_reasons):
                sequence.finish_reason = chunk.finish_reasons[beam]
            if beam < len(chunk.tool_calls):
                sequence.tool_calls.add(chunk.tool_calls[beam])
        for beam, text in enumerate(chunk.outputs.get("logprobs", ())):
            self._sequences.setdefault(chunk.sequence_index + beam, _Sequence()).logprobs.append(text)
        self._warnings += [warning for warning in chunk.warnings if warning not in self._warnings]
        self._outputs.update((name, value) for name, value in chunk.outputs.items() if name not in _IN_CHUNK)
        if "prompt_logprobs" in chunk.outputs:
            self._prompt_logprobs = LogProbs(chunk.outputs["prompt_logprobs"])
        self._logprobs_distribution = self._logprobs_distribution or chunk.logprobs_distribution
        if chunk.num_input_tokens is not None:
            self._num_input_tokens = chunk.num_input_tokens
        if chunk.num_output_tokens is not None:
            before = 0 if self._repeats else self._num_output_tokens or 0
            self._num_output_tokens = before + chunk.num_output_tokens

    @property
    def text(self) -> str:
        """The first sequence's text so far."""
        first = self._sequences.get(0)
        return "".join(first.parts) if first else ""

    @property
    def has_every_finish_reason(self) -> bool:
        """Whether each sequence has said why it ended; beams come together, and may be fewer than asked for."""
        reasons = [sequence.finish_reason for sequence in self._sequences.values()]
        return len(reasons) >= (1 if self._repeats else self._expected) and all(reasons)

    def finish(self, *, complete: bool) -> None:
        """Judge the end of the answer; `complete` is whether the transport saw its last response.

        Raises:
            StreamBroken: the answer ended early.
            DeadlineExceeded: the server ended it because the client's timeout ran out.
            Cancelled: somebody else's stop request ended it.
            ServerFailure: the server says that it ended by an error.
        """
        try:
            self._judge(complete)
        except Exception as error:
            self._close_span(error)
            raise
        self._close_span(None)

    def failed(self, error: Exception) -> None:
        """Something else than its end has ended the answer, and is raised; the first such error is the span's."""
        self._close_span(error)

    def leave(self) -> None:
        """This client wants no more of it."""
        self.cancelled = True
        self._close_span(None)

    def __del__(self) -> None:
        self._close_span(None)

    def _close_span(self, error: Exception | None) -> None:
        span, self.span = self.span, None
        if span is not None:
            tracing.close_span(span, self.result(), error)

    def _judge(self, complete: bool) -> None:
        if self.cancelled:
            return
        if not complete:
            raise StreamBroken("The answer ended early: its last response never came.", self.text)
        reasons = {sequence.finish_reason for sequence in self._sequences.values()}
        if "timeout" in reasons and self.timeout is not None:
            raise out_of_time(self.timeout, self.text)
        if "cancelled" in reasons:
            raise Cancelled(f"Request {self.request_id} was cancelled by a stop request.", self.text)
        if "error" in reasons:
            raise ServerFailure("The server ended the answer because of an error; its log says which.", self.text)

    def result(self) -> Result:
        """All that has arrived so far, as one result."""
        sequences = tuple(
            SequenceResult(
                "".join(found.parts), found.finish_reason, LogProbs(found.logprobs), found.tool_calls.calls()
            )
            for _, found in sorted(self._sequences.items())
        )
        return Result(
            request_id=self.request_id,
            sequences=sequences or (SequenceResult("", "cancelled" if self.cancelled else None),),
            usage=Usage(self._num_input_tokens, self._num_output_tokens),
            warnings=tuple(self._warnings),
            logprobs_distribution=self._logprobs_distribution,
            prompt_logprobs=self._prompt_logprobs,
            outputs=dict(self._outputs),
        )


class AnswerStream:
    """What every client's stream tells of its answer."""

    _answer: Answer

    @property
    def request_id(self) -> str:
        """The id the server knows the request by."""
        return self._answer.request_id

    @property
    def result(self) -> Result:
        """What has arrived so far; the whole answer once the iteration is over."""
        return self._answer.result()


def _chunk(outputs: Mapping[str, Any]) -> Chunk:
    texts = tuple(outputs["text_output"])
    reasons = tuple(outputs.get("finish_reason", ()))
    return Chunk(
        text=texts[0],
        texts=texts,
        sequence_index=_integer(outputs, "sequence_index") or 0,
        finish_reason=reasons[0] if reasons else None,
        finish_reasons=reasons,
        logprobs=tuple(LogProbs((text,)) for text in outputs.get("logprobs", ())),
        tool_calls=tuple(parse_entries(text) for text in outputs.get("tool_calls", ())),
        logprobs_distribution=next(iter(outputs.get("logprobs_distribution", ())), None),
        prompt_logprobs=LogProbs(outputs.get("prompt_logprobs", ())),
        warnings=tuple(outputs.get("warnings", ())),
        num_input_tokens=_integer(outputs, "num_input_tokens"),
        num_output_tokens=_integer(outputs, "num_output_tokens"),
        outputs=outputs,
    )


def _integer(outputs: Mapping[str, Any], name: str) -> int | None:
    value = outputs.get(name)
    return None if value is None else int(value.flat[0])
