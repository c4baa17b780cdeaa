"""From weights to an engine: which of TensorRT-LLM's tools run, in which order, with which flags.

Knows nothing of shells and containers; paths are those of the script, `$HERE` being the deployment's directory.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from build_engines.trtllm.checkpoint_config import layout_of
from build_engines.trtllm.repository import guides
from build_engines.trtllm.tool import Command, Value

if TYPE_CHECKING:
    from build_engines.plan.engine_plan import EnginePlan
    from build_engines.spec import Spec

WEIGHTS, UNIFIED, CHECKPOINT, ENGINE = "$HERE/weights", "$HERE/unified", "$HERE/trtllm-checkpoint", "$HERE/engine"
DRAFT_WEIGHTS, DRAFT_CHECKPOINT, DRAFT_ENGINE = "$HERE/draft-weights", "$HERE/draft-checkpoint", "$HERE/draft-engine"
XGRAMMAR = "$HERE/xgrammar"
TRTLLM_SOURCE, MODELOPT_SOURCE = "$TRTLLM_SOURCE", "$MODELOPT_SOURCE"
_XGRAMMAR_SCRIPT = f"{TRTLLM_SOURCE}/examples/generate_xgrammar_tokenizer_info.py"
_XGRAMMAR_COMMAND = f'python3 "{_XGRAMMAR_SCRIPT}" --model_dir "{WEIGHTS}" --output_dir "{XGRAMMAR}"'

_QFORMATS = {
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8_pc_pt",
    "W4A16_AWQ": "int4_awq",
    "W4A8_AWQ": "w4a8_awq",
    "NVFP4": "nvfp4",
}
_UNIFIED_QFORMATS = _QFORMATS  # both scripts of ModelOpt use the same names
_CONVERTED = ("NO_QUANT", "W8A16", "W4A16", "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN")
_OWN = ("FP8", "NO_QUANT")


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of the script; `makes` is the directory that it fills, empty for a step that always runs."""

    title: str
    makes: str
    command: Command | str


def stages(plan: EnginePlan) -> list[Stage]:
    """The steps on the machine that builds, all flags checked.

    Raises:
        BuildError: a flag or choice that the tools do not have, or a combination that none of them builds.
    """
    spec = plan.spec
    layout_of({"architectures": [plan.shape.architecture]}, str(spec.file.path))
    draft = spec.deployment.speculative
    _check_medusa(spec)
    found: list[Stage] = []
    if draft is not None and draft.mode == "eagle":
        found.append(
            Stage(
                "take the EAGLE checkpoint", CHECKPOINT, f'cp -r {shlex.quote(str(draft.draft_model))} "{CHECKPOINT}"'
            )
        )
    elif spec.deployment.source.weights is not None:
        found += _checkpoint_stages(plan)
    else:
        _require_own_writer(spec)
    found.append(Stage("compile the engine", ENGINE, build_command(plan).checked()))
    if guides(spec):
        found.append(Stage("describe the tokenizer for constrained decoding", XGRAMMAR, _XGRAMMAR_COMMAND))
    if draft is not None and draft.mode == "draft_tokens_external":
        found += _draft_stages(plan)
    return found


def build_command(
    plan: EnginePlan, checkpoint: str = CHECKPOINT, engine: str = ENGINE, is_draft: bool = False
) -> Command:
    """`trtllm-build` with paged KV cache, packed input and chunked context, and what the spec asks for beside."""
    spec, deployment = plan.spec, plan.spec.deployment
    limits, quantization = deployment.limits, deployment.quantization
    fp8_attention = quantization.quant_algo.startswith("FP8") and quantization.kv_cache_quant_algo == "FP8"
    plain = quantization.quant_algo == "NO_QUANT"
    flags: dict[str, Value] = {
        "--checkpoint_dir": checkpoint,
        "--output_dir": engine,
        "--max_batch_size": limits.max_batch_size,
        "--max_input_len": spec.max_input_len,
        "--max_seq_len": limits.max_seq_len,
        "--max_num_tokens": limits.max_num_tokens,
        "--max_beam_width": limits.max_beam_width,
        "--kv_cache_type": "paged",
        "--tokens_per_block": limits.tokens_per_block,
        "--remove_input_padding": "enable",
        "--context_fmha": "enable",
        "--use_paged_context_fmha": "enable",  # chunked context and block reuse need it
        "--use_fp8_context_fmha": "enable" if fp8_attention else "disable",
        "--gpt_attention_plugin": "auto",
        "--gemm_plugin": "auto" if plain else "disable",
        "--workers": min(plan.cards_per_instance, deployment.hardware.cards_per_node),
        "--log_level": "info",
        "--gather_context_logits": deployment.outputs.context_logits,
        "--gather_generation_logits": deployment.outputs.generation_logits,
    }
    if plan.shape.experts is not None:
        flags["--moe_plugin"] = "auto"
    if deployment.lora is not None and not is_draft:
        flags |= {
            "--lora_plugin": "auto",
            "--lora_target_modules": deployment.lora.modules,
            "--max_lora_rank": deployment.lora.max_rank,
        }
    if deployment.speculative is not None and not is_draft:
        flags["--speculative_decoding_mode"] = deployment.speculative.mode
        flags["--max_draft_len"] = deployment.speculative.max_draft_len
    return Command("trtllm-build", flags)


def _checkpoint_stages(plan: EnginePlan) -> list[Stage]:
    deployment = plan.spec.deployment
    algo, parallel = deployment.quantization.quant_algo, deployment.parallel
    if algo in _CONVERTED:
        return [Stage("convert the weights", CHECKPOINT, _convert_command(plan).checked())]
    if parallel.ep == 1:
        return [Stage("quantise the weights", CHECKPOINT, _quantize_command(plan).checked())]
    if algo != "FP8":
        text = f"is {parallel.ep}; with quant_algo {algo} experts cannot be spread. Use ep 1, FP8, or NO_QUANT."
        raise plan.spec.error("parallel.ep", text)
    own = f'trtllm-checkpoint "{UNIFIED}" "{CHECKPOINT}" --tp {parallel.tp} --pp {parallel.pp} --ep {parallel.ep}'
    return [
        Stage("quantise the weights", UNIFIED, unified_command(plan).checked()),
        Stage("cut the checkpoint into ranks", CHECKPOINT, f"python3 -m build_engines {own}"),
    ]


def _quantize_command(plan: EnginePlan, model: str = WEIGHTS, output: str = CHECKPOINT) -> Command:
    deployment = plan.spec.deployment
    quantization, parallel, draft = deployment.quantization, deployment.parallel, deployment.speculative
    flags: dict[str, Value] = {
        "--model_dir": model,
        "--output_dir": output,
        "--dtype": "auto",
        "--qformat": _QFORMATS[quantization.quant_algo],
        "--tp_size": parallel.tp,
        "--pp_size": parallel.pp,
    }
    if quantization.kv_cache_quant_algo is not None:
        flags["--kv_cache_dtype"] = quantization.kv_cache_quant_algo.lower()
    if draft is not None and draft.mode == "medusa" and draft.draft_model and draft.num_medusa_heads:
        flags["--medusa_model_dir"] = draft.draft_model
        flags["--num_medusa_heads"] = draft.num_medusa_heads
        flags["--max_draft_len"] = draft.max_draft_len
    return Command("quantize", flags, TRTLLM_SOURCE)


def _convert_command(plan: EnginePlan, model: str = WEIGHTS, output: str = CHECKPOINT) -> Command:
    deployment = plan.spec.deployment
    quantization, parallel = deployment.quantization, deployment.parallel
    tool = "convert_qwen" if plan.shape.architecture.startswith("Qwen") else "convert_llama"
    flags: dict[str, Value] = {
        "--model_dir": model,
        "--output_dir": output,
        "--dtype": "auto",
        "--tp_size": parallel.tp,
        "--pp_size": parallel.pp,
        "--workers": plan.cards_per_instance,
    }
    if parallel.ep > 1:
        flags |= {"--moe_tp_size": parallel.tp // parallel.ep, "--moe_ep_size": parallel.ep}
    if quantization.quant_algo in ("W8A16", "W4A16"):
        flags |= {"--use_weight_only": True, "--weight_only_precision": f"int{quantization.quant_algo[1]}"}
    if quantization.quant_algo.startswith("W8A8_SQ"):
        flags |= {"--smoothquant": 0.5, "--per_channel": True, "--per_token": True}
    kv = quantization.kv_cache_quant_algo
    if kv is not None:
        flags[f"--{kv.lower()}_kv_cache"] = True
    return Command(tool, flags, TRTLLM_SOURCE)


def unified_command(plan: EnginePlan) -> Command:
    """ModelOpt's quantiser, writing a Hugging Face checkpoint that the LLM API and our own writer read.

    Raises:
        BuildError: a quantisation that this layout does not have.
    """
    quantization, parallel = plan.spec.deployment.quantization, plan.spec.deployment.parallel
    if quantization.quant_algo not in _UNIFIED_QFORMATS:
        text = f"is {quantization.quant_algo}; from 16-bit weights there are {', '.join(_UNIFIED_QFORMATS)}."
        raise plan.spec.error("quantization.quant_algo", text)
    flags: dict[str, Value] = {
        "--pyt_ckpt_path": WEIGHTS,
        "--export_path": UNIFIED,
        "--export_fmt": "hf",
        "--qformat": _UNIFIED_QFORMATS[quantization.quant_algo],
        "--kv_cache_qformat": (quantization.kv_cache_quant_algo or "none").lower(),
        "--inference_tensor_parallel": parallel.tp,
        "--inference_pipeline_parallel": parallel.pp,
    }
    return Command("hf_ptq", flags, MODELOPT_SOURCE)


def _draft_stages(plan: EnginePlan) -> list[Stage]:
    """A small model that proposes; it is quantised and cut as the large one is."""
    converted = plan.spec.deployment.quantization.quant_algo in _CONVERTED
    make = _convert_command if converted else _quantize_command
    command = make(plan, DRAFT_WEIGHTS, DRAFT_CHECKPOINT)
    build = build_command(plan, DRAFT_CHECKPOINT, DRAFT_ENGINE, is_draft=True)
    return [
        Stage(
            "convert the draft model" if converted else "quantise the draft model", DRAFT_CHECKPOINT, command.checked()
        ),
        Stage("compile the draft engine", DRAFT_ENGINE, build.checked()),
    ]


def _check_medusa(spec: Spec) -> None:
    """Medusa's heads reach a checkpoint through one tool only, which always quantises."""
    deployment = spec.deployment
    if deployment.speculative is None or deployment.speculative.mode != "medusa":
        return
    quantized = deployment.quantization.quant_algo in _QFORMATS and deployment.parallel.ep == 1
    if deployment.source.weights is None or not quantized:
        text = "is medusa; its heads are added when TensorRT-LLM quantises the weights. Give source.weights, ep 1, and "
        raise spec.error("speculative.mode", f"{text}quant_algo {', '.join(_QFORMATS)}.")


def _require_own_writer(spec: Spec) -> None:
    algo = spec.deployment.quantization.quant_algo
    if algo not in _OWN:
        text = f"is {algo}; weights on this machine become {' or '.join(_OWN)}. Give source.weights to quantise there."
        raise spec.error("quantization.quant_algo", text)
