"""The step: schedule, compute, choose, tell. Single-threaded; LLMEngine gives it a thread and a queue in front.

Knows nothing of threads, Triton, tokenizers or grammars.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from python_backend.engine.beam_group import best_hypotheses, open_beams, step_beams
from python_backend.engine.block_manager import BlockManager
from python_backend.engine.fast_forward import may_fast_forward, num_logits, scored_now, take, take_forced
from python_backend.engine.masks import MaskFiller, MaskQueue, StepMasks, attach_masks
from python_backend.engine.request_state import RequestState, stream_interval
from python_backend.engine.runner import ModelRunner, StepInput
from python_backend.engine.sampler import Sampler
from python_backend.engine.scheduler import Batch, Scheduler, SequenceGroup
from python_backend.engine.sequence import Sequence
from python_backend.engine.stats import engine_stats
from python_backend.engine.stopping import StopDecision
from python_backend.errors import EngineFailure, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from python_backend.engine.config import EngineConfig
    from python_backend.engine.masks import FutureMask
    from python_backend.engine.output import RequestOutput
    from python_backend.engine.protocols import TextStop
    from python_backend.request import FinishReason, GenerationRequest

# A step that fails is the fault of what it holds; this many in a row mean that the engine itself is broken.
MAX_FAILED_STEPS = 3


class EngineCore:
    """Owns the model, the memory and the requests under way."""

    def __init__(
        self,
        checkpoint_dir: Path,
        config: EngineConfig,
        on_outputs: Callable[[list[RequestOutput]], None],
        make_text_stop: Callable[[GenerationRequest], TextStop] | None,
    ) -> None:
        self.config = config
        self._on_outputs, self._make_text_stop = on_outputs, make_text_stop
        self.runner = ModelRunner(checkpoint_dir, config)
        self.vocab_size = self.runner.model_config.vocab_size
        self._sampler = Sampler(self.vocab_size)
        self.masks, self.mask_queue = MaskFiller(self.vocab_size), MaskQueue()
        num_blocks = -(-config.kv_cache_tokens // config.tokens_per_block)
        self.blocks = BlockManager(num_blocks, config.tokens_per_block, enable_reuse=config.enable_kv_cache_reuse)
        self.scheduler = Scheduler(config, self.blocks)
        self.states: dict[int, RequestState] = {}  # by identity: request ids need not be unique
        self._owner: dict[SequenceGroup, RequestState] = {}
        self._events: list[RequestOutput] = []
        self._iteration = self._generated_tokens = self._failed_steps = 0
        self.stats = engine_stats(self.scheduler, self.blocks, Batch(), 0, 0)
        self.runner.warm_up(config.max_batch_size)

    @property
    def has_work(self) -> bool:
        """Whether another step, or telling what the last one gave, is due."""
        return self.scheduler.has_work or bool(self._events) or self.mask_queue.is_due

    def open(self, request: GenerationRequest) -> RequestState:
        """The state of an admitted request; touches nothing of the engine, so any thread may call it."""
        state = RequestState(request)
        for index in range(1 if request.sampling.beam_width > 1 else request.sampling.num_return_sequences):
            sequence = Sequence(request, index)
            if request.stop_texts and self._make_text_stop is not None:
                sequence.text_stop = self._make_text_stop(request)
            group = SequenceGroup(request, [sequence])
            if request.sampling.beam_width > 1:
                group.beams = open_beams(request, self.vocab_size, self.config.max_seq_len, self._make_text_stop)
            state.groups.append(group)
        state.num_open = len(state.groups)
        return state

    def add(self, state: RequestState, masks: FutureMask | None = None) -> None:
        """Take a request into the queue, or let it wait for its masks first."""
        self.states[id(state)] = state
        if masks is None:
            self._enqueue(state)
        else:
            self.mask_queue.add(state, masks)

    def admit_masked(self) -> None:
        """Queue the requests whose masks have come."""
        for state, masks in self.mask_queue.pop_ready():
            error = attach_masks(state, masks, self.masks)
            if error is None:
                self._enqueue(state)
            else:
                self.fail(state, error)

    def _enqueue(self, state: RequestState) -> None:
        for group in state.groups:
            self._owner[group] = state
            self.scheduler.add(group)

    def end_early(self, cancelled: set[str]) -> None:
        """End what was cancelled by id and what is over its deadline."""
        now = time.monotonic()
        for state in list(self.states.values()):
            if state.request.request_id in cancelled:
                self.end(state, "cancelled")
            elif state.request.deadline_s is not None and now >= state.request.deadline_s:
                self.end(state, "timeout")

    def step(self) -> None:
        """Compute the next tokens of all that fit, and tell the news of the step before meanwhile."""
        batch = self.scheduler.schedule()
        if not batch.groups:
            self.publish()
            return
        try:
            self._begin(batch)
            self.publish()
            chosen_for = batch.to_choose()
            masks = self.masks.fill([sequence for _, sequence in chosen_for])  # while the model computes
            logits = self.runner.wait()
            self._advance(batch, logits, chosen_for, masks)
            self._failed_steps = 0
        except Exception as failure:
            self._failed_steps += 1
            if self._failed_steps >= MAX_FAILED_STEPS:
                raise
            owners = (self._owner.get(scheduled.group) for scheduled in batch.groups)
            for state in {id(s): s for s in owners if s is not None}.values():
                self.fail(state, EngineFailure(f"The engine failed in a step of this request: {failure}"))
        self.update_stats(batch)

    def _begin(self, batch: Batch) -> None:
        """Start the computation of a step."""
        now = time.monotonic_ns()
        for scheduled in batch.groups:
            scheduled.group.first_scheduled_ns = scheduled.group.first_scheduled_ns or now
        self.runner.copy_blocks(batch.copies)
        self.runner.start([_step_input(sequence) for sequence in batch.sequences()])

    def _advance(
        self, batch: Batch, logits: np.ndarray, chosen_for: list[tuple[SequenceGroup, Sequence]], masks: StepMasks
    ) -> None:
        """Take the results of a step: KV is there, tokens are chosen, sequences end."""
        rows: list[int] = []
        choosing = {id(sequence) for _, sequence in chosen_for}
        row = 0
        for scheduled in batch.groups:
            group, first = scheduled.group, row
            for sequence in group.sequences:
                if not sequence.num_scheduled_tokens:
                    continue
                row += self._computed(group, sequence, logits, row)
                if id(sequence) in choosing:
                    rows.append(row - 1)
            if scheduled.samples and group.beams is not None:
                self._advance_beams(group, logits[first:row])
        if rows:
            self._choose(chosen_for, logits if len(rows) == len(logits) else logits[rows], masks)
        self._end_scored(batch)

    def _computed(self, group: SequenceGroup, sequence: Sequence, logits: np.ndarray, row: int) -> int:
        """Book the step's tokens of one sequence; returns how many rows of logits it has."""
        num_rows = num_logits(sequence)
        state = self._owner[group]
        for offset, token_id in list(scored_now(sequence, num_rows)):
            self._score(sequence, logits[row + offset], token_id)
        if state.prompt is not None:
            state.prompt.read(sequence, logits[row : row + num_rows], self._sampler)
        sequence.num_computed_tokens += sequence.num_scheduled_tokens
        sequence.num_scheduled_tokens = 0
        self.blocks.commit(sequence)
        return num_rows

    def _score(self, sequence: Sequence, row: np.ndarray, token_id: int) -> None:
        """Keep what the model thinks of a forced token; NaN is found where the next token is chosen."""
        if sequence.request.return_generation_logits:
            sequence.generation_logits.append(row.copy())
        self._sampler.score(row, token_id, sequence)
        sequence.num_unscored_tokens -= 1

    def _end_scored(self, batch: Batch) -> None:
        """End the sequences whose last tokens were forced, now that these are scored."""
        for scheduled in batch.groups:
            group, sequence = scheduled.group, scheduled.group.sequences[0]
            if sequence.pending_end is not None and not sequence.num_unscored_tokens and group in self._owner:
                state = self._owner[group]
                self._conclude(state, group, sequence, sequence.pending_end)
                self._tell(state, sequence, interval=1)

    def _choose(self, chosen_for: list[tuple[SequenceGroup, Sequence]], logits: np.ndarray, masks: StepMasks) -> None:
        sequences = [sequence for _, sequence in chosen_for]
        for sequence, row in zip(sequences, logits, strict=True):
            if sequence.request.return_generation_logits:
                sequence.generation_logits.append(row.copy())
        # A response costs the same whatever it carries, and many streams would take the cores from the engine.
        interval = self.config.stream_interval or stream_interval(len(self.scheduler.running))
        tokens = self._sampler.sample(logits, sequences, masks.bitmasks)
        for row, ((group, sequence), token) in enumerate(zip(chosen_for, tokens, strict=True)):
            state = self._owner.get(group)
            if state is None:
                continue  # another sample of the same request has failed in this step
            outcome = masks.errors.get(row, token)
            if isinstance(outcome, RequestError):
                self.fail(state, outcome)
                continue
            try:
                self._append(state, group, sequence, outcome)
            except RequestError as error:
                self.fail(state, error)
            else:
                self._tell(state, sequence, interval)

    def _append(self, state: RequestState, group: SequenceGroup, sequence: Sequence, token_id: int) -> None:
        group.first_token_ns = group.first_token_ns or time.monotonic_ns()
        length = len(sequence.token_ids)
        decision = take(sequence, token_id, self.config.max_seq_len)
        if decision.finish_reason is None and may_fast_forward(sequence, self.config):
            decision = take_forced(sequence, self.config.max_seq_len, self.masks) or decision
        self._generated_tokens += len(sequence.token_ids) - length
        if decision.finish_reason is not None and sequence.num_unscored_tokens:
            sequence.pending_end, decision = decision, StopDecision(append=True)
        self._conclude(state, group, sequence, decision)

    def _conclude(self, state: RequestState, group: SequenceGroup, sequence: Sequence, decision: StopDecision) -> None:
        """End a sequence, if it was decided so."""
        sequence.text_cut = decision.text_cut
        sequence.finish_reason = decision.finish_reason
        if decision.finish_reason is not None:
            self._close(state, group)

    def _tell(self, state: RequestState, sequence: Sequence, interval: int) -> None:
        event = state.progress(sequence, interval)
        if event is not None:
            self._events.append(event)

    def _advance_beams(self, group: SequenceGroup, logits: np.ndarray) -> None:
        group.first_token_ns = group.first_token_ns or time.monotonic_ns()
        state = self._owner[group]
        try:
            finished = step_beams(group, logits, self.blocks)
        except RequestError as error:
            self.fail(state, error)
            return
        self._generated_tokens += len(group.sequences)
        if finished:
            self._close(state, group)
            self._events.append(state.beams(best_hypotheses(group)))
        elif group.request.streaming:
            self._events.append(state.beams(group.sequences[: group.request.sampling.num_return_sequences]))

    def _close(self, state: RequestState, group: SequenceGroup) -> None:
        """A group is done: give its memory back."""
        self.scheduler.finish(group)
        self._owner.pop(group, None)
        state.num_open -= 1
        if state.num_open == 0:
            self.states.pop(id(state), None)

    def fail(self, state: RequestState, error: RequestError) -> None:
        """End a request with an error."""
        self._drop(state)
        self._events.append(state.fail(error))

    def end(self, state: RequestState, reason: FinishReason) -> None:
        """End a request with what it has."""
        self._drop(state)
        self._events += state.end(reason)

    def _drop(self, state: RequestState) -> None:
        for group in state.groups:
            if self._owner.pop(group, None) is not None:
                self.scheduler.finish(group)
        self.states.pop(id(state), None)
        self.mask_queue.remove(state)

    def publish(self) -> None:
        """Hand the events of the last step over; the next one is computed meanwhile."""
        events, self._events = self._events, []
        if events:
            self._on_outputs(events)

    def update_stats(self, batch: Batch) -> None:
        """Take the snapshot that other threads read."""
        self._iteration += bool(batch.groups)
        self.stats = engine_stats(self.scheduler, self.blocks, batch, self._iteration, self._generated_tokens)


def _step_input(sequence: Sequence) -> StepInput:
    start = sequence.num_computed_tokens
    tokens = sequence.token_ids[start : start + sequence.num_scheduled_tokens]
    return StepInput(tokens, start, sequence.block_table, num_logits(sequence), sequence.request.adapter)
