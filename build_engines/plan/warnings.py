"""What a deployment is allowed to be and was still seen to go wrong with. Knows nothing of how it is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from build_engines.plan.engine_plan import EnginePlan

_REUSE = (
    "an FP8 KV cache together with reuse of prefixes was reported to change answers (TensorRT-LLM issue 2699); compare "
    "repeated answers, or set quantization.kv_cache_quant_algo to null or limits.enable_kv_cache_reuse to false"
)
_QWEN = (
    "an FP8 KV cache was reported to break answers of Qwen2.5 (TensorRT-LLM issue 4218); "
    "set quantization.kv_cache_quant_algo to null"
)

_ADAPTERS = (
    "adapters are not known by name on target llmapi, whose model of TensorRT-LLM 1.2.1 has no input for them, so "
    "lora.adapters and lora.directory change nothing"
)


def warnings(plan: EnginePlan) -> list[str]:
    """One sentence for each, without a full stop."""
    deployment = plan.spec.deployment
    if plan.on_cpu:
        return []
    found = []
    lora = deployment.lora if deployment.target == "llmapi" else None
    if lora is not None and (lora.adapters or lora.directory):
        found.append(_ADAPTERS)
    if deployment.quantization.kv_cache_quant_algo == "FP8":
        found += [_REUSE] if deployment.limits.enable_kv_cache_reuse else []
        found += [_QWEN] if plan.shape.architecture.startswith("Qwen2") else []
    return found
