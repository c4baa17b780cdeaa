"""Bytes of LoRA adapters. Knows nothing of where they are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from build_engines.plan.model_shape import ModelShape


def module_sizes(shape: ModelShape, module: str) -> tuple[int, int]:
    """Inputs and outputs of an adapted module, by TensorRT-LLM's name."""
    hidden, heads, kv_heads = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    inner = shape.intermediate_size
    expert = shape.experts.intermediate_size if shape.experts else inner
    sizes = {
        "attn_qkv": (hidden, heads + 2 * kv_heads),
        "attn_q": (hidden, heads),
        "attn_k": (hidden, kv_heads),
        "attn_v": (hidden, kv_heads),
        "attn_dense": (heads, hidden),
        "mlp_h_to_4h": (hidden, inner),
        "mlp_gate": (hidden, inner),
        "mlp_4h_to_h": (inner, hidden),
        "moe_h_to_4h": (hidden, expert),
        "moe_gate": (hidden, expert),
        "moe_4h_to_h": (expert, hidden),
        "moe_router": (hidden, shape.experts.num_experts if shape.experts else 1),
    }
    return sizes[module]


def adapter_bytes(shape: ModelShape, modules: tuple[str, ...], rank: int) -> int:
    """Bytes of one adapter in 16 bit, whole."""
    experts = shape.experts
    total = 0
    for module in modules:
        copies, layers = 1, shape.num_layers
        if module.startswith("moe_") and experts is not None:
            copies = 1 if module == "moe_router" else experts.num_experts
            layers -= experts.num_dense_layers
        total += layers * copies * rank * sum(module_sizes(shape, module))
    return 2 * total
