"""The model families we build: which tensors their Hugging Face checkpoints hold, and in which shapes.

Knows nothing of files: a config in, names and shapes out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from python_backend.errors import BuildError


@dataclass(frozen=True, slots=True)
class Family:
    """What tells one family from the plain Llama layout."""

    architecture: str  # config.json `architectures[0]`
    model_type: str
    gguf_architecture: str
    qkv_bias: bool = False  # always there, whatever `attention_bias` says
    qk_norm: bool = False
    rotary_permuted_in_gguf: bool = False  # llama.cpp interleaves the two halves of each q and k head


FAMILIES = {
    family.architecture: family
    for family in (
        Family("LlamaForCausalLM", "llama", "llama", rotary_permuted_in_gguf=True),
        Family("MistralForCausalLM", "mistral", "llama", rotary_permuted_in_gguf=True),
        Family("Qwen2ForCausalLM", "qwen2", "qwen2", qkv_bias=True),
        Family("Qwen3ForCausalLM", "qwen3", "qwen3", qk_norm=True),
    )
}

LINEAR_NAMES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)

_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


def family_of(config: dict[str, Any], where: str) -> Family:
    """The family of a Hugging Face config.

    Raises:
        BuildError: an architecture that no target of ours builds; `where` names the file.
    """
    architectures = config.get("architectures") or ["nothing"]
    family = FAMILIES.get(architectures[0])
    if family is None:
        raise BuildError(
            f"{where}: architecture {architectures[0]} is not supported; supported: {', '.join(sorted(FAMILIES))}."
        )
    return family


def head_dim(config: dict[str, Any]) -> int:
    """Elements of one attention head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def linear_names(config: dict[str, Any]) -> list[str]:
    """Full names, without `.weight`, of the linear layers of all decoder layers, in model order."""
    return [f"model.layers.{i}.{name}" for i in range(config["num_hidden_layers"]) for name in LINEAR_NAMES]


def tensor_shapes(config: dict[str, Any], where: str) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint with this config must hold, by Hugging Face name.

    Raises:
        BuildError: the config lacks a size, or the sizes contradict each other; `where` names the file.
    """
    family = family_of(config, where)
    _check_sizes(config, where)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        shapes |= {prefix + name: shape for name, shape in _layer_shapes(config, family).items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _layer_shapes(config: dict[str, Any], family: Family) -> dict[str, tuple[int, ...]]:
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], head_dim(config)
    q = config["num_attention_heads"] * head
    kv = config.get("num_key_value_heads", config["num_attention_heads"]) * head
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if family.qkv_bias or config.get("attention_bias"):
        shapes |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    if config.get("attention_bias") and not family.qkv_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.get("mlp_bias"):
        shapes |= {"mlp.gate_proj.bias": (inner,), "mlp.up_proj.bias": (inner,), "mlp.down_proj.bias": (hidden,)}
    if family.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    return shapes


def _check_sizes(config: dict[str, Any], where: str) -> None:
    for key in _NEEDED:
        if not isinstance(config.get(key), int) or config[key] < 1:
            raise BuildError(f"{where}: {key} is {config.get(key)!r}; it must be a whole number over 0.")
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
    if not isinstance(kv_heads, int) or kv_heads < 1 or heads % kv_heads:
        raise BuildError(f"{where}: num_key_value_heads is {kv_heads}; it must divide num_attention_heads ({heads}).")
    if not config.get("head_dim") and config["hidden_size"] % heads:
        raise BuildError(f"{where}: hidden_size {config['hidden_size']} is no multiple of num_attention_heads {heads}.")
