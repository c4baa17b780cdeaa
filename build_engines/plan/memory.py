"""What the memory of one card goes to, and how many tokens of KV cache are left. Knows nothing of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from build_engines.plan.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What one step may hold; sizes in tokens or sequences."""

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    max_beam_width: int = 1
    max_draft_len: int = 0
    tokens_per_block: int = 32
    context_logits: bool = False
    generation_logits: bool = False


@dataclass(frozen=True, slots=True)
class CardMemory:
    """Bytes of one card by use. `kv_cache` is what is left for it, negative when the rest does not fit."""

    capacity: int
    weights: int
    activations: int
    runtime: int
    adapters: int
    kv_cache: int
    kv_bytes_per_token: int
    tokens_per_block: int

    @property
    def unused(self) -> int:
        """Bytes that nothing takes."""
        return self.capacity - self.weights - self.activations - self.runtime - self.adapters - max(self.kv_cache, 0)

    @property
    def max_tokens(self) -> int:
        """Tokens the KV cache holds, whole blocks only."""
        blocks = max(self.kv_cache, 0) // (self.kv_bytes_per_token * self.tokens_per_block)
        return blocks * self.tokens_per_block

    def sequences_of(self, tokens: int) -> int:
        """Sequences of this length that the KV cache holds at once."""
        per_sequence = -(-tokens // self.tokens_per_block) * self.tokens_per_block
        return self.max_tokens // per_sequence


def activation_bytes(shape: ModelShape, limits: StepLimits, tp: int) -> int:
    """Largest working set of a step: a layer's intermediate values for every token, and the logits.

    An estimate from the tensors that live at the same time: residual, normalised input, attention in and out, and the
    two halves of the MLP with their product, all in 16 bit; logits in 32 bit.
    """
    hidden, attention = shape.hidden_size, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim // tp
    inner = shape.intermediate_size // tp
    if shape.experts is not None:
        used = shape.experts.top_k * shape.experts.intermediate_size + shape.experts.shared_intermediate_size
        inner = max(inner, used // tp)
    per_token = 2 * (3 * hidden + 2 * attention + 3 * inner)
    rows = limits.max_batch_size * limits.max_beam_width * (1 + limits.max_draft_len)
    logits = 2 * rows  # as computed, and gathered from all cards
    if limits.context_logits:
        logits += limits.max_num_tokens
    if limits.generation_logits:
        logits += rows
    return limits.max_num_tokens * per_token + logits * shape.vocab_size * 4
