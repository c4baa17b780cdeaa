"""The parts of a spec that describe GPUs, what they are asked to do, and how a model is cut over them.

Knows nothing of files; what contradicts what between these parts is in `spec_rules`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from build_engines.spec_section import Count, Flag, Positive, Section, Share

CardName = Literal["a100-80gb", "l40s", "h100-sxm", "h200-sxm", "b200", "cpu"]
QuantAlgo = Literal[
    "NO_QUANT",
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_BLOCK_SCALES",
    "W8A16",
    "W4A16",
    "W4A16_AWQ",
    "W4A8_AWQ",
    "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN",
    "NVFP4",
]
KvCacheQuantAlgo = Literal["FP8", "INT8", "NVFP4"]
SpeculativeMode = Literal["draft_tokens_external", "lookahead_decoding", "medusa", "eagle"]
LoraModule = Literal[
    "attn_qkv", "attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_4h_to_h", "mlp_gate",
    "moe_h_to_4h", "moe_4h_to_h", "moe_gate", "moe_router",
]  # fmt: skip


class Hardware(Section):
    """The machine that serves."""

    card: CardName = Field(default="cpu", description="type of card, a row of the hardware table")
    cards_per_node: Count = Field(default=8, description="cards in one machine")
    disk_gb_per_s: Positive = Field(default=3.0, description="read speed of the volume with the weights, GB/s")
    network_gbit_per_s: Positive = Field(default=100.0, description="network between machines, Gbit/s")
    kv_cache_free_gpu_mem_fraction: Share = Field(
        default=0.9, description="share of the memory left after loading that the KV cache takes"
    )


class Parallel(Section):
    """How one instance of the model is cut over cards: tp * pp of them."""

    tp: Count = Field(default=1, description="tensor parallel: every layer over this many cards")
    pp: Count = Field(default=1, description="pipeline parallel: the layers in this many parts")
    ep: Count = Field(default=1, description="expert parallel: of the tp cards, how many hold different experts")
    instances: Count = Field(default=1, description="copies of the model, each on its own cards")
    mpi: Literal["leader", "orchestrator"] = Field(
        default="leader", description="leader: one process per rank under mpirun; orchestrator: workers are spawned"
    )


class NamedAdapter(Section):
    """One adapter of section lora."""

    path: Path = Field(description="PEFT directory")
    owner: str = Field(default="", description="whose it is, for whoever reads the list of adapters")


class Lora(Section):
    """Adapters that requests may name."""

    modules: tuple[LoraModule, ...] = Field(default=("attn_q", "attn_k", "attn_v"), description="adapted modules")
    max_rank: Count = Field(default=64, description="largest rank of an adapter")
    optimal_rank: Count = Field(default=8, description="rank that the cache's pages are sized for")
    max_adapters_on_gpu: Count = Field(default=8, description="adapters of max_rank kept on the card")
    host_cache_bytes: Count = Field(default=1 << 30, description="host memory for adapters, bytes")
    adapters: dict[str, Path | NamedAdapter] = Field(
        default={}, description="PEFT directories (or path and owner) by the name that requests say; not on llmapi"
    )
    directory: Path | None = Field(
        default=None,
        description="every directory in it is an adapter; they may come and go while it runs. On trtllm a path in the "
        "container, relative ones start at the deployment's directory; not on llmapi",
    )
    compile_at_start: Flag = Field(
        default=False, description="on cpu: before READY, not when the first request with an adapter comes"
    )
    base_models: tuple[str, ...] = Field(
        default=(), description="names of the model in base_model_name_or_path of adapters; none: any"
    )
    prefetch_directory: Path | None = Field(
        default=None,
        description="lora_prefetch_dir, converted adapters that are loaded at start by task id. On trtllm a path in "
        "the container, as directory is; not on llmapi",
    )

    @property
    def named(self) -> dict[str, NamedAdapter]:
        """`adapters`, each with path and owner."""
        return {
            name: entry if isinstance(entry, NamedAdapter) else NamedAdapter(path=entry)
            for name, entry in self.adapters.items()
        }


class Speculative(Section):
    """Several tokens in one step, proposed by something cheaper."""

    mode: SpeculativeMode = Field(description="who proposes")
    max_draft_len: Count = Field(description="most tokens proposed in one step")
    draft_model: str | None = Field(
        default=None, description="draft, Medusa or EAGLE weights on the machine that builds"
    )
    draft_shape: Path | None = Field(
        default=None, description="with draft_tokens_external: directory with the draft model's config.json"
    )
    num_medusa_heads: Count | None = Field(default=None, description="with medusa: heads that the weights hold")
    lookahead_window_size: Count | None = Field(default=None, description="with lookahead_decoding: W")
    lookahead_ngram_size: Count | None = Field(default=None, description="with lookahead_decoding: N")
    lookahead_verification_set_size: Count | None = Field(default=None, description="with lookahead_decoding: G")


class Outputs(Section):
    """What a step returns beside tokens; each costs memory, so each is asked for."""

    context_logits: Flag = Field(default=False, description="logits of every prompt token")
    generation_logits: Flag = Field(default=False, description="logits of every generated token, for log-probs")
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = Field(
        default=5, description="alternatives per token in `logprobs`, with generation_logits"
    )


class Traffic(Section):
    """What is asked of the deployment. Lengths in tokens."""

    input_tokens: Count = Field(default=128, description="prompt, on average")
    output_tokens: Count = Field(default=128, description="answer, on average")
    requests_per_s: Positive = Field(default=1.0, description="requests that arrive, per second")


class Slo(Section):
    """What a user is promised."""

    ttft_ms: Positive = Field(default=1000.0, description="time to the first token")
    itl_ms: Positive = Field(default=50.0, description="time between tokens")


class Reserve(Section):
    """Memory that is neither weights, nor KV cache, nor computed from the spec."""

    runtime_gb: Annotated[float, Field(ge=0)] = Field(
        default=1.5, description="CUDA context, libraries, allocator slack, per card"
    )
    collective_gb: Annotated[float, Field(ge=0)] = Field(
        default=0.5, description="buffers of collectives, per card, when there are several"
    )
