"""What the engine gives back: one event per request and step that has something to tell."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from python_backend.engine.log_probs import TokenLogProbs
    from python_backend.errors import RequestError
    from python_backend.request import FinishReason, GenerationRequest


@dataclass(slots=True)
class SequenceOutput:
    """News of one sequence. Streaming: since the last event. Otherwise, and with beams: everything."""

    index: int  # sample number or beam
    token_ids: list[int]  # without the prompt
    context_ids: list[int]  # generated tokens sent before these (all of them), oldest first
    finish_reason: FinishReason | None = None
    text_cut: int = 0  # characters to drop from the end of the text; only when finished
    cum_log_prob: float = 0.0
    log_probs: list[float] = field(default_factory=list)  # cumulative: one per token generated so far
    top_log_probs: list[TokenLogProbs] = field(default_factory=list)  # per token of token_ids, with top_logprobs
    generation_logits: list[np.ndarray] = field(default_factory=list)  # float32 [vocab] per token of token_ids


@dataclass(slots=True)
class PerfMetrics:
    """Times are time.monotonic_ns(); blocks are KV cache blocks allocated for this request's prompt."""

    arrival_ns: int = 0
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    alloc_new_blocks: int = 0
    alloc_total_blocks: int = 0
    reused_blocks: int = 0


@dataclass(slots=True)
class RequestOutput:
    """One event. `error` set: the request is over and has no more outputs.

    With beam_width 1 and num_return_sequences n, each of the n samples gives its own events
    (`sequences` has one entry); with beams, one event holds all returned beams.
    """

    request: GenerationRequest
    sequences: list[SequenceOutput]
    finished: bool  # the last event of this request
    error: RequestError | None = None
    perf: PerfMetrics | None = None
    context_logits: np.ndarray | None = None  # float32 [prompt_len, vocab], once, when the prompt is read
    prompt_log_probs: list[TokenLogProbs] | None = None  # of all prompt tokens but the first; at the same time


@dataclass(slots=True)
class EngineStats:
    """A snapshot for gauges; cheap to take at any time."""

    active_requests: int = 0  # waiting + running
    scheduled_requests: int = 0
    context_requests: int = 0  # in prefill
    generation_requests: int = 0
    waiting_requests: int = 0
    paused_requests: int = 0  # preempted and waiting to be computed again
    max_requests: int = 0
    kv_blocks_max: int = 0
    kv_blocks_used: int = 0
    kv_blocks_free: int = 0
    kv_tokens_per_block: int = 0
    kv_blocks_reused: int = 0  # since start
    context_tokens: int = 0  # prefill tokens of the last step
    iteration: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0  # since start
    cached_prompt_tokens: int = 0  # since start, found in the prefix cache
    generated_tokens: int = 0  # since start
    short_of_blocks: bool = False  # somebody waits for nothing but KV cache blocks
