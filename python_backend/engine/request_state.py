"""One request inside the engine: its groups, and what of it has been told already. Knows nothing of scheduling."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from python_backend.engine.beam_group import best_hypotheses
from python_backend.engine.output import PerfMetrics, RequestOutput, SequenceOutput
from python_backend.engine.prompt_reader import PromptReader

if TYPE_CHECKING:
    from python_backend.engine.scheduler import SequenceGroup
    from python_backend.engine.sequence import Sequence
    from python_backend.errors import RequestError
    from python_backend.request import FinishReason, GenerationRequest


@dataclass(slots=True, eq=False)
class RequestState:
    """Turns the progress of a request into events."""

    request: GenerationRequest
    groups: list[SequenceGroup] = field(default_factory=list)
    num_open: int = 0  # groups that still run or wait
    prompt: PromptReader | None = None  # when its logits or log-probs are asked for

    def __post_init__(self) -> None:
        if PromptReader.wanted(self.request):
            self.prompt = PromptReader(self.request)

    def progress(self, sequence: Sequence, interval: int = 1) -> RequestOutput | None:
        """News of one sample, if there is something to show now: the first token, then `interval` at a time."""
        finished = sequence.finish_reason is not None
        if not finished and not self.request.streaming:
            return None
        upto = sequence.num_output_tokens - sequence.num_unscored_tokens
        if not finished and sequence.text_stop is not None and self.request.exclude_stop_words:
            upto -= sequence.text_stop.held_tokens()
        sent = sequence.num_output_tokens_sent
        if upto - sent < (interval if sent else 1) and not finished:
            return None
        sequence.num_output_tokens_sent = upto
        return self._event([self._news(sequence, sent, upto)])

    def beams(self, sequences: list[Sequence]) -> RequestOutput:
        """All tokens of every beam so far."""
        return self._event([self._news(s, 0, s.num_output_tokens) for s in sequences])

    def end(self, reason: FinishReason) -> list[RequestOutput]:
        """End what still runs; each open sample closes with what it has."""
        events = []
        for group in self.groups:
            if group.sequences[0].finish_reason is not None:
                continue
            self.num_open -= 1
            if group.beams is not None:
                events.append(self.beams(best_hypotheses(group, reason)))
                continue
            group.sequences[0].finish_reason = reason
            event = self.progress(group.sequences[0])
            assert event is not None
            events.append(event)
        return events

    def fail(self, error: RequestError) -> RequestOutput:
        """The request is over with an error."""
        self.num_open = 0
        return RequestOutput(self.request, [], finished=True, error=error, perf=self._perf())

    def _news(self, sequence: Sequence, start: int, stop: int) -> SequenceOutput:
        output = sequence.output_ids
        return SequenceOutput(
            index=sequence.index,
            token_ids=output[start:stop],
            context_ids=output[:start],
            finish_reason=sequence.finish_reason,
            text_cut=sequence.text_cut,
            cum_log_prob=sequence.cum_log_prob,
            log_probs=sequence.log_probs[:stop],
            top_log_probs=sequence.top_log_probs[start:stop],
            generation_logits=sequence.generation_logits[start:stop],
        )

    def _event(self, sequences: list[SequenceOutput]) -> RequestOutput:
        event = RequestOutput(self.request, sequences, finished=self.num_open == 0)
        if self.prompt is not None:
            self.prompt.tell(event)
        if self.request.return_perf_metrics or event.finished:
            event.perf = self._perf()
        return event

    def _perf(self) -> PerfMetrics:
        alloc = sum(g.alloc_new_blocks for g in self.groups)
        return PerfMetrics(
            arrival_ns=self.request.arrival_ns,
            first_scheduled_ns=min(g.first_scheduled_ns for g in self.groups),
            first_token_ns=min(g.first_token_ns for g in self.groups),
            last_token_ns=time.monotonic_ns(),
            alloc_new_blocks=alloc,
            alloc_total_blocks=alloc,
            reused_blocks=sum(g.reused_blocks for g in self.groups),
        )


def stream_interval(num_running: int) -> int:
    """Tokens in a streamed response: 1 up to 4 sequences, 2 up to 32, and one more for each further 32."""
    return 1 if num_running <= 4 else 1 + -(-num_running // 32)
