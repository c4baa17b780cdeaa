"""The step: schedule, compute, choose, tell. Single-threaded; LLMEngine gives it a thread and a queue in front.

Knows nothing of threads, Triton, tokenizers or grammars.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from python_backend.engine.beam_group import best_hypotheses, open_beams, step_beams
from python_backend.engine.block_manager import BlockManager
from python_backend.engine.request_state import RequestState
from python_backend.engine.runner import ModelRunner, StepInput
from python_backend.engine.sampler import Sampler
from python_backend.engine.scheduler import Batch, Scheduler, SequenceGroup
from python_backend.engine.sequence import Sequence
from python_backend.engine.stats import engine_stats
from python_backend.engine.stopping import decide
from python_backend.errors import EngineFailure, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from python_backend.engine.config import EngineConfig
    from python_backend.engine.output import RequestOutput
    from python_backend.engine.protocols import TextStop, TokenMask
    from python_backend.request import FinishReason, GenerationRequest

# A step that fails is the fault of what it holds; this many in a row mean that the engine itself is broken.
MAX_FAILED_STEPS = 3
SEQUENCES_PER_STREAMED_TOKEN = 16


class EngineCore:
    """Owns the model, the memory and the requests under way."""

    def __init__(
        self,
        checkpoint_dir: Path,
        config: EngineConfig,
        on_outputs: Callable[[list[RequestOutput]], None],
        make_text_stop: Callable[[GenerationRequest], TextStop] | None,
        make_mask: Callable[[GenerationRequest], TokenMask] | None,
    ) -> None:
        self.config = config
        self._on_outputs, self._make_text_stop, self.make_mask = on_outputs, make_text_stop, make_mask
        self.runner = ModelRunner(checkpoint_dir, config)
        self.vocab_size = self.runner.model_config.vocab_size
        self._sampler = Sampler(self.vocab_size)
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
        return self.scheduler.has_work or bool(self._events)

    def open(self, request: GenerationRequest) -> RequestState:
        """The state of an admitted request; touches nothing of the engine, so any thread may call it."""
        state = RequestState(request)
        for index in range(1 if request.sampling.beam_width > 1 else request.sampling.num_return_sequences):
            sequence = Sequence(request, index)
            if request.stop_texts and self._make_text_stop is not None:
                sequence.text_stop = self._make_text_stop(request)
            if request.guide is not None and self.make_mask is not None:
                sequence.mask = self.make_mask(request)
            group = SequenceGroup(request, [sequence])
            if request.sampling.beam_width > 1:
                group.beams = open_beams(request, self.vocab_size, self.config.max_seq_len, self._make_text_stop)
            state.groups.append(group)
        state.num_open = len(state.groups)
        return state

    def add(self, state: RequestState) -> None:
        """Take a request into the queue."""
        self.states[id(state)] = state
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
            logits = self.runner.wait()
            self._advance(batch, logits)
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

    def _advance(self, batch: Batch, logits: np.ndarray) -> None:
        """Take the results of a step: KV is there, tokens are chosen, sequences end."""
        rows: list[int] = []
        chosen_for: list[tuple[SequenceGroup, Sequence]] = []
        row = 0
        for scheduled in batch.groups:
            group, first = scheduled.group, row
            for sequence in group.sequences:
                if not sequence.num_scheduled_tokens:
                    continue
                row += self._computed(group, sequence, logits, row)
                if scheduled.samples and group.beams is None:
                    rows.append(row - 1)
                    chosen_for.append((group, sequence))
            if scheduled.samples and group.beams is not None:
                self._advance_beams(group, logits[first:row])
        if rows:
            self._choose(chosen_for, logits if len(rows) == len(logits) else logits[rows])

    def _computed(self, group: SequenceGroup, sequence: Sequence, logits: np.ndarray, row: int) -> int:
        """Book the step's tokens of one sequence; returns how many rows of logits it has."""
        num_rows = _num_logits(sequence)
        state = self._owner[group]
        missing = sequence.num_prompt_tokens - sequence.num_computed_tokens
        if group.request.return_context_logits and group is state.groups[0] and missing > 0:
            state.context_logits.append(logits[row : row + min(missing, num_rows)].copy())
        sequence.num_computed_tokens += sequence.num_scheduled_tokens
        sequence.num_scheduled_tokens = 0
        self.blocks.commit(sequence)
        return num_rows

    def _choose(self, chosen_for: list[tuple[SequenceGroup, Sequence]], logits: np.ndarray) -> None:
        sequences = [sequence for _, sequence in chosen_for]
        for sequence, row in zip(sequences, logits, strict=True):
            if sequence.request.return_generation_logits:
                sequence.generation_logits.append(row.copy())
        # A response costs the same whatever it carries, and many streams would take the cores from the engine.
        interval = self.config.stream_interval or -(-len(self.scheduler.running) // SEQUENCES_PER_STREAMED_TOKEN)
        tokens = self._sampler.sample(logits, sequences, _bitmasks(sequences, self.vocab_size))
        for (group, sequence), token in zip(chosen_for, tokens, strict=True):
            state = self._owner.get(group)
            if state is None:
                continue  # another sample of the same request has failed in this step
            if isinstance(token, RequestError):
                self.fail(state, token)
            else:
                self._append(state, group, sequence, token)
                self._tell(state, sequence, interval)

    def _append(self, state: RequestState, group: SequenceGroup, sequence: Sequence, token_id: int) -> None:
        group.first_token_ns = group.first_token_ns or time.monotonic_ns()
        decision = decide(sequence, token_id, self.config.max_seq_len)
        if decision.append:
            sequence.token_ids.append(token_id)
            self._generated_tokens += 1
            if sequence.mask is not None:
                sequence.mask.accept(token_id)
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

    def publish(self) -> None:
        """Hand the events of the last step over; the next one is computed meanwhile."""
        events, self._events = self._events, []
        if events:
            self._on_outputs(events)

    def update_stats(self, batch: Batch) -> None:
        """Take the snapshot that other threads read."""
        self._iteration += bool(batch.groups)
        self.stats = engine_stats(self.scheduler, self.blocks, batch, self._iteration, self._generated_tokens)


def _num_logits(sequence: Sequence) -> int:
    """Rows of logits that the scheduled tokens of a sequence give: the last one, or all for context logits."""
    whole_prompt = sequence.request.return_context_logits and sequence.num_output_tokens == 0
    return sequence.num_scheduled_tokens if whole_prompt else 1


def _step_input(sequence: Sequence) -> StepInput:
    start = sequence.num_computed_tokens
    tokens = sequence.token_ids[start : start + sequence.num_scheduled_tokens]
    return StepInput(tokens, start, sequence.block_table, _num_logits(sequence))


def _bitmasks(sequences: list[Sequence], vocab_size: int) -> np.ndarray | None:
    """Allowed tokens of every row, None when nothing is constrained."""
    if all(s.mask is None for s in sequences):
        return None
    bitmasks = np.full([len(sequences), -(-vocab_size // 32)], -1, np.int32)
    for row, sequence in zip(bitmasks, sequences, strict=True):
        if sequence.mask is not None:
            sequence.mask.fill(row)
    return bitmasks
