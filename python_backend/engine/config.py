"""Limits and switches of one engine; plain data, checked where it is read from a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["fast", "fp8", "exact"]
LINEARS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything LLMEngine needs beside the checkpoint. Sizes in tokens unless the name says otherwise."""

    precision: Precision = "fast"
    max_batch_size: int = 32  # sequences in one step
    max_num_tokens: int = 2048  # tokens in one step, prefill and decode together
    max_seq_len: int = 2048  # prompt + output
    max_input_len: int = 2047
    max_beam_width: int = 4
    max_queue_size: int = 256  # requests waiting for their first step; 0 = no bound
    kv_cache_tokens: int = 32768  # max_tokens_in_paged_kv_cache
    tokens_per_block: int = 32  # fixed by OpenVINO's CPU paged attention
    enable_kv_cache_reuse: bool = True
    enable_chunked_context: bool = True
    enable_fast_forward: bool = True  # tokens that a mask forces take no step of their own
    batching_strategy: Literal["inflight_fused_batching", "V1"] = "inflight_fused_batching"
    batch_scheduler_policy: Literal["max_utilization", "guaranteed_no_evict"] = "max_utilization"
    stream_interval: int = 0  # tokens in a streamed response; 0: 1 up to 4 running sequences, 2 up to 32, …
    num_threads: int = 0  # 0: OpenVINO decides
    max_lora_rank: int = 0  # largest rank of an adapter; 0: no adapters
    lora_projections: tuple[str, ...] = LINEARS  # what adapters may change
