"""The shape of a model, read from its public config.json: what it holds and what one token costs.

Knows nothing of number formats, cards and specs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from python_backend.errors import BuildError

Attention = Literal["MHA", "GQA", "MQA", "MLA"]
_BIASED = ("Qwen2ForCausalLM", "Qwen2MoeForCausalLM")  # q, k and v have a bias whatever `attention_bias` says
_QK_NORM = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Sizes of multi-head latent attention: one compressed vector per token serves all heads."""

    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True)
class Experts:
    """Sizes of the mixture-of-experts layers."""

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int
    num_dense_layers: int  # layers with a plain MLP


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters by what happens to them when a model is quantised and cut."""

    attention: int  # linear layers of attention
    mlp: int  # linear layers of plain MLPs and shared experts
    experts: int  # linear layers of all routed experts
    router: int
    embedding: int
    lm_head: int  # stored apart; 0 when tied to the embedding
    other: int  # norms and biases
    active_experts: int  # of `experts`, what one token passes through

    @property
    def total(self) -> int:
        """All parameters."""
        return self.linear + self.router + self.embedding + self.lm_head + self.other

    @property
    def linear(self) -> int:
        """Parameters of the linear layers, which quantisation shrinks."""
        return self.attention + self.mlp + self.experts

    @property
    def active(self) -> int:
        """Parameters that one token passes through."""
        return self.total - self.experts + self.active_experts


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Everything a plan needs to know of a model."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool
    max_position_embeddings: int
    latent: LatentAttention | None
    experts: Experts | None
    qkv_bias: bool
    qk_norm: bool
    dtype: str  # of the published weights

    @classmethod
    def of(cls, config: dict[str, Any], where: str) -> ModelShape:
        """The shape in a config.json; `where` names the file.

        Raises:
            BuildError: a size is missing or no whole number over 0.
        """
        heads = _size(config, "num_attention_heads", where)
        kv_heads = _size(config, "num_key_value_heads", where, heads)
        hidden = _size(config, "hidden_size", where)
        if heads % kv_heads:
            raise BuildError(f"{where}: num_key_value_heads is {kv_heads}; it must divide {heads} heads.")
        architecture = (config.get("architectures") or ["unknown"])[0]
        biased = architecture in _BIASED or bool(config.get("attention_bias"))
        return cls(
            architecture=architecture,
            num_layers=_size(config, "num_hidden_layers", where),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=_size(config, "head_dim", where, max(hidden // heads, 1)),
            intermediate_size=_size(config, "intermediate_size", where),
            vocab_size=_size(config, "vocab_size", where),
            tied=bool(config.get("tie_word_embeddings", False)),
            max_position_embeddings=_size(config, "max_position_embeddings", where),
            latent=_latent(config, where),
            experts=_experts(config, where),
            qkv_bias=biased,
            qk_norm=architecture in _QK_NORM,
            dtype=str(config.get("torch_dtype") or config.get("dtype") or "bfloat16"),
        )

    @property
    def attention(self) -> Attention:
        """How queries share keys and values."""
        if self.latent is not None:
            return "MLA"
        if self.num_kv_heads == self.num_heads:
            return "MHA"
        return "MQA" if self.num_kv_heads == 1 else "GQA"

    @property
    def parameters(self) -> Parameters:
        """All parameters of the model, without extra prediction layers."""
        hidden, layers, experts = self.hidden_size, self.num_layers, self.experts
        dense = layers if experts is None else experts.num_dense_layers
        mlp = dense * 3 * hidden * self.intermediate_size
        routed = active = router = 0
        if experts is not None:
            sparse = layers - dense
            one = 3 * hidden * experts.intermediate_size
            routed, active = sparse * experts.num_experts * one, sparse * experts.top_k * one
            router = sparse * hidden * experts.num_experts
            mlp += sparse * 3 * hidden * experts.shared_intermediate_size
        embedding = self.vocab_size * hidden
        return Parameters(
            attention=layers * self._attention_linear(),
            mlp=mlp,
            experts=routed,
            router=router,
            embedding=embedding,
            lm_head=0 if self.tied else embedding,
            other=layers * self._layer_other() + hidden,
            active_experts=active,
        )

    @property
    def attention_flops_per_pair(self) -> int:
        """Operations for one query token looking at one earlier token, all layers."""
        width = self.head_dim * 2
        if self.latent is not None:  # absorbed form: scores over latent and rope part, values over the latent
            width = 2 * self.latent.kv_lora_rank + self.latent.qk_rope_head_dim
        return 2 * self.num_layers * self.num_heads * width

    def _attention_linear(self) -> int:
        hidden, latent = self.hidden_size, self.latent
        if latent is None:
            return hidden * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        query_out = self.num_heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
        query = hidden * query_out
        if latent.q_lora_rank is not None:
            query = latent.q_lora_rank * (hidden + query_out)
        key_value = hidden * (latent.kv_lora_rank + latent.qk_rope_head_dim)
        key_value += latent.kv_lora_rank * self.num_heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        return query + key_value + self.num_heads * latent.v_head_dim * hidden

    def _layer_other(self) -> int:
        other = 2 * self.hidden_size
        if self.latent is not None:
            return other + self.latent.kv_lora_rank + (self.latent.q_lora_rank or 0)
        if self.qkv_bias:
            other += self.head_dim * (self.num_heads + 2 * self.num_kv_heads)
        return other + (2 * self.head_dim if self.qk_norm else 0)


def _latent(config: dict[str, Any], where: str) -> LatentAttention | None:
    if not config.get("kv_lora_rank"):
        return None
    return LatentAttention(
        kv_lora_rank=_size(config, "kv_lora_rank", where),
        q_lora_rank=_size(config, "q_lora_rank", where) if config.get("q_lora_rank") else None,
        qk_nope_head_dim=_size(config, "qk_nope_head_dim", where),
        qk_rope_head_dim=_size(config, "qk_rope_head_dim", where),
        v_head_dim=_size(config, "v_head_dim", where),
    )


def _experts(config: dict[str, Any], where: str) -> Experts | None:
    name = next((n for n in ("n_routed_experts", "num_local_experts", "num_experts") if config.get(n)), None)
    if name is None:
        return None
    own = _size(config, "moe_intermediate_size", where, _size(config, "intermediate_size", where))
    shared = int(config.get("n_shared_experts") or 0) * own
    return Experts(
        num_experts=_size(config, name, where),
        top_k=_size(config, "num_experts_per_tok", where),
        intermediate_size=own,
        shared_intermediate_size=shared or int(config.get("shared_expert_intermediate_size") or 0),
        num_dense_layers=int(config.get("first_k_dense_replace") or 0),
    )


def _size(config: dict[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BuildError(f"{where}: {key} is {value!r}; it must be a whole number over 0.")
    return value
