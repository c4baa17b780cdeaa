"""Bytes of a model's weights, all of them and on one card. Knows nothing of the KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from build_engines.plan.formats import WeightFormat
    from build_engines.plan.model_shape import ModelShape


def weight_bytes(parameters: int, bits: float) -> int:
    """Bytes of this many parameters of this many bits."""
    return round(parameters * bits / 8)


def weights_by_kind(shape: ModelShape, weights: WeightFormat, bits: float | None = None) -> dict[str, int]:
    """Bytes of the whole model by what they are: quantised linears, and what stays as the model computes.

    `bits` per quantised weight; by default what they take in memory.
    """
    parameters = shape.parameters
    bits = weights.resident_bits if bits is None else bits
    return {
        "attention": weight_bytes(parameters.attention, bits),
        "mlp": weight_bytes(parameters.mlp, bits),
        "experts": weight_bytes(parameters.experts, bits),
        "router": weight_bytes(parameters.router, 32),
        "embedding": weight_bytes(parameters.embedding, weights.compute_bits),
        # A tied head is kept as a matrix of its own.
        "lm_head": weight_bytes(
            shape.vocab_size * shape.hidden_size, bits if weights.lm_head_too else weights.compute_bits
        ),
        "other": weight_bytes(parameters.other, weights.compute_bits),
    }


def weights_on_card(shape: ModelShape, weights: WeightFormat, tp: int = 1, pp: int = 1) -> int:
    """Bytes on the fullest card: linears and lm_head are cut by tp, embedding, router and norms are whole.

    With pipeline parts the first holds the embedding, the last lm_head; the fuller of the two counts.
    Experts take the same room cut by tp or by ep.
    """
    kinds = weights_by_kind(shape, weights)
    layers = -(-shape.num_layers // pp) / shape.num_layers
    cut = (kinds["attention"] + kinds["mlp"] + kinds["experts"]) * layers / tp
    whole = (kinds["router"] + kinds["other"]) * layers
    ends = [kinds["embedding"], kinds["lm_head"] / tp]
    return round(cut + whole + (sum(ends) if pp == 1 else max(ends)))


def quantize_peak_bytes(shape: ModelShape) -> int:
    """Memory that calibrating takes at its peak: the 16-bit model and half of it again for calibration.

    A 70B model was seen to need more than 210 GB.
    """
    return round(1.5 * weight_bytes(shape.parameters.total, 16))
