"""From engines to the LLM API: a spec or an engine's config.json becomes a spec for target llmapi, with its losses.

Knows nothing of files' places; plain data in, plain data out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from build_engines.trtllm.llmapi import llmapi_contract
from python_backend.contract import model_contract
from python_backend.errors import BuildError

if TYPE_CHECKING:
    from build_engines.spec import Deployment

# Inputs of the classic ensemble that the LLM API's model takes under another name.
RENAMED = {
    "text_input": "text_input",
    "stream": "streaming",
    "max_tokens": "sampling_param_max_tokens",
    "temperature": "sampling_param_temperature",
    "top_k": "sampling_param_top_k",
    "top_p": "sampling_param_top_p",
    "frequency_penalty": "sampling_param_frequency_penalty",
    "presence_penalty": "sampling_param_presence_penalty",
    "stop_words": "sampling_param_stop",
    "seed": "sampling_param_seed",
    "num_return_sequences": "sampling_param_best_of",
    "exclude_input_in_output": "sampling_param_exclude_input_from_output",
    "return_perf_metrics": "sampling_param_return_perf_metrics",
}
_UNLOADABLE = {
    "W8A16": "FP8",
    "W4A16": "W4A16_AWQ",
    "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN": "FP8",
    "W8A16_GPTQ": "FP8",
    "W4A16_GPTQ": "W4A16_AWQ",
}
_ARCHITECTURE_NOTE = (
    "the engine files themselves: compiled engines cannot be loaded, start from the Hugging Face weights"
)


@dataclass(frozen=True, slots=True)
class Migration:
    """A spec for target llmapi as plain data, and one sentence for everything that it no longer has."""

    spec: dict[str, Any]
    losses: tuple[str, ...]

    def report(self) -> str:
        """The losses as a page."""
        lines = [f"# {self.spec['name']}: from engines to the LLM API", "", "## Lost or changed", ""]
        lines += [f"- {loss}" for loss in self.losses]
        lines += ["", "## Inputs under another name", "", "| classic | LLM API |", "|---|---|"]
        lines += [f"| `{old}` | `{new}` |" for old, new in RENAMED.items() if old != new]
        return "\n".join(lines) + "\n"


def migrate_spec(deployment: Deployment) -> Migration:
    """Turn a spec for target trtllm into one for llmapi.

    Raises:
        BuildError: the spec is not for trtllm.
    """
    if deployment.target != "trtllm":
        raise BuildError(f"{deployment.name}: target is {deployment.target}; only trtllm is migrated.")
    spec = deployment.model_dump(mode="json", exclude_unset=True, exclude_none=True, by_alias=True)
    spec |= {"name": f"{deployment.name}-llmapi", "target": "llmapi"}
    losses = [_ARCHITECTURE_NOTE]
    quantization = dict(spec.get("quantization", {}))
    losses += _quantization(quantization, deployment.quantization.quant_algo)
    if quantization:
        spec["quantization"] = quantization
    losses += _speculative(spec)
    if deployment.limits.max_beam_width > 1:
        losses.append(f"beam search of width {deployment.limits.max_beam_width}: the model has no beam_width input")
        spec["limits"] = spec.get("limits", {}) | {"max_beam_width": 1}
    if deployment.lora is not None:
        losses.append(
            "adapters sent as tensors (lora_task_id, lora_weights, lora_config): the model takes none of them"
        )
    return Migration(spec, (*losses, *_lost_tensors()))


def migrate_engine(config: dict[str, Any], name: str, weights: str, shape: str, card: str) -> Migration:
    """Turn an engine's config.json into a spec for llmapi.

    Args:
        config: the engine's config.json.
        name: of the new deployment, without the ending that is added.
        weights: Hugging Face id or directory of the model the engine was made from.
        shape: directory with that model's config.json, as the spec's file sees it.
        card: what it runs on.

    Raises:
        BuildError: no config.json of an engine.
    """
    model, build = config.get("pretrained_config"), config.get("build_config")
    if not isinstance(model, dict) or not isinstance(build, dict):
        raise BuildError("This is no config.json of an engine: pretrained_config and build_config are missing.")
    mapping, stated = model.get("mapping") or {}, model.get("quantization") or {}
    algo = str(stated.get("quant_algo") or "NO_QUANT")
    quantization: dict[str, Any] = {"quant_algo": algo, "kv_cache_quant_algo": stated.get("kv_cache_quant_algo")}
    losses = [_ARCHITECTURE_NOTE, *_quantization(quantization, algo)]
    limits = {key: build[key] for key in ("max_batch_size", "max_num_tokens", "max_seq_len") if build.get(key)}
    beams = build.get("max_beam_width") or 1
    if beams > 1:
        losses.append(f"beam search of width {beams}: the model has no beam_width input")
    parallel = {"tp": mapping.get("tp_size", 1), "pp": mapping.get("pp_size", 1), "ep": mapping.get("moe_ep_size", 1)}
    spec: dict[str, Any] = {
        "name": f"{name}-llmapi",
        "target": "llmapi",
        "source": {"shape": shape, "weights": weights},
        "hardware": {"card": card},
        "parallel": parallel,
        "quantization": {key: value for key, value in quantization.items() if value is not None},
        "limits": limits | {"max_beam_width": 1},
    }
    losses += _draft_of_engine(build)
    if (build.get("plugin_config") or {}).get("lora_plugin"):
        rank = (build.get("lora_config") or {}).get("max_lora_rank", 64)
        spec["lora"] = {"max_rank": rank}
        losses.append(
            "adapters sent as tensors (lora_task_id, lora_weights, lora_config): the model takes none of them"
        )
    return Migration(spec, (*losses, *_lost_tensors()))


def _draft_of_engine(build: dict[str, Any]) -> list[str]:
    mode = str(build.get("speculative_decoding_mode") or "NONE")
    if mode.endswith("NONE"):
        return []
    return [f"speculative decoding ({mode}): name a draft model under `speculative` in the new spec"]


def _quantization(quantization: dict[str, Any], algo: str) -> list[str]:
    losses = []
    if algo in _UNLOADABLE:
        quantization["quant_algo"] = _UNLOADABLE[algo]
        losses.append(
            f"quant_algo {algo}: not loaded by the LLM API, became {_UNLOADABLE[algo]}; measure quality again"
        )
    if quantization.get("kv_cache_quant_algo") == "INT8":
        quantization["kv_cache_quant_algo"] = "FP8"
        losses.append("kv_cache_quant_algo INT8: became FP8, which A100 does not have")
    return losses


def _speculative(spec: dict[str, Any]) -> list[str]:
    mode = spec.get("speculative", {}).get("mode")
    if mode == "draft_tokens_external":
        return ["the model tensorrt_llm_bls with num_draft_tokens and use_draft_logits: the LLM API drafts by itself"]
    if mode != "medusa":
        return []
    del spec["speculative"]
    return ["Medusa heads: the LLM API has none; EAGLE is what replaces them"]


def _lost_tensors() -> list[str]:
    """Inputs and outputs of the classic ensemble that have no place in the LLM API's model."""
    classic, left = model_contract("ensemble"), llmapi_contract()
    inputs = sorted(name for name, tensor in classic.inputs.items() if not tensor.ours and name not in RENAMED)
    outputs = sorted(n for n, tensor in classic.outputs.items() if not tensor.ours and n not in left.outputs)
    return [f"inputs without a place: {', '.join(inputs)}", f"outputs without a place: {', '.join(outputs)}"]
