"""Bits of the number formats that weights, activations and the KV cache may have. Knows nothing of models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How the linear layers are stored and computed."""

    weight_bits: float
    activation_bits: int
    compute_bits: int = 16  # of everything that is not quantised
    lm_head_too: bool = False
    small_step_tokens: int = 0  # steps of up to this many tokens use a second copy of the weights
    small_step_bits: float = 0.0

    @property
    def resident_bits(self) -> float:
        """Bits of memory per weight, all copies."""
        return self.weight_bits + self.small_step_bits

    def read_bits(self, tokens: int) -> float:
        """Bits that a step over `tokens` reads per weight."""
        return self.small_step_bits if tokens <= self.small_step_tokens else self.weight_bits


# Block scales are counted into the weights; scales per matrix or row are left out: less than a thousandth.
WEIGHT_FORMATS = {
    "NO_QUANT": WeightFormat(16, 16),
    "FP8": WeightFormat(8, 8),
    "FP8_PER_CHANNEL_PER_TOKEN": WeightFormat(8, 8),
    "FP8_BLOCK_SCALES": WeightFormat(8 + 32 / (128 * 128), 8),
    "W8A16": WeightFormat(8, 16),
    "W4A16": WeightFormat(4, 16),
    "W4A16_AWQ": WeightFormat(4 + 16 / 128, 16),
    "W4A8_AWQ": WeightFormat(4 + 16 / 128, 8),
    "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN": WeightFormat(8, 8),
    "NVFP4": WeightFormat(4 + 8 / 16, 4),
}
KV_BITS: dict[str | None, float] = {None: 16, "FP8": 8, "INT8": 8, "NVFP4": 4 + 8 / 16}

# The CPU engine's precisions, see docs/performance.md.
CPU_FORMATS = {
    "fast": WeightFormat(16, 16, lm_head_too=True, small_step_tokens=4, small_step_bits=8),
    "fp8": WeightFormat(8, 16),
    "exact": WeightFormat(32, 32, compute_bits=32),
}
CPU_KV_BITS = {"fast": 16, "fp8": 16, "exact": 32}
