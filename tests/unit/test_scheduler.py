"""The scheduler: limits hold at every step, everybody finishes, nobody starves."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from python_backend.engine.block_manager import BlockManager
from python_backend.engine.config import EngineConfig
from python_backend.engine.scheduler import Batch, Scheduler, SequenceGroup
from python_backend.engine.sequence import Sequence
from python_backend.request import GenerationRequest, SamplingParams


def make_scheduler(num_blocks: int = 64, block_size: int = 4, **config: Any) -> Scheduler:
    options: dict[str, Any] = {
        "max_batch_size": 4,
        "max_num_tokens": 16,
        "max_seq_len": 64,
        "max_input_len": 60,
        **config,
    }
    blocks = BlockManager(num_blocks, block_size)
    return Scheduler(EngineConfig(tokens_per_block=block_size, **options), blocks)


def add(scheduler: Scheduler, length: int, max_tokens: int = 4, first_token: int = 0) -> SequenceGroup:
    request = GenerationRequest("r", [first_token, *range(100, 99 + length)], SamplingParams(max_tokens))
    group = SequenceGroup(request, [Sequence(request)])
    scheduler.add(group)
    return group


def compute(scheduler: Scheduler, batch: Batch) -> list[SequenceGroup]:
    """Pretend to run a step: one more token for whoever samples; returns who finished."""
    finished = []
    for scheduled in batch.groups:
        sequence = scheduled.group.sequences[0]
        sequence.num_computed_tokens += sequence.num_scheduled_tokens
        sequence.num_scheduled_tokens = 0
        scheduler.blocks.commit(sequence)
        if scheduled.samples:
            sequence.token_ids.append(sequence.num_output_tokens)
            if sequence.num_output_tokens == scheduled.group.request.sampling.max_tokens:
                scheduler.finish(scheduled.group)
                finished.append(scheduled.group)
    return finished


def test_a_long_prompt_is_cut_into_chunks_and_decoding_goes_on_meanwhile():
    scheduler = make_scheduler()
    short = add(scheduler, 4, max_tokens=8, first_token=1)
    for _ in "12":  # the prompt, then its last token
        compute(scheduler, scheduler.schedule())
    add(scheduler, 40, first_token=2)
    for _ in range(3):
        batch = scheduler.schedule()
        assert batch.groups[0].group is short
        assert sum(s.num_scheduled_tokens for s in batch.sequences()) <= 16
        compute(scheduler, batch)
    assert short.sequences[0].num_output_tokens == 4


def test_the_last_token_of_a_prompt_is_a_step_of_its_own_however_much_was_cached():
    scheduler = make_scheduler()
    for first_tokens in (9, 1):  # nothing cached, then all but the last token
        add(scheduler, 10, max_tokens=1, first_token=7)
        counts = []
        while scheduler.has_work:
            batch = scheduler.schedule()
            counts.append([s.num_scheduled_tokens for s in batch.sequences()])
            compute(scheduler, batch)
        assert counts == [[first_tokens], [1]][: len(counts)]
        assert counts[-1] == [1]


def test_without_chunking_a_prompt_waits_for_a_step_that_takes_it_whole():
    scheduler = make_scheduler(enable_chunked_context=False)
    first, second = add(scheduler, 10, first_token=1), add(scheduler, 12, first_token=2)
    assert [s.group for s in scheduler.schedule().groups] == [first]
    compute(scheduler, Batch(groups=[]))
    first.sequences[0].num_scheduled_tokens = 0
    scheduler.finish(first)
    assert [s.group for s in scheduler.schedule().groups] == [second]


def test_static_batching_admits_nobody_while_a_batch_runs():
    scheduler = make_scheduler(batching_strategy="V1")
    add(scheduler, 4, max_tokens=3, first_token=1)
    compute(scheduler, scheduler.schedule())
    late = add(scheduler, 4, first_token=2)
    batch = scheduler.schedule()
    assert late not in [s.group for s in batch.groups]


def test_when_blocks_run_out_the_last_one_in_gives_way_and_comes_back():
    scheduler = make_scheduler(num_blocks=6)
    first, second = add(scheduler, 8, max_tokens=12, first_token=1), add(scheduler, 4, max_tokens=12, first_token=2)
    finished: list[SequenceGroup] = []
    for _ in range(60):
        finished += compute(scheduler, scheduler.schedule())
    assert scheduler.preemptions > 0
    assert finished == [first, second]
    assert second.preempted


def test_guaranteed_no_evict_never_preempts():
    scheduler = make_scheduler(num_blocks=6, batch_scheduler_policy="guaranteed_no_evict")
    groups = [add(scheduler, 8, max_tokens=12, first_token=1), add(scheduler, 4, max_tokens=12, first_token=2)]
    finished: list[SequenceGroup] = []
    for _ in range(60):
        finished += compute(scheduler, scheduler.schedule())
    assert scheduler.preemptions == 0
    assert finished == groups


@given(
    jobs=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=12),
    num_blocks=st.integers(16, 40),
    max_num_tokens=st.integers(4, 40),
    max_batch_size=st.integers(1, 5),
    policy=st.sampled_from(["max_utilization", "guaranteed_no_evict"]),
    arrivals=st.lists(st.integers(0, 5), max_size=12),
)
@settings(max_examples=150, deadline=None)
def test_every_request_finishes_and_no_limit_is_ever_broken(  # noqa: PLR0917
    jobs, num_blocks, max_num_tokens, max_batch_size, policy, arrivals
):
    scheduler = make_scheduler(
        num_blocks, max_num_tokens=max_num_tokens, max_batch_size=max_batch_size, batch_scheduler_policy=policy
    )
    waiting = [job for job in jobs if scheduler.blocks.blocks_for(job[0] + job[1]) <= num_blocks]
    expected, finished, steps = len(waiting), [], 0
    while len(finished) < expected:
        for _ in range(arrivals[steps] if steps < len(arrivals) else len(waiting)):
            if waiting:
                length, max_tokens, first_token = waiting.pop()
                add(scheduler, length, max_tokens, first_token)
        batch = scheduler.schedule()
        counts = [s.num_scheduled_tokens for s in batch.sequences()]
        assert all(counts)
        assert sum(counts) <= max_num_tokens
        assert len(counts) <= max_batch_size
        assert counts or not scheduler.has_work, "work, but no step"
        for sequence in batch.sequences():
            assert len(sequence.block_table) * 4 >= sequence.num_computed_tokens + sequence.num_scheduled_tokens
        finished += compute(scheduler, batch)
        scheduler.blocks.check_integrity()
        steps += 1
        assert steps < 5000, "no progress"
    assert scheduler.blocks.num_used == 0
    for group in finished:
        assert group.sequences[0].output_ids == list(range(group.request.sampling.max_tokens))
