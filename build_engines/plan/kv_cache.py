"""Bytes of the KV cache. Knows nothing of cards."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from build_engines.plan.model_shape import ModelShape


def kv_bytes_per_token(shape: ModelShape, bits: float, tp: int = 1, pp: int = 1) -> int:
    """Bytes that one token takes on one card, all its layers.

    Args:
        shape: the model.
        bits: of one value, 16 or 8.
        tp: cards that share the heads; with fewer KV heads than cards a head is kept on several.
        pp: parts the layers are cut into; the largest part counts.
    """
    layers = -(-shape.num_layers // pp)
    if shape.latent is not None:  # the latent serves all heads, so every card holds it
        values = shape.latent.kv_lora_rank + shape.latent.qk_rope_head_dim
    else:
        values = 2 * max(1, shape.num_kv_heads // tp) * shape.head_dim
    return round(layers * values * bits / 8)


def kv_bytes_of_twin(shape: ModelShape, bits: float, num_kv_heads: int) -> int:
    """Bytes per token if the same heads had `num_kv_heads` sets of keys and values of their own."""
    per_head = 2 * shape.head_dim
    if shape.latent is not None:
        per_head = shape.latent.qk_nope_head_dim + shape.latent.qk_rope_head_dim + shape.latent.v_head_dim
    return round(shape.num_layers * num_kv_heads * per_head * bits / 8)


def blocks_for(tokens: int, tokens_per_block: int) -> int:
    """Blocks that a sequence of this length holds."""
    return -(-tokens // tokens_per_block)
