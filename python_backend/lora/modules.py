"""The modules an adapter may change: their numbers in the tensors, their names in checkpoints, and their sizes.

Numbers and names are upstream's. Knows nothing of files or of how a product is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

MODULE_NAMES: dict[int, str] = dict(
    enumerate(
        (
            *("attn_qkv", "attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_4h_to_h", "mlp_gate"),
            *("cross_attn_qkv", "cross_attn_q", "cross_attn_k", "cross_attn_v", "cross_attn_dense"),
            *("moe_h_to_4h", "moe_4h_to_h", "moe_gate", "moe_router", "mlp_router", "mlp_gate_up"),
        )
    )
)

# The gate is mlp_h_to_4h and the up projection mlp_gate: comments elsewhere say the reverse, upstream's converter this.
PROJECTIONS: dict[str, str] = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_dense": "self_attn.o_proj",
    "mlp_h_to_4h": "mlp.gate_proj",
    "mlp_gate": "mlp.up_proj",
    "mlp_4h_to_h": "mlp.down_proj",
}
# One row of these holds several linears: the same A, and B of each below the other. Upstream computes a fused MLP with
# the up projection first.
FUSED: dict[str, tuple[str, ...]] = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "mlp_gate_up": ("mlp_gate", "mlp_h_to_4h"),
}
MODULE_OF: dict[str, str] = {projection: module for module, projection in PROJECTIONS.items()}
MODULE_IDS: dict[str, int] = {name: number for number, name in MODULE_NAMES.items() if name in PROJECTIONS}
ALL_MODULES: tuple[str, ...] = tuple(PROJECTIONS)


@dataclass(frozen=True, slots=True)
class BaseModel:
    """What an adapter has to fit: the sizes of the model below it, and what this deployment allows."""

    num_layers: int
    sizes: Mapping[str, tuple[int, int]]  # projection -> (in, out)
    modules: tuple[str, ...] = ALL_MODULES
    max_rank: int = 64
    names: tuple[str, ...] = ()  # what adapters may call it; none: anything
    checkpoint_hash: str = ""

    @classmethod
    def of(
        cls,
        config: Mapping[str, Any],
        modules: tuple[str, ...] = ALL_MODULES,
        max_rank: int = 64,
        names: tuple[str, ...] = (),
        checkpoint_hash: str = "",
    ) -> BaseModel:
        """Sizes out of a Hugging Face config.json."""
        hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
        head = config.get("head_dim") or hidden // heads
        keys = (config.get("num_key_value_heads") or heads) * head
        sizes = {
            "self_attn.q_proj": (hidden, heads * head),
            "self_attn.k_proj": (hidden, keys),
            "self_attn.v_proj": (hidden, keys),
            "self_attn.o_proj": (heads * head, hidden),
            "mlp.gate_proj": (hidden, inner),
            "mlp.up_proj": (hidden, inner),
            "mlp.down_proj": (inner, hidden),
        }
        return cls(config["num_hidden_layers"], sizes, modules, max_rank, names, checkpoint_hash)

    def is_called(self, name: str) -> bool:
        """Whether an adapter that was trained on `name` may be of this model: the last part of the name decides."""
        return not self.names or not name or _last_part(name) in map(_last_part, self.names)


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()
