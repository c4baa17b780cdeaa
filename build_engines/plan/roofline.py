"""Lower bounds of time: no step is faster than its bytes and its operations allow. Knows nothing of specs.

Prefill is bound by operations, a decode step by the bytes of weights and KV cache it reads. What a real engine adds
(launches, imperfect kernels, scheduling) is not in here; `Efficiency` says which share of the peaks a plan counts on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from build_engines.plan.kv_cache import kv_bytes_per_token
from build_engines.plan.weights import weight_bytes, weights_by_kind

if TYPE_CHECKING:
    from build_engines.plan.formats import WeightFormat
    from build_engines.plan.hardware import Card
    from build_engines.plan.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Share of a card's peaks that a well-built engine reaches."""

    compute: float = 1.0
    memory: float = 1.0
    link: float = 1.0


PEAK = Efficiency()
EXPECTED = Efficiency(compute=0.5, memory=0.7, link=0.6)  # what suggestions count on


@dataclass(frozen=True, slots=True)
class Roofline:
    """One instance of a model on `tp * pp` cards."""

    shape: ModelShape
    card: Card
    weights: WeightFormat
    kv_bits: float
    tp: int = 1
    pp: int = 1
    efficiency: Efficiency = PEAK

    def prefill_s(self, tokens: int, past: int = 0) -> float:
        """Seconds until a prompt of `tokens` has its first token, `past` more being in the KV cache already."""
        pairs = tokens * past + tokens * (tokens + 1) / 2
        return self._step_s(tokens, pairs, kv_tokens_read=past + tokens, logit_rows=1)

    def decode_s(self, sequences: int, context: int) -> float:
        """Seconds of one step that adds one token to each of `sequences`, each with `context` tokens in the cache."""
        pairs = sequences * context
        return self._step_s(sequences, pairs, kv_tokens_read=pairs, logit_rows=sequences)

    def mixed_s(self, sequences: int, context: int, chunk: int) -> float:
        """Seconds of a decode step that also takes in `chunk` tokens of a prompt."""
        pairs = sequences * context + chunk * (chunk + 1) / 2
        return self._step_s(sequences + chunk, pairs, sequences * context + chunk, sequences + 1)

    def weight_bytes_read(self, tokens: int) -> float:
        """Bytes of weights that a step over `tokens` reads, all cards together; of the experts, those that are hit."""
        kinds = weights_by_kind(self.shape, self.weights, self.weights.read_bits(tokens))
        read = float(sum(kinds.values()) - kinds["embedding"] - kinds["experts"])
        read += weight_bytes(min(tokens, self.shape.vocab_size) * self.shape.hidden_size, self.weights.compute_bits)
        if self.shape.experts is not None:
            missed = (1 - self.shape.experts.top_k / self.shape.experts.num_experts) ** tokens
            read += kinds["experts"] * (1 - missed)
        return read

    def _step_s(self, tokens: int, pairs: float, kv_tokens_read: float, logit_rows: int) -> float:
        # A step passes the parts of a pipeline one after the other, so pp makes no step faster.
        compute, memory = self.efficiency.compute, self.efficiency.memory
        parameters = self.shape.parameters
        linear = parameters.attention + parameters.mlp + parameters.active_experts
        linear_s = 2 * linear * tokens / self.card.flops(self.weights.weight_bits, self.weights.activation_bits)
        other = self.shape.attention_flops_per_pair * pairs
        other += 2 * self.shape.vocab_size * self.shape.hidden_size * logit_rows
        compute_s = (linear_s + other / self.card.flops_16bit) / self.tp / compute
        kv_read = kv_tokens_read * kv_bytes_per_token(self.shape, self.kv_bits, self.tp)
        memory_s = (self.weight_bytes_read(tokens) / self.tp + kv_read) / self.card.memory_bytes_per_s / memory
        return max(compute_s, memory_s) + self._link_s(tokens)

    def _link_s(self, tokens: int) -> float:
        """Two all-reduces a layer: each card sends and receives 2 (tp-1)/tp of the hidden states."""
        if self.tp == 1:
            return 0.0
        hidden = tokens * self.shape.hidden_size * self.weights.compute_bits / 8
        traffic = 2 * self.shape.num_layers * 2 * (self.tp - 1) / self.tp * hidden
        return traffic / self.card.link_bytes_per_s / self.efficiency.link
