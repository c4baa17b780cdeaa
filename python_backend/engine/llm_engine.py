"""The in-flight batching engine: requests in, events out, one step after the other on a thread of its own.

Knows nothing of Triton, tokenizers or grammars.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from python_backend.engine.admission import admit
from python_backend.engine.beam_group import best_hypotheses, open_beams, step_beams
from python_backend.engine.block_manager import BlockManager
from python_backend.engine.request_state import RequestState
from python_backend.engine.runner import ModelRunner, StepInput
from python_backend.engine.sampler import Sampler
from python_backend.engine.scheduler import Batch, Scheduler, SequenceGroup
from python_backend.engine.sequence import Sequence
from python_backend.engine.stats import engine_stats
from python_backend.engine.stopping import decide
from python_backend.errors import EngineFailure, Overloaded, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from python_backend.engine.config import EngineConfig
    from python_backend.engine.output import EngineStats, RequestOutput
    from python_backend.engine.protocols import TextStop, TokenMask
    from python_backend.request import FinishReason, GenerationRequest

# A step that fails is the fault of what it holds; this many in a row mean that the engine itself is broken.
MAX_FAILED_STEPS = 3


class LLMEngine:
    """Serves many requests at once; every step computes the next tokens of all that fit."""

    def __init__(
        self,
        checkpoint_dir: Path,
        config: EngineConfig,
        on_outputs: Callable[[list[RequestOutput]], None],
        make_text_stop: Callable[[GenerationRequest], TextStop] | None = None,
        make_mask: Callable[[GenerationRequest], TokenMask] | None = None,
    ) -> None:
        """Compile the model and run it once.

        Args:
            checkpoint_dir: Hugging Face layout, plain or FP8.
            on_outputs: gets the events of a step, on the engine's thread while the next step is computed.
            make_text_stop: for requests with stop_texts.
            make_mask: for requests with a guide.
        """
        self.config = config
        self._on_outputs, self._make_text_stop, self._make_mask = on_outputs, make_text_stop, make_mask
        self._runner = ModelRunner(checkpoint_dir, config)
        self.model_config = self._runner.model_config
        self.vocab_size = self.model_config.vocab_size
        self._sampler = Sampler(self.vocab_size)
        num_blocks = -(-config.kv_cache_tokens // config.tokens_per_block)
        self._blocks = BlockManager(num_blocks, config.tokens_per_block, enable_reuse=config.enable_kv_cache_reuse)
        self._scheduler = Scheduler(config, self._blocks)
        self._states: dict[int, RequestState] = {}  # by identity: request ids need not be unique
        self._owner: dict[SequenceGroup, RequestState] = {}
        self._wake = threading.Condition()
        self._arrived: deque[RequestState] = deque()
        self._cancelled: set[str] = set()
        self._events: list[RequestOutput] = []
        self._stats = engine_stats(self._scheduler, self._blocks, Batch(), 0, 0)
        self._iteration = self._generated_tokens = self._failed_steps = 0
        self._stopping = False
        self.failure: BaseException | None = None  # set: the engine is dead and refuses everything
        self._thread = threading.Thread(target=self._run, name="engine-step", daemon=True)
        self._runner.warm_up(config.max_batch_size)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self) -> None:
        """Cancel what runs and end the engine's thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, request: GenerationRequest) -> None:
        """Take a request, from any thread.

        Raises:
            InvalidRequest: it does not fit the model or a limit.
            Overloaded: max_queue_size requests wait already, or the engine is being stopped.
            EngineFailure: the engine is dead.
        """
        admit(request, self.config, self._blocks, self.vocab_size)
        state = self._open(request)
        with self._wake:
            if self.failure is not None:
                raise EngineFailure(f"The engine has failed ({self.failure}); restart the server.")
            if self._stopping:
                raise Overloaded("The server is shutting down; send the request to another one.")
            limit = self.config.max_queue_size
            if limit and len(self._arrived) + len(self._scheduler.waiting) >= limit:
                raise Overloaded(f"Maximum queue size of {limit} has been reached, please try again later")
            self._arrived.append(state)
            self._wake.notify()

    def cancel(self, request_id: str) -> bool:
        """End all requests of that id as `cancelled`, from any thread; False when there is none."""
        with self._wake:
            known = any(s.request.request_id == request_id for s in [*self._arrived, *self._states.values()])
            if known:
                self._cancelled.add(request_id)
                self._wake.notify()
        return known

    def stats(self) -> EngineStats:
        """The state after the last step."""
        return self._stats

    def _open(self, request: GenerationRequest) -> RequestState:
        state = RequestState(request)
        for index in range(1 if request.sampling.beam_width > 1 else request.sampling.num_return_sequences):
            sequence = Sequence(request, index)
            if request.stop_texts and self._make_text_stop is not None:
                sequence.text_stop = self._make_text_stop(request)
            if request.guide is not None and self._make_mask is not None:
                sequence.mask = self._make_mask(request)
            group = SequenceGroup(request, [sequence])
            if request.sampling.beam_width > 1:
                group.beams = open_beams(request, self.vocab_size, self.config.max_seq_len, self._make_text_stop)
            state.groups.append(group)
        state.num_open = len(state.groups)
        return state

    def _run(self) -> None:
        try:
            while self._collect():
                self._step()
        except BaseException as failure:  # the thread's last words: without it every request would hang
            self.failure = failure
            for state in [*self._states.values(), *self._arrived]:
                self._fail(state, EngineFailure(f"The engine has failed: {failure}"))
            self._publish()
            raise
        for state in [*self._states.values(), *self._arrived]:
            self._end(state, "cancelled")
        self._publish()
        self._update_stats(Batch())

    def _collect(self) -> bool:
        """Wait for work and take what arrived; False when the engine is to stop."""
        with self._wake:
            while not (self._arrived or self._cancelled or self._scheduler.has_work or self._stopping or self._events):
                self._update_stats(Batch())
                self._wake.wait()
            arrived, self._arrived = self._arrived, deque()
            cancelled, self._cancelled = self._cancelled, set()
            for state in arrived:
                self._states[id(state)] = state
        for state in arrived:
            for group in state.groups:
                self._owner[group] = state
                self._scheduler.add(group)
        self._end_early(cancelled)
        return not self._stopping

    def _end_early(self, cancelled: set[str]) -> None:
        now = time.monotonic()
        for state in list(self._states.values()):
            if state.request.request_id in cancelled:
                self._end(state, "cancelled")
            elif state.request.deadline_s is not None and now >= state.request.deadline_s:
                self._end(state, "timeout")

    def _step(self) -> None:
        batch = self._scheduler.schedule()
        if not batch.groups:
            self._publish()
            return
        try:
            self._begin(batch)
            self._publish()
            logits = self._runner.wait()
            self._advance(batch, logits)
            self._failed_steps = 0
        except Exception as failure:
            self._failed_steps += 1
            if self._failed_steps >= MAX_FAILED_STEPS:
                raise
            owners = (self._owner.get(scheduled.group) for scheduled in batch.groups)
            for state in {id(s): s for s in owners if s is not None}.values():
                self._fail(state, EngineFailure(f"The engine failed in a step of this request: {failure}"))
        self._update_stats(batch)

    def _begin(self, batch: Batch) -> None:
        """Start the computation of a step."""
        now = time.monotonic_ns()
        for scheduled in batch.groups:
            scheduled.group.first_scheduled_ns = scheduled.group.first_scheduled_ns or now
        self._runner.copy_blocks(batch.copies)
        self._runner.start([_step_input(sequence) for sequence in batch.sequences()])

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
        self._blocks.commit(sequence)
        return num_rows

    def _choose(self, chosen_for: list[tuple[SequenceGroup, Sequence]], logits: np.ndarray) -> None:
        sequences = [sequence for _, sequence in chosen_for]
        for sequence, row in zip(sequences, logits, strict=True):
            if sequence.request.return_generation_logits:
                sequence.generation_logits.append(row.copy())
        tokens = self._sampler.sample(logits, sequences, _bitmasks(sequences, self.vocab_size))
        for (group, sequence), token in zip(chosen_for, tokens, strict=True):
            state = self._owner.get(group)
            if state is None:
                continue  # another sample of the same request has failed in this step
            if isinstance(token, RequestError):
                self._fail(state, token)
            else:
                self._append(state, group, sequence, token)

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
        event = state.progress(sequence)
        if event is not None:
            self._events.append(event)

    def _advance_beams(self, group: SequenceGroup, logits: np.ndarray) -> None:
        group.first_token_ns = group.first_token_ns or time.monotonic_ns()
        state = self._owner[group]
        try:
            finished = step_beams(group, logits, self._blocks)
        except RequestError as error:
            self._fail(state, error)
            return
        self._generated_tokens += len(group.sequences)
        if finished:
            self._close(state, group)
            self._events.append(state.beams(best_hypotheses(group)))
        elif group.request.streaming:
            self._events.append(state.beams(group.sequences[: group.request.sampling.num_return_sequences]))

    def _close(self, state: RequestState, group: SequenceGroup) -> None:
        """A group is done: give its memory back."""
        self._scheduler.finish(group)
        self._owner.pop(group, None)
        state.num_open -= 1
        if state.num_open == 0:
            self._states.pop(id(state), None)

    def _fail(self, state: RequestState, error: RequestError) -> None:
        self._drop(state)
        self._events.append(state.fail(error))

    def _end(self, state: RequestState, reason: FinishReason) -> None:
        self._drop(state)
        self._events += state.end(reason)

    def _drop(self, state: RequestState) -> None:
        for group in state.groups:
            if self._owner.pop(group, None) is not None:
                self._scheduler.finish(group)
        self._states.pop(id(state), None)

    def _publish(self) -> None:
        """Hand the events of the last step over; the next one is computed meanwhile."""
        events, self._events = self._events, []
        if events:
            self._on_outputs(events)

    def _update_stats(self, batch: Batch) -> None:
        self._iteration += bool(batch.groups)
        self._stats = engine_stats(self._scheduler, self._blocks, batch, self._iteration, self._generated_tokens)


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
