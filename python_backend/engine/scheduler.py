"""Decides, before every step, which tokens of which sequences are computed. Knows nothing of models or sampling.

First come, first served: running groups go on, then waiting ones join while tokens, slots and blocks last. When blocks
run out, the group that joined last gives its blocks back and is computed again later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from python_backend.engine.prompt_reader import FEW_ROWS, MAX_ROWS, reads_prompt
from python_backend.engine.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from python_backend.engine.beam_search import BeamSearch
    from python_backend.engine.block_manager import BlockCopy, BlockManager
    from python_backend.engine.config import EngineConfig
    from python_backend.request import GenerationRequest


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """What is scheduled as one: a single sequence, or all beams of a request."""

    request: GenerationRequest
    sequences: list[Sequence]
    beams: BeamSearch | None = None
    preempted: bool = False
    alloc_new_blocks: int = 0  # for the prompt
    reused_blocks: int = 0
    first_scheduled_ns: int = 0
    first_token_ns: int = 0

    @property
    def width(self) -> int:
        """Slots that the group takes, now or once its beams have forked."""
        return self.request.sampling.beam_width

    @property
    def in_context_phase(self) -> bool:
        """Whether the prompt is still being computed."""
        return self.sequences[0].num_output_tokens == 0


@dataclass(slots=True)
class ScheduledGroup:
    """A group of the step and whether its next tokens are chosen after it."""

    group: SequenceGroup
    samples: bool


@dataclass(slots=True)
class Batch:
    """One step: `copies` come first, then the scheduled tokens of every sequence."""

    groups: list[ScheduledGroup] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    context_tokens: int = 0

    def sequences(self) -> Iterator[Sequence]:
        """Those with tokens in this step, in the order of the runner's rows."""
        for scheduled in self.groups:
            yield from (s for s in scheduled.group.sequences if s.num_scheduled_tokens)

    def to_choose(self) -> list[tuple[SequenceGroup, Sequence]]:
        """Those that get a token of their own choice after this step, in the same order; beams choose elsewhere."""
        return [
            (scheduled.group, sequence)
            for scheduled in self.groups
            if scheduled.samples and scheduled.group.beams is None
            for sequence in scheduled.group.sequences
            if sequence.num_scheduled_tokens and sequence.pending_end is None
        ]


class Scheduler:
    """Holds the waiting and the running groups."""

    def __init__(self, config: EngineConfig, blocks: BlockManager) -> None:
        self.config, self.blocks = config, blocks
        self.waiting: deque[SequenceGroup] = deque()
        self.running: list[SequenceGroup] = []
        self._rows_left = MAX_ROWS  # of prompts that are read, in the step being planned
        self.preemptions = self.prompt_tokens = self.cached_prompt_tokens = 0  # since start
        self.short_of_blocks = False  # somebody waits for nothing but blocks

    @property
    def has_work(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self.waiting or self.running)

    def add(self, group: SequenceGroup) -> None:
        """Queue a group."""
        self.waiting.append(group)

    def schedule(self) -> Batch:
        """Choose the tokens of the next step and get their blocks."""
        batch = Batch()
        self._rows_left = MAX_ROWS
        budget = self.config.max_num_tokens
        static = self.config.batching_strategy == "V1"
        may_admit = not (static and self.running)
        preemptions = self.preemptions
        self.short_of_blocks = False
        # Decoding goes before prefill, so that a long prompt never holds up those who are being answered.
        for group in sorted(self.running, key=lambda g: g.in_context_phase):
            if group in self.running:  # an earlier one may have preempted it
                budget -= self._continue(group, budget, batch)
        may_admit = may_admit and self.preemptions == preemptions
        while may_admit and self.waiting and budget > 0:
            used = self._admit(self.waiting[0], budget, batch)
            if not used:
                break
            budget -= used
        return batch

    def finish(self, group: SequenceGroup) -> None:
        """Take a group out, wherever it is, and free its blocks."""
        for sequence in group.sequences:
            self.blocks.free(sequence)
        if group in self.running:
            self.running.remove(group)
        elif group in self.waiting:
            self.waiting.remove(group)

    def _continue(self, group: SequenceGroup, budget: int, batch: Batch) -> int:
        plan = self._plan(group, budget)
        while plan and self._needed(plan) > self.blocks.num_free:
            victim = self.running[-1]
            self._preempt(victim, batch)
            if victim is group:
                return 0
        return self._schedule(group, plan, batch)

    def _admit(self, group: SequenceGroup, budget: int, batch: Batch) -> int:
        slots = self.config.max_batch_size - sum(g.width for g in self.running)
        if group.width > slots:
            return 0
        copies = [copy for sequence in group.sequences for copy in self.blocks.match_prefix(sequence)]
        cached = sum(len(s.block_table) for s in group.sequences)
        plan = self._plan(group, budget)
        self.short_of_blocks = max(self._needed(plan), self._to_keep_free(group, plan)) > self.blocks.num_free
        if not plan or self.short_of_blocks:
            for sequence in group.sequences:
                self.blocks.free(sequence)
            return 0
        self.waiting.popleft()
        self.running.append(group)
        batch.copies += copies
        if not group.preempted:
            group.reused_blocks = cached
            prompt_blocks = sum(self.blocks.blocks_for(s.num_prompt_tokens) for s in group.sequences)
            group.alloc_new_blocks = prompt_blocks - cached + len(copies)
            self.prompt_tokens += sum(s.num_prompt_tokens for s in group.sequences)
            self.cached_prompt_tokens += sum(s.num_cached_tokens for s in group.sequences)
        return self._schedule(group, plan, batch)

    def _plan(self, group: SequenceGroup, budget: int) -> list[tuple[Sequence, int]]:
        """How many tokens of each sequence to compute; empty when nothing can be done now."""
        pending = [s for s in group.sequences if s.finish_reason is None]
        # Kernels round differently for one token and for many. Were the last token of a prompt computed with the rest,
        # an answer would depend on how much of the prompt was cached. Beams, too, choose their tokens together.
        last_alone = group.beams is not None or group.in_context_phase or group.preempted
        if last_alone and any(s.num_uncomputed_tokens > 1 for s in pending):
            wanted = [(s, s.num_uncomputed_tokens - 1) for s in pending]
        else:
            wanted = [(s, s.num_uncomputed_tokens) for s in pending]
        plan = []
        for sequence, count in wanted:
            whole = count <= budget
            if not whole and (count <= 1 or not self.config.enable_chunked_context):
                continue
            take = min(count, budget)
            if self.config.enable_chunked_context and reads_prompt(sequence):
                take = min(take, max(FEW_ROWS, self._rows_left))
            if take:
                plan.append((sequence, take))
                budget -= take
        decoding = all(count == 1 for _, count in wanted)
        return plan if len(plan) == len(wanted) or not decoding else []

    def _needed(self, plan: list[tuple[Sequence, int]]) -> int:
        return sum(self.blocks.needed(sequence, count) for sequence, count in plan)

    def _to_keep_free(self, group: SequenceGroup, plan: list[tuple[Sequence, int]]) -> int:
        """Blocks that must be free to admit the group beside what runs."""
        if self.config.batch_scheduler_policy == "max_utilization":
            # One block for each running sequence keeps an admission from causing a preemption at once.
            return self._needed(plan) + sum(len(g.sequences) for g in self.running)
        return sum(self._still_to_come(g) for g in [*self.running, group])

    def _still_to_come(self, group: SequenceGroup) -> int:
        most = self.blocks.blocks_for(self.final_length(group.request)) * group.width + (group.width > 1)
        return max(0, most - sum(len(s.block_table) for s in group.sequences))

    def final_length(self, request: GenerationRequest) -> int:
        """The most tokens a sequence of this request can have."""
        return min(len(request.prompt_ids) + request.sampling.max_tokens, self.config.max_seq_len)

    def _schedule(self, group: SequenceGroup, plan: list[tuple[Sequence, int]], batch: Batch) -> int:
        for sequence, count in plan:
            batch.copies += self.blocks.allocate(sequence, count)
            sequence.num_scheduled_tokens = count
            if reads_prompt(sequence):
                self._rows_left -= count
        total = sum(count for _, count in plan)
        if plan:
            done = all(
                s.num_uncomputed_tokens == s.num_scheduled_tokens for s in group.sequences if s.finish_reason is None
            )
            batch.groups.append(ScheduledGroup(group, samples=done))
            if not done or group.in_context_phase:
                batch.context_tokens += total
        return total

    def _preempt(self, group: SequenceGroup, batch: Batch) -> None:
        """Take the blocks of a running group; it starts again from its tokens, first in the queue."""
        batch.groups = [s for s in batch.groups if s.group is not group]
        for sequence in group.sequences:
            sequence.num_scheduled_tokens = 0
            self.blocks.free(sequence)
        self.running.remove(group)
        group.preempted = True
        self.waiting.appendleft(group)
        self.preemptions += 1
        self.short_of_blocks = True
