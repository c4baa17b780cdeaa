"""config.json of a TensorRT-LLM checkpoint, made from the Hugging Face one. Knows nothing of weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from build_engines.architectures import head_dim
from python_backend import __version__
from python_backend.errors import BuildError

if TYPE_CHECKING:
    from build_engines.trtllm.mapping import Mapping


@dataclass(frozen=True, slots=True)
class Layout:
    """What tells the supported model classes apart."""

    architecture: str  # TensorRT-LLM's
    qwen_type: str | None = None
    normalization_mode: int | None = None  # of the router: 0 none, 1 renormalise; None: no experts


LAYOUTS = {
    "LlamaForCausalLM": Layout("LlamaForCausalLM"),
    "MistralForCausalLM": Layout("LlamaForCausalLM"),
    "MixtralForCausalLM": Layout("MixtralForCausalLM", normalization_mode=1),
    "Qwen2ForCausalLM": Layout("Qwen2ForCausalLM", "qwen2"),
    "Qwen2MoeForCausalLM": Layout("Qwen2MoeForCausalLM", "qwen2_moe", 0),
    "Qwen3ForCausalLM": Layout("Qwen3ForCausalLM", "qwen3"),
    "Qwen3MoeForCausalLM": Layout("Qwen3MoeForCausalLM", "qwen3_moe", 1),
}


def layout_of(config: dict[str, Any], where: str) -> Layout:
    """The layout of a Hugging Face config.

    Raises:
        BuildError: TensorRT-LLM's engines do not have this architecture, or we do not write it.
    """
    name = (config.get("architectures") or ["nothing"])[0]
    layout = LAYOUTS.get(name)
    if layout is None:
        raise BuildError(
            f"{where}: architecture {name} has no TensorRT-LLM checkpoint of ours; there are: "
            f"{', '.join(sorted(LAYOUTS))}. Target llmapi loads Hugging Face checkpoints directly."
        )
    return layout


def num_experts(config: dict[str, Any]) -> int:
    """Routed experts of a layer, 0 for a plain model."""
    return int(config.get("num_local_experts") or config.get("num_experts") or 0)


def checkpoint_config(
    config: dict[str, Any], where: str, mapping: Mapping, dtype: str, quantization: dict[str, Any]
) -> dict[str, Any]:
    """The checkpoint's config.json.

    Args:
        config: the Hugging Face config.json.
        where: names it in errors.
        mapping: how ranks share the model.
        dtype: of what is not quantised: float16, bfloat16 or float32.
        quantization: quant_algo and kv_cache_quant_algo, None where there is none.
    """
    layout = layout_of(config, where)
    return {
        "architecture": layout.architecture,
        "producer": {"name": "triton-llm-stack", "version": __version__},
        "dtype": dtype,
        "logits_dtype": "float32",
        **_sizes(config, layout),
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "mapping": {
            "world_size": mapping.world_size,
            "tp_size": mapping.tp,
            "pp_size": mapping.pp,
            "cp_size": 1,
            "moe_tp_size": mapping.moe_tp,
            "moe_ep_size": mapping.moe_ep,
        },
        "quantization": quantization | {"exclude_modules": ["lm_head"] if quantization["quant_algo"] else None},
        **_family(config, layout),
    }


def _sizes(config: dict[str, Any], layout: Layout) -> dict[str, Any]:
    rotary_base, rotary_scaling = _rotary(config)
    heads = config["num_attention_heads"]
    return {
        "hidden_size": config["hidden_size"],
        "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_size": head_dim(config),
        "intermediate_size": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config.get("max_position_embeddings"),
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "hidden_act": "silu" if layout.normalization_mode is None else "swiglu",
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": rotary_base,
        "rotary_scaling": rotary_scaling,
        "qk_layernorm": layout.architecture.startswith("Qwen3"),
        "attn_bias": _attn_bias(config, layout),
        "mlp_bias": bool(config.get("mlp_bias", False)),
    }


def _attn_bias(config: dict[str, Any], layout: Layout) -> bool:
    return layout.architecture.startswith("Qwen2") or bool(config.get("attention_bias", False))


def _family(config: dict[str, Any], layout: Layout) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if layout.qwen_type:
        found |= {"qwen_type": layout.qwen_type, "seq_length": 8192, "use_logn_attn": False}
    if layout.normalization_mode is None:
        return found
    shared = int(config.get("shared_expert_intermediate_size") or 0)
    mode = layout.normalization_mode
    if layout.qwen_type:
        mode = int(bool(config.get("norm_topk_prob", mode)))
        inner = config["moe_intermediate_size"]
        found |= {"moe_intermediate_size": inner, "moe_shared_expert_intermediate_size": shared}
    moe = {
        "num_experts": num_experts(config),
        "shared_expert_intermediate_size": shared,
        "top_k": config["num_experts_per_tok"],
        "normalization_mode": mode,
    }
    return found | {"moe": moe}


def _rotary(config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    newer = config.get("rope_parameters") or {}
    base = float(newer.get("rope_theta", config.get("rope_theta", 10000.0)))
    scaling = config.get("rope_scaling") or {key: value for key, value in newer.items() if key != "rope_theta"}
    kind = scaling.get("rope_type", scaling.get("type"))
    if not scaling or kind in (None, "default"):
        return base, None
    return base, scaling | {"type": kind, "rope_type": kind}  # readers of either name exist
