"""The plan of one deployment: everything computed from its spec and the model's config.json. Reads no weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from build_engines.plan.adapters import adapter_bytes
from build_engines.plan.formats import CPU_FORMATS, CPU_KV_BITS, KV_BITS, WEIGHT_FORMATS, WeightFormat
from build_engines.plan.hardware import CARDS, GB, Card
from build_engines.plan.kv_cache import kv_bytes_per_token
from build_engines.plan.memory import CardMemory, StepLimits, activation_bytes
from build_engines.plan.model_shape import ModelShape
from build_engines.plan.roofline import EXPECTED, PEAK, Efficiency, Roofline
from build_engines.plan.source_config import draft_config
from build_engines.plan.suggestion import Demand, Refusal, Suggestion, suggest
from build_engines.plan.weights import weights_on_card
from python_backend.errors import BuildError

if TYPE_CHECKING:
    from build_engines.spec import Spec


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """A spec, the shape of its model, and what follows."""

    spec: Spec
    shape: ModelShape
    draft: ModelShape | None = None  # a second model, which proposes tokens

    @classmethod
    def of(cls, spec: Spec, config: dict[str, Any], where: str) -> EnginePlan:
        """Plan a spec for the model in a config.json; `where` names that file.

        Raises:
            BuildError: the model cannot be cut as the spec says, or a limit is over what the model can do.
        """
        draft = draft_config(spec)
        plan = cls(spec, ModelShape.of(config, where), None if draft is None else ModelShape.of(*draft))
        plan._check()
        return plan

    @property
    def on_cpu(self) -> bool:
        """Whether our own engine serves it."""
        return self.spec.deployment.target == "cpu"

    @property
    def card(self) -> Card:
        """The card it runs on."""
        return CARDS[self.spec.deployment.hardware.card]

    @property
    def weights(self) -> WeightFormat:
        """How linear layers are stored."""
        deployment = self.spec.deployment
        return CPU_FORMATS[deployment.precision] if self.on_cpu else WEIGHT_FORMATS[deployment.quantization.quant_algo]

    @property
    def kv_bits(self) -> float:
        """Bits of a value in the KV cache."""
        deployment = self.spec.deployment
        if self.on_cpu:
            return CPU_KV_BITS[deployment.precision]
        return KV_BITS[deployment.quantization.kv_cache_quant_algo]

    @property
    def cards_per_instance(self) -> int:
        """Cards, and ranks, of one copy of the model."""
        return self.spec.deployment.parallel.tp * self.spec.deployment.parallel.pp

    @property
    def step_limits(self) -> StepLimits:
        """The spec's limits on a step."""
        deployment = self.spec.deployment
        limits, outputs, draft = deployment.limits, deployment.outputs, deployment.speculative
        return StepLimits(
            max_batch_size=limits.max_batch_size,
            max_num_tokens=limits.max_num_tokens,
            max_seq_len=limits.max_seq_len,
            max_beam_width=1 if self.on_cpu else limits.max_beam_width,  # beams of our engine are part of the batch
            max_draft_len=draft.max_draft_len if draft else 0,
            tokens_per_block=limits.tokens_per_block,
            context_logits=outputs.context_logits,
            generation_logits=outputs.generation_logits,
        )

    @property
    def demand(self) -> Demand:
        """Traffic and promise."""
        traffic, slo = self.spec.deployment.traffic, self.spec.deployment.slo
        return Demand(
            traffic.input_tokens, traffic.output_tokens, traffic.requests_per_s, slo.ttft_ms / 1e3, slo.itl_ms / 1e3
        )

    def memory(self, tp: int | None = None, pp: int | None = None) -> CardMemory:
        """What the fullest card's memory goes to, cut as the spec says or as given; with a draft model, both."""
        deployment, limits = self.spec.deployment, self.step_limits
        tp, pp = tp or deployment.parallel.tp, pp or deployment.parallel.pp
        shapes = [self.shape, *([self.draft] if self.draft else [])]
        per_token = sum(kv_bytes_per_token(shape, self.kv_bits, tp, pp) for shape in shapes)
        weights = sum(weights_on_card(shape, self.weights, tp, pp) for shape in shapes)
        activations = sum(activation_bytes(shape, limits, tp) for shape in shapes)
        runtime = deployment.reserve.runtime_gb * GB
        if tp * pp > 1:
            runtime += deployment.reserve.collective_gb * GB
        runtime *= len(shapes)  # a process each, when there are several ranks
        adapters = 0
        if deployment.lora is not None:
            one = adapter_bytes(self.shape, deployment.lora.modules, deployment.lora.max_rank)
            adapters = deployment.lora.max_adapters_on_gpu * one // (tp * pp)
        left = self.card.memory_bytes - weights - activations - round(runtime) - adapters
        kv_cache = self._kv_cache_bytes(left, per_token)
        block = limits.tokens_per_block
        return CardMemory(
            self.card.memory_bytes, weights, activations, round(runtime), adapters, kv_cache, per_token, block
        )

    def cards_needed(self) -> tuple[int, int] | None:
        """The smallest (tp, pp) whose cards hold the model and one sequence of max_seq_len; None when none does."""
        per_node = 1 if self.on_cpu else self.spec.deployment.hardware.cards_per_node
        cuts = [(tp, pp) for tp in _powers_of_two(per_node) for pp in _powers_of_two(16) if pp == 1 or tp == per_node]
        for tp, pp in sorted(cuts, key=lambda cut: cut[0] * cut[1]):
            fits = self.shape.num_heads % tp == 0 and pp <= self.shape.num_layers
            if fits and self.memory(tp, pp).sequences_of(self.step_limits.max_seq_len) >= 1:
                return tp, pp
        return None

    def roofline(self, efficiency: Efficiency = PEAK) -> Roofline:
        """Times of one instance."""
        parallel = self.spec.deployment.parallel
        return Roofline(self.shape, self.card, self.weights, self.kv_bits, parallel.tp, parallel.pp, efficiency)

    def suggestion(self) -> Suggestion | Refusal:
        """Limits for the spec's traffic and promise."""
        positions = self.shape.max_position_embeddings
        return suggest(self.demand, self.roofline(EXPECTED), self.memory(), positions)

    def _kv_cache_bytes(self, left: int, per_token: int) -> int:
        limits, hardware = self.spec.deployment.limits, self.spec.deployment.hardware
        given = limits.kv_cache_tokens * per_token
        if self.on_cpu:  # the engine takes what the spec says, or does not start
            return given if left >= given else left
        share = int(left * hardware.kv_cache_free_gpu_mem_fraction) if left > 0 else left
        return min(share, given) if "kv_cache_tokens" in limits.model_fields_set else share

    def _check(self) -> None:
        parallel, shape = self.spec.deployment.parallel, self.shape
        if shape.num_heads % parallel.tp:
            raise self.spec.error("parallel.tp", f"is {parallel.tp}; it must divide the {shape.num_heads} heads.")
        if self.draft is not None:
            self._check_draft(self.draft)
        if parallel.pp > shape.num_layers:
            raise self.spec.error("parallel.pp", f"is {parallel.pp}; the model has {shape.num_layers} layers.")
        if parallel.ep > 1 and (shape.experts is None or shape.experts.num_experts % parallel.ep):
            experts = shape.experts.num_experts if shape.experts else 0
            raise self.spec.error("parallel.ep", f"is {parallel.ep}; it must divide the {experts} experts.")
        wanted = self.step_limits.max_seq_len
        if wanted > shape.max_position_embeddings:
            text = f"is {wanted}; the model has max_position_embeddings {shape.max_position_embeddings}."
            raise self.spec.error("limits.max_seq_len", text)

    def _check_draft(self, draft: ModelShape) -> None:
        parallel = self.spec.deployment.parallel
        if draft.vocab_size != self.shape.vocab_size:
            text = f"has a vocabulary of {draft.vocab_size} tokens, the model one of {self.shape.vocab_size}; a draft "
            raise self.spec.error("speculative.draft_shape", f"{text}model must have the same tokenizer.")
        if draft.num_heads % parallel.tp or parallel.pp > draft.num_layers:
            text = f"has {draft.num_heads} heads and {draft.num_layers} layers; both models are cut alike, and tp "
            text += f"{parallel.tp}, pp {parallel.pp} do not divide them."
            raise self.spec.error("speculative.draft_shape", text)

    def require_fit(self) -> None:
        """Refuse a deployment whose cards do not hold the model and one whole sequence.

        Raises:
            BuildError: tokens there are, tokens needed, and what to change.
        """
        memory, longest = self.memory(), self.step_limits.max_seq_len
        if memory.sequences_of(longest) >= 1:
            return
        needed = self.cards_needed()
        advice = "no number of cards does" if needed is None else f"tp {needed[0]}, pp {needed[1]} does"
        raise BuildError(
            f"{self.spec.file.where(('parallel',))}: {self.cards_per_instance} x {self.card.name} leave the KV cache "
            f"room for {memory.max_tokens} tokens, one sequence of limits.max_seq_len needs {longest}. Of the cuts, "
            f"{advice}; or lower limits.max_seq_len, limits.max_num_tokens or limits.max_batch_size."
        )


def _powers_of_two(limit: int) -> list[int]:
    return [1 << i for i in range(limit.bit_length()) if 1 << i <= limit]
