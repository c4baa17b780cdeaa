"""Blocks: shared, copied before they are written, never lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from python_backend.engine.block_manager import BlockManager
from python_backend.engine.sequence import Sequence
from python_backend.request import GenerationRequest, SamplingParams

SIZE = 4


def sequence(token_ids: list[int], *, salt: int | None = None) -> Sequence:
    return Sequence(GenerationRequest("r", token_ids, SamplingParams(8), lora_task_id=salt))


def compute(blocks: BlockManager, seq: Sequence) -> None:
    """Prefill all of a sequence that has been matched already."""
    count = seq.num_uncomputed_tokens
    blocks.allocate(seq, count)
    seq.num_computed_tokens += count
    blocks.commit(seq)


def prefilled(blocks: BlockManager, token_ids: list[int], *, salt: int | None = None) -> Sequence:
    seq = sequence(token_ids, salt=salt)
    blocks.match_prefix(seq)
    compute(blocks, seq)
    return seq


def test_a_shared_prefix_is_stored_once():
    blocks = BlockManager(16, SIZE)
    first = prefilled(blocks, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    second = prefilled(blocks, [1, 2, 3, 4, 5, 6, 7, 8, 10])
    assert first.block_table[:2] == second.block_table[:2]
    assert second.num_cached_tokens == 8
    assert blocks.num_used == 4


def test_the_last_token_of_a_prompt_is_always_computed():
    blocks = BlockManager(16, SIZE)
    prefilled(blocks, [1, 2, 3, 4, 5, 6, 7, 8])
    again = sequence([1, 2, 3, 4, 5, 6, 7, 8])
    copies = blocks.match_prefix(again)
    assert again.num_computed_tokens == 7
    assert len(copies) == 1


def test_a_partly_equal_block_is_copied_not_shared():
    blocks = BlockManager(16, SIZE)
    first = prefilled(blocks, [1, 2, 3, 4, 5, 6, 7, 8])
    second = sequence([1, 2, 3, 4, 5, 6, 99, 98])
    copies = blocks.match_prefix(second)
    assert [(c.source, c.target) for c in copies] == [(first.block_table[1], second.block_table[1])]
    assert second.num_computed_tokens == 6


def test_the_rest_of_a_finished_answer_can_be_continued():
    blocks = BlockManager(16, SIZE)
    first = prefilled(blocks, [1, 2, 3, 4, 5, 6])
    blocks.free(first)
    follow_up = sequence([1, 2, 3, 4, 5, 6, 7])
    blocks.match_prefix(follow_up)
    assert follow_up.num_computed_tokens == 6


def test_adapters_never_share_a_prefix():
    blocks = BlockManager(16, SIZE)
    prefilled(blocks, [1, 2, 3, 4, 5, 6, 7, 8], salt=1)
    other = sequence([1, 2, 3, 4, 5, 6, 7, 8], salt=2)
    assert blocks.match_prefix(other) == []
    assert other.num_computed_tokens == 0


def test_the_oldest_unused_block_is_evicted_first_and_ends_before_starts():
    blocks = BlockManager(3, SIZE)
    old = prefilled(blocks, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    blocks.free(old)
    prefilled(blocks, [20, 21, 22])
    again = sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])
    blocks.match_prefix(again)
    assert again.num_cached_tokens == 8


def test_without_reuse_nothing_is_kept():
    blocks = BlockManager(16, SIZE, enable_reuse=False)
    blocks.free(prefilled(blocks, [1, 2, 3, 4, 5]))
    again = sequence([1, 2, 3, 4, 5])
    blocks.match_prefix(again)
    assert again.num_computed_tokens == 0
    blocks.check_integrity()


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=12))
@settings(max_examples=200, deadline=None)
def test_what_is_matched_was_computed_from_the_same_tokens(prompts):
    """A model of the memory: every block remembers which token was written where."""
    blocks = BlockManager(64, SIZE)
    memory: dict[tuple[int, int], tuple[int, ...]] = {}
    for prompt in prompts:
        seq = sequence(prompt)
        copies = blocks.match_prefix(seq)
        copies += blocks.allocate(seq, seq.num_uncomputed_tokens)
        for copy in copies:
            for offset in range(SIZE):
                if (copy.source, offset) in memory:
                    memory[copy.target, offset] = memory[copy.source, offset]
        for position in range(seq.num_computed_tokens):
            written = memory[seq.block_table[position // SIZE], position % SIZE]
            assert written == tuple(prompt[: position + 1])
        for position in range(seq.num_computed_tokens, len(prompt)):
            memory[seq.block_table[position // SIZE], position % SIZE] = tuple(prompt[: position + 1])
        seq.num_computed_tokens = len(prompt)
        blocks.commit(seq)
        blocks.check_integrity()
        blocks.free(seq)
        assert blocks.num_used == 0


class Blocks(RuleBasedStateMachine):
    """Any order of admitting, growing, forking and freeing keeps the books right."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(12, SIZE)
        self.live: list[Sequence] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def admit(self, tokens):
        seq = sequence(tokens)
        self.blocks.match_prefix(seq)
        if self.blocks.needed(seq, seq.num_uncomputed_tokens) > self.blocks.num_free:
            self.blocks.free(seq)
            return
        compute(self.blocks, seq)
        self.live.append(seq)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data, token):
        seq = data.draw(st.sampled_from(self.live))
        seq.token_ids.append(token)
        if self.blocks.needed(seq, 1) > self.blocks.num_free:
            self.blocks.free(seq)
            self.live.remove(seq)
            return
        compute(self.blocks, seq)
        index = (seq.num_computed_tokens - 1) // SIZE
        assert self.blocks._ref_count[seq.block_table[index]] == 1, "written while shared"

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(self.live))
        child = sequence(parent.request.prompt_ids)
        child.token_ids = list(parent.token_ids)
        child.num_computed_tokens = parent.num_computed_tokens
        self.blocks.fork(parent, child)
        self.live.append(child)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data):
        seq = data.draw(st.sampled_from(self.live))
        self.blocks.free(seq)
        self.live.remove(seq)

    @invariant()
    def books_are_right(self):
        self.blocks.check_integrity()
        assert self.blocks.num_used == len({b for s in self.live for b in s.block_table})

    def teardown(self):
        for seq in self.live:
            self.blocks.free(seq)
        self.blocks.check_integrity()
        assert self.blocks.num_used == 0


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_integrity_check_finds_a_leak():
    blocks = BlockManager(4, SIZE)
    seq = prefilled(blocks, [1, 2, 3])
    seq.block_table.pop()
    with pytest.raises(AssertionError):
        blocks.check_integrity()
