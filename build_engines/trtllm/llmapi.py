"""The llmapi target: model.yaml, whose keys are arguments of TensorRT-LLM's LLM class, and the model's config.pbtxt.

`llmapi_model.json` holds the tensors of upstream's template. Knows nothing of engines.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from tritonclient.grpc import model_config_pb2 as pb

from build_engines.templates import to_text
from build_engines.trtllm.pbtxt import set_parameters
from build_engines.trtllm.pipeline import TRTLLM_SOURCE, UNIFIED, WEIGHTS, Stage, unified_command
from build_engines.trtllm.repository import gpu_device_ids
from python_backend.contract import ModelContract, TensorSpec

if TYPE_CHECKING:
    from pathlib import PurePosixPath

    from build_engines.plan.engine_plan import EnginePlan

_TEMPLATE = "triton_backend/all_models/llmapi/tensorrt_llm/1"
_AS_PUBLISHED = ("NO_QUANT", "FP8_BLOCK_SCALES")  # loaded as they are
_DECODING_TYPES = {"eagle": "Eagle", "draft_tokens_external": "DraftTarget", "lookahead_decoding": "Lookahead"}


def render_llmapi(plan: EnginePlan, deployment_dir: PurePosixPath, directory: Path) -> None:
    """Write the repository, one model, into an empty directory; its model.py comes from upstream by build.sh."""
    model = directory / "tensorrt_llm"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(to_text(model_config(plan)))
    text = yaml.safe_dump(model_yaml(plan, deployment_dir), sort_keys=False)
    (model / "1" / "model.yaml").write_text(f"# Arguments of tensorrt_llm.LLM, for {plan.spec.name}.\n{text}")


def llmapi_stages(plan: EnginePlan) -> list[Stage]:
    """The steps on the machine that builds.

    Raises:
        BuildError: a quantisation that the LLM API does not load.
    """
    source = f"{TRTLLM_SOURCE}/{_TEMPLATE}"
    text = f'cp "{source}/"*.py "$HERE/model_repo/tensorrt_llm/1/"'
    found = [Stage("take upstream's model", "", text)]
    if checkpoint_dir(plan) == UNIFIED:
        found.append(Stage("quantise the weights", UNIFIED, unified_command(plan).checked()))
    return found


def checkpoint_dir(plan: EnginePlan) -> str:
    """What is loaded: the weights as published, what ModelOpt made of them, or a checkpoint made on this machine."""
    deployment = plan.spec.deployment
    if deployment.source.weights is None:
        return "$HERE/checkpoint-fp8" if plan.spec.wants_fp8 else "$HERE/checkpoint"
    return WEIGHTS if deployment.quantization.quant_algo in _AS_PUBLISHED else UNIFIED


def llmapi_contract() -> ModelContract:
    """The tensors of upstream's model."""
    table = json.loads((Path(__file__).parent / "llmapi_model.json").read_text())
    inputs = {t["name"]: _spec(t, optional=bool(t.get("optional"))) for t in table["inputs"]}
    outputs = {t["name"]: _spec(t, optional=True) for t in table["outputs"]}
    return ModelContract("tensorrt_llm", inputs, outputs, {})


def _spec(tensor: dict[str, Any], *, optional: bool) -> TensorSpec:
    return TensorSpec(tensor["name"], tensor["data_type"], tuple(tensor["dims"]), optional)


def model_config(plan: EnginePlan) -> Any:
    """The ModelConfig of the model; upstream's template reads max_batch_size and decoupled from model.yaml."""
    contract = llmapi_contract()
    config = pb.ModelConfig(name="tensorrt_llm", backend="python")
    for tensor in contract.inputs.values():
        data_type = pb.DataType.Value(tensor.data_type)
        config.input.add(name=tensor.name, data_type=data_type, dims=tensor.dims, optional=tensor.optional)
    for tensor in contract.outputs.values():
        config.output.add(name=tensor.name, data_type=pb.DataType.Value(tensor.data_type), dims=tensor.dims)
    instances = plan.spec.deployment.parallel.instances
    config.instance_group.add(count=instances, kind=pb.ModelInstanceGroup.KIND_CPU)
    config.model_transaction_policy.decoupled = plan.spec.deployment.server.decoupled
    if instances > 1:
        set_parameters(config, gpu_device_ids=gpu_device_ids(plan))
    return config


def model_yaml(plan: EnginePlan, deployment_dir: PurePosixPath) -> dict[str, Any]:
    """Arguments of the LLM class, and what the template reads beside them."""
    deployment = plan.spec.deployment
    limits, parallel, server = deployment.limits, deployment.parallel, deployment.server
    kv_cache: dict[str, Any] = {
        "free_gpu_memory_fraction": deployment.hardware.kv_cache_free_gpu_mem_fraction,
        "enable_block_reuse": limits.enable_kv_cache_reuse,
        "tokens_per_block": limits.tokens_per_block,
        "dtype": (deployment.quantization.kv_cache_quant_algo or "auto").lower(),
    }
    if "kv_cache_tokens" in limits.model_fields_set:
        kv_cache["max_tokens"] = limits.kv_cache_tokens
    found: dict[str, Any] = {
        "model": checkpoint_dir(plan).replace("$HERE", str(deployment_dir)),
        "backend": "pytorch",
        "tensor_parallel_size": parallel.tp,
        "pipeline_parallel_size": parallel.pp,
        "max_batch_size": limits.max_batch_size,
        "max_num_tokens": limits.max_num_tokens,
        "max_seq_len": limits.max_seq_len,
        "max_beam_width": limits.max_beam_width,
        "enable_chunked_prefill": limits.enable_chunked_context,
        "kv_cache_config": kv_cache,
        "scheduler_config": {"capacity_scheduler_policy": limits.batch_scheduler_policy.upper()},
    }
    if parallel.ep > 1:
        found |= {"moe_tensor_parallel_size": parallel.tp // parallel.ep, "moe_expert_parallel_size": parallel.ep}
    if deployment.lora is not None:
        found["lora_config"] = {
            "max_lora_rank": deployment.lora.max_rank,
            "lora_target_modules": list(deployment.lora.modules),
            "max_loras": deployment.lora.max_adapters_on_gpu,
        }
    if deployment.speculative is not None:
        found["speculative_config"] = _speculative(plan)
    found["triton_config"] = {
        "max_batch_size": 0,  # the only value that the template supports
        "decoupled": server.decoupled,
        "cancellation_check_period_ms": server.cancellation_check_period_ms,
    }
    return found


def _speculative(plan: EnginePlan) -> dict[str, Any]:
    draft = plan.spec.deployment.speculative
    assert draft is not None
    found: dict[str, Any] = {"decoding_type": _DECODING_TYPES[draft.mode], "max_draft_len": draft.max_draft_len}
    if draft.draft_model is not None:
        found["speculative_model_dir"] = draft.draft_model
    if draft.mode == "lookahead_decoding":
        found = {
            "decoding_type": "Lookahead",
            "max_window_size": draft.lookahead_window_size,
            "max_ngram_size": draft.lookahead_ngram_size,
            "max_verification_set_size": draft.lookahead_verification_set_size,
        }
    return found
