"""The model repository for the C++ backend `tensorrtllm`: ours, less what only our own engine has.

Knows nothing of the build; the paths in it are those inside the container.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tritonclient.grpc import model_config_pb2 as pb

from build_engines.repository import ADAPTERS, TEMPLATES, Settings, render
from build_engines.templates import BLS, MODELS, from_text, to_text
from build_engines.trtllm.adapters import name_adapters, prefetch_directory
from build_engines.trtllm.draft_models import DRAFT, draft_models
from build_engines.trtllm.pbtxt import set_parameters
from build_engines.wiring import DERIVED_LOGPROBS
from python_backend.contract import model_contract

if TYPE_CHECKING:
    from pathlib import Path, PurePosixPath

    from build_engines.plan.engine_plan import EnginePlan
    from build_engines.spec import Spec

# The C++ backend reads it although upstream's template does not declare it.
_ACCEPTED_BESIDE = ("no_repeat_ngram_size",)
# Must have the engine's own data type.
_ENGINE_TYPED = ("lora_weights", "LORA_WEIGHTS", "OUT_LORA_WEIGHTS", "prompt_embedding_table")
_TYPES = {"bfloat16": "TYPE_BF16", "float16": "TYPE_FP16", "float32": "TYPE_FP32"}
_WORKER = "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker"
_DECODING_MODES = {"medusa": "medusa", "eagle": "eagle", "lookahead_decoding": "lookahead"}


def render_trtllm(plan: EnginePlan, deployment_dir: PurePosixPath, directory: Path) -> None:
    """Write the repository into an empty directory.

    Args:
        plan: the deployment.
        deployment_dir: where the container finds it, with `engine` and `weights` in it.
        directory: where to.

    Raises:
        BuildError: a template is missing or no model configuration.
    """
    settings = Settings.of(plan.spec, directory)
    engine_dir, tokenizer_dir = str(deployment_dir / "engine"), str(deployment_dir / "weights")
    prefetch_dir = prefetch_directory(plan.spec, deployment_dir)
    settings = replace(settings, engine_dir=engine_dir, tokenizer_dir=tokenizer_dir, lora_prefetch_dir=prefetch_dir)
    render(settings, directory)
    configs = {name: from_text((directory / name / "config.pbtxt").read_text()) for name in MODELS}
    _keep_classic(configs["tensorrt_llm"])
    _to_backend(plan, configs["tensorrt_llm"])
    del configs["tensorrt_llm"].parameters["guided_decoding_backend"]
    if guides(plan.spec):
        described = deployment_dir / "xgrammar" / "xgrammar_tokenizer_info.json"
        set_parameters(
            configs["tensorrt_llm"], guided_decoding_backend="xgrammar", xgrammar_tokenizer_info_path=described
        )
    for name in ("preprocessing", "postprocessing"):
        set_parameters(configs[name], target=plan.spec.deployment.target)
    if plan.spec.deployment.outputs.generation_logits:
        _derive_logprobs(configs, plan.spec.deployment.outputs.top_logprobs)
    if plan.spec.deployment.lora is not None:
        configs[ADAPTERS] = from_text((directory / ADAPTERS / "config.pbtxt").read_text())
        name_adapters(plan.spec, deployment_dir, directory, configs)
    _rewire(configs)
    for kind in ("input", "output"):
        _keep(getattr(configs["ensemble_unary"], kind), {t.name for t in getattr(configs["ensemble"], kind)})
    if plan.draft is not None:
        configs |= draft_models(plan, deployment_dir, configs)
        shutil.copytree(TEMPLATES / BLS / "1", directory / BLS / "1", ignore=shutil.ignore_patterns("__pycache__"))
        (directory / DRAFT / "1").mkdir(parents=True)
        (directory / DRAFT / "1" / ".keep").touch()
    for name, config in configs.items():
        for tensor in (*config.input, *config.output):
            if tensor.name in _ENGINE_TYPED:
                tensor.data_type = pb.DataType.Value(_TYPES[plan.shape.dtype])
        (directory / name / "config.pbtxt").write_text(to_text(config))
    (directory / "tensorrt_llm" / "1" / "model.py").unlink()
    (directory / "tensorrt_llm" / "1" / ".keep").touch()  # Triton wants the version, git and archives want a file


def guides(spec: Spec) -> bool:
    """Whether the engine enforces structures; it does not when it speculates as well."""
    return spec.deployment.guided.backend != "none" and spec.deployment.speculative is None


def gpu_device_ids(plan: EnginePlan) -> str:
    """Cards of each instance as the backend wants them: `0,1;2,3`. Ranks count from 0 on every machine."""
    parallel, per_node = plan.spec.deployment.parallel, plan.spec.deployment.hardware.cards_per_node
    size = plan.cards_per_instance
    cards = ([(copy * size + rank) % per_node for rank in range(size)] for copy in range(parallel.instances))
    return ";".join(",".join(str(card) for card in group) for group in cards)


def _keep_classic(config: Any) -> None:
    contract = model_contract("tensorrt_llm")
    inputs = {name for name, tensor in contract.inputs.items() if not tensor.ours or name in _ACCEPTED_BESIDE}
    _keep(config.input, inputs)
    _keep(config.output, {name for name, tensor in contract.outputs.items() if not tensor.ours})


def _to_backend(plan: EnginePlan, config: Any) -> None:
    deployment = plan.spec.deployment
    limits, parallel, hardware = deployment.limits, deployment.parallel, deployment.hardware
    config.backend = "tensorrtllm"
    config.instance_group[0].count = parallel.instances
    nodes = -(-plan.cards_per_instance // hardware.cards_per_node)
    explicit = "kv_cache_tokens" in limits.model_fields_set
    if not explicit:
        del config.parameters["max_tokens_in_paged_kv_cache"]
    set_parameters(
        config,
        kv_cache_free_gpu_mem_fraction=hardware.kv_cache_free_gpu_mem_fraction,
        gpu_device_ids=gpu_device_ids(plan),
        num_nodes=nodes if nodes > 1 else None,
        executor_worker_path=_WORKER,
        normalize_log_probs=False,
    )
    if deployment.lora is not None:
        set_parameters(
            config,
            lora_cache_optimal_adapter_size=deployment.lora.optimal_rank,
            lora_cache_max_adapter_size=deployment.lora.max_rank,
            lora_cache_gpu_memory_fraction=_lora_share(plan),
            lora_cache_host_memory_bytes=deployment.lora.host_cache_bytes,
        )
    draft = deployment.speculative
    if draft is not None:
        set_parameters(
            config,
            decoding_mode=_DECODING_MODES.get(draft.mode),
            lookahead_window_size=draft.lookahead_window_size,
            lookahead_ngram_size=draft.lookahead_ngram_size,
            lookahead_verification_set_size=draft.lookahead_verification_set_size,
        )


def _lora_share(plan: EnginePlan) -> str:
    """The adapters' share of what the KV cache leaves free, which is how the backend counts it."""
    memory = plan.memory()
    left = memory.adapters + memory.unused
    return f"{min(0.95, memory.adapters / left):.2f}" if left > 0 else "0.05"


def _derive_logprobs(configs: dict[str, Any], alternatives: int) -> None:
    """The engine gives logits and no log-probs but the chosen token's: postprocessing makes them."""
    steps = {step.model_name: step for step in configs["ensemble"].ensemble_scheduling.step}
    for wires in DERIVED_LOGPROBS:
        steps[wires.model].input_map.update(wires.inputs)
        steps[wires.model].output_map.update(wires.outputs)
    for name in ("preprocessing", "postprocessing"):
        set_parameters(configs[name], top_logprobs=alternatives)


def _rewire(configs: dict[str, Any]) -> None:
    """Take wires out of the ensemble that lost an end; again, until all have both."""
    ensemble = configs["ensemble"]
    for step in ensemble.ensemble_scheduling.step:
        model = configs[step.model_name]
        _keep_keys(step.input_map, {tensor.name for tensor in model.input})
        _keep_keys(step.output_map, {tensor.name for tensor in model.output})
    steps = ensemble.ensemble_scheduling.step
    given = {name for step in steps for name in step.output_map.values()} | {t.name for t in ensemble.input}
    for step in steps:
        for target in [target for target, name in step.input_map.items() if name not in given]:
            del step.input_map[target]
    taken = {name for step in steps for name in step.input_map.values()}
    _keep(ensemble.input, taken)
    _keep(ensemble.output, given)
    results = {tensor.name for tensor in ensemble.output}
    for step in steps:
        for source in [source for source, name in step.output_map.items() if name not in taken | results]:
            del step.output_map[source]


def _keep(tensors: Any, names: set[str]) -> None:
    for index in reversed([i for i, tensor in enumerate(tensors) if tensor.name not in names]):
        del tensors[index]


def _keep_keys(mapping: Any, names: set[str]) -> None:
    for key in [key for key in mapping if key not in names]:
        del mapping[key]
