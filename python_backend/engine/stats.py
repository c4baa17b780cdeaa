"""Counts what the engine holds, for gauges. Knows nothing of metrics systems."""

from __future__ import annotations

from typing import TYPE_CHECKING

from python_backend.engine.output import EngineStats

if TYPE_CHECKING:
    from python_backend.engine.block_manager import BlockManager
    from python_backend.engine.scheduler import Batch, Scheduler


def engine_stats(
    scheduler: Scheduler, blocks: BlockManager, batch: Batch, iteration: int, generated_tokens: int
) -> EngineStats:
    """The state after a step."""
    running, waiting = scheduler.running, scheduler.waiting
    context = sum(g.in_context_phase for g in running)
    return EngineStats(
        active_requests=len(running) + len(waiting),
        scheduled_requests=len(running),
        context_requests=context,
        generation_requests=len(running) - context,
        waiting_requests=len(waiting),
        paused_requests=sum(g.preempted for g in waiting),
        max_requests=scheduler.config.max_batch_size,
        kv_blocks_max=blocks.num_blocks,
        kv_blocks_used=blocks.num_used,
        kv_blocks_free=blocks.num_free,
        kv_tokens_per_block=blocks.block_size,
        kv_blocks_reused=blocks.blocks_reused,
        context_tokens=batch.context_tokens,
        iteration=iteration,
        preemptions=scheduler.preemptions,
        prompt_tokens=scheduler.prompt_tokens,
        cached_prompt_tokens=scheduler.cached_prompt_tokens,
        generated_tokens=generated_tokens,
        short_of_blocks=scheduler.short_of_blocks,
    )
