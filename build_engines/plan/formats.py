"""Bits of the number formats that weights, activations and the KV cache may have. Knows nothing of models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How the linear layers are stored and computed."""

    weight_bits: int
    activation_bits: int
    scale_bits_per_weight: float = 0.0  # what block scales add to each weight


# Scales per matrix or per row are left out: less than a thousandth.
WEIGHT_FORMATS = {
    "NO_QUANT": WeightFormat(16, 16),
    "FP8": WeightFormat(8, 8),
    "FP8_PER_CHANNEL_PER_TOKEN": WeightFormat(8, 8),
    "FP8_BLOCK_SCALES": WeightFormat(8, 8, 32 / (128 * 128)),
    "W8A16": WeightFormat(8, 16),
    "W4A16": WeightFormat(4, 16),
    "W4A16_AWQ": WeightFormat(4, 16, 16 / 128),
    "W4A8_AWQ": WeightFormat(4, 8, 16 / 128),
    "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN": WeightFormat(8, 8),
    "NVFP4": WeightFormat(4, 4, 8 / 16),
}
COMPUTE_BITS = 16
KV_BITS: dict[str | None, float] = {None: 16, "FP8": 8, "INT8": 8, "NVFP4": 4 + 8 / 16}
