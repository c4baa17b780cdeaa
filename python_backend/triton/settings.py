"""The parameters of `tensorrt_llm` in config.pbtxt and the engine's config.json, checked as a whole.

Knows nothing of requests. What has no meaning on a CPU is named in the log, what contradicts is an error.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from python_backend.contract import model_contract
from python_backend.engine.config import EngineConfig
from python_backend.errors import BuildError
from python_backend.guided.limits import GuideLimits
from python_backend.lora.modules import PROJECTIONS
from python_backend.request import Guide
from python_backend.triton.lora_file import LoraFile

if TYPE_CHECKING:
    from collections.abc import Mapping

# Parameters about graphics cards, MPI and weights of adapters' caches: no value of theirs changes anything here.
WITHOUT_EFFECT = frozenset(
    {
        "FORCE_CPU_ONLY_INPUT_TENSORS",
        "cuda_graph_cache_size",
        "cuda_graph_mode",
        "eagle_choices",
        "enable_context_fmha_fp32_acc",
        "executor_worker_path",
        "gpu_device_ids",
        "gpu_weights_percent",
        "iter_stats_max_iterations",
        "kv_cache_free_gpu_mem_fraction",
        "kv_cache_onboard_blocks",
        "lora_cache_gpu_memory_fraction",
        "lora_cache_host_memory_bytes",
        "lora_cache_max_adapter_size",
        "lora_cache_optimal_adapter_size",
        "medusa_choices",
        "multi_block_mode",
        "normalize_log_probs",
        "num_nodes",
        "participant_ids",
        "request_stats_max_iterations",
        "xgrammar_tokenizer_info_path",
    }
)

# Parameters that ask for something this engine does not do, and why.
REFUSED: dict[str, str] = {
    "cross_kv_cache_fraction": "only decoder-only models are served here",
    "encoder_model_path": "only decoder-only models are served here",
    "lookahead_ngram_size": "lookahead decoding is not served on a CPU",
    "lookahead_verification_set_size": "lookahead decoding is not served on a CPU",
    "lookahead_window_size": "lookahead decoding is not served on a CPU",
    "sink_token_length": "the CPU engine always attends to the whole sequence",
}

_BATCHING = {
    "inflight_batching": "inflight_fused_batching",
    "inflight_fused_batching": "inflight_fused_batching",
    "v1": "V1",
}


class ModelParameters(BaseModel):
    """Parameters with a meaning on a CPU, typed; None where config.pbtxt leaves one out."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpt_model_path: Path = Field(description="directory with the engine's config.json")
    gpt_model_type: str = Field(description="batching: inflight_fused_batching, inflight_batching or V1")
    max_beam_width: int | None = Field(default=None, ge=1, description="widest beam a request may ask for")
    max_tokens_in_paged_kv_cache: int | None = Field(default=None, ge=1, description="size of the KV cache in tokens")
    max_attention_window_size: str | None = Field(
        default=None, description="numbers of at least max_seq_len only: there is no sliding window"
    )
    batch_scheduler_policy: Literal["max_utilization", "guaranteed_no_evict"] | None = Field(
        default=None, description="whether requests may be preempted and computed again when blocks run out"
    )
    kv_cache_host_memory_bytes: Literal[0] = Field(default=0, description="0 only: the cache is in host memory already")
    exclude_input_in_output: bool = Field(default=False, description="default for requests that do not say it")
    cancellation_check_period_ms: int = Field(default=50, ge=1, description="period of the search for clients gone")
    stats_check_period_ms: int = Field(default=100, ge=1, description="period of the gauges")
    health_patience_ms: int = Field(default=30_000, ge=1, description="time without a step or a free block, see health")
    enable_kv_cache_reuse: bool | None = Field(default=None, description="whether prompts share cached prefixes")
    enable_chunked_context: bool | None = Field(default=None, description="whether long prompts are computed in parts")
    speculative_decoding_fast_logits: Literal[False] = Field(default=False, description="false only")
    decoding_mode: Literal["auto", "top_k", "top_p", "top_k_top_p", "beam_search"] | None = Field(
        default=None, description="any of these: each request decides by its own inputs"
    )
    guided_decoding_backend: Literal["llguidance", "xgrammar", "none"] = Field(
        default="llguidance", description="llguidance, xgrammar, or none: requests with a guide are refused"
    )
    tokenizer_dir: Path | None = Field(default=None, description="default: the one that the engine was built with")
    lora_prefetch_dir: Path | None = Field(default=None, description="adapters to load at start, by their task ids")


class WarmGuide(BaseModel):
    """A guide to compile before the first request asks for it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: str
    guide: str = ""


class GuidedFile(BaseModel):
    """Section `guided` of engine/config.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cache_entries: int = GuideLimits().cache_entries
    warm_up: list[WarmGuide] = []


class EngineFile(BaseModel):
    """engine/config.json as build_engines wrote it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    version: str
    target: Literal["cpu"]
    build_config: dict[str, Any]
    checkpoint_dir: str
    tokenizer_dir: str
    end_ids: list[int] = []
    guided: GuidedFile = GuidedFile()
    lora: LoraFile | None = None


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """What `tensorrt_llm` is configured by. Paths are absolute, periods in seconds."""

    checkpoint_dir: Path
    tokenizer_dir: Path
    engine: EngineConfig
    decoupled: bool
    exclude_input_in_output: bool
    cancellation_check_period_s: float
    stats_check_period_s: float
    health_patience_s: float
    notes: tuple[str, ...]  # for the log
    guides: GuideLimits | None = None  # None: requests with a guide are refused
    guide_backend: str = "llguidance"
    warm_up: tuple[Guide, ...] = ()
    lora: LoraFile | None = None  # None: adapters are not served


def read_settings(model_config: Mapping[str, Any]) -> ModelSettings:
    """Settings out of config.pbtxt (as Triton's JSON) and the engine directory that it names.

    Raises:
        BuildError: names the parameter or file, its value and what is allowed.
    """
    given = _given_parameters(model_config)
    parameters = _typed_parameters({key: text for key, text in given.items() if key not in WITHOUT_EFFECT})
    engine_file = _read_engine_file(parameters.gpt_model_path)
    _check_instances(model_config)
    without = sorted(WITHOUT_EFFECT & given.keys() - {"FORCE_CPU_ONLY_INPUT_TENSORS", "executor_worker_path"})
    return ModelSettings(
        checkpoint_dir=(parameters.gpt_model_path / engine_file.checkpoint_dir).resolve(),
        tokenizer_dir=parameters.tokenizer_dir or (parameters.gpt_model_path / engine_file.tokenizer_dir).resolve(),
        engine=_engine_config(engine_file, parameters, model_config),
        decoupled=bool(model_config.get("model_transaction_policy", {}).get("decoupled", False)),
        exclude_input_in_output=parameters.exclude_input_in_output,
        cancellation_check_period_s=parameters.cancellation_check_period_ms / 1e3,
        stats_check_period_s=parameters.stats_check_period_ms / 1e3,
        health_patience_s=parameters.health_patience_ms / 1e3,
        guides=None
        if parameters.guided_decoding_backend == "none"
        else GuideLimits(cache_entries=engine_file.guided.cache_entries),
        guide_backend=parameters.guided_decoding_backend,
        warm_up=tuple(Guide(entry.type, entry.guide) for entry in engine_file.guided.warm_up),
        lora=_lora(engine_file, parameters.lora_prefetch_dir),
        notes=tuple(f"Parameter {key} has no meaning on a CPU; {given[key]!r} changes nothing." for key in without),
    )


def _lora(file: EngineFile, prefetch_dir: Path | None) -> LoraFile | None:
    if file.lora is None and prefetch_dir is not None:
        raise BuildError(
            f"Parameter lora_prefetch_dir is {prefetch_dir}, but adapters are not served by this deployment. "
            "Remove it, or add a section lora to the spec."
        )
    return None if file.lora is None else file.lora.model_copy(update={"prefetch_dir": prefetch_dir})


def read_lora(engine_dir: Path) -> tuple[LoraFile | None, Path]:
    """Section `lora` of an engine's config.json, and the checkpoint that adapters have to fit."""
    file = _read_engine_file(engine_dir)
    return file.lora, (engine_dir / file.checkpoint_dir).resolve()


def _given_parameters(model_config: Mapping[str, Any]) -> dict[str, str]:
    """Parameters that are set: neither empty nor an unfilled placeholder of upstream's template."""
    known = model_contract("tensorrt_llm").parameters
    given: dict[str, str] = {}
    for key, entry in model_config.get("parameters", {}).items():
        text = str(entry.get("string_value", "")).strip()
        if not text or text.startswith("${"):
            continue
        if key not in known:
            raise BuildError(f"Parameter {key} of tensorrt_llm is unknown. Remove it from config.pbtxt.")
        if key in REFUSED:
            raise BuildError(f"Parameter {key} is {text}, but {REFUSED[key]}. Remove it from config.pbtxt.")
        given[key] = text
    return given


def _typed_parameters(given: dict[str, str]) -> ModelParameters:
    try:
        return ModelParameters.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        key = first["loc"][0]
        if first["type"] == "missing":
            raise BuildError(f"Parameter {key} of tensorrt_llm is not set. Set it in config.pbtxt.") from error
        raise BuildError(
            f"Parameter {key} of tensorrt_llm is {given[str(key)]!r}: {first['msg']}. Correct it in config.pbtxt."
        ) from error


def _read_engine_file(engine_dir: Path) -> EngineFile:
    path = engine_dir / "config.json"
    try:
        return EngineFile.model_validate(json.loads(path.read_text()))
    except OSError as error:
        raise BuildError(f"{path} cannot be read ({error.strerror}). Build the engine: make build-engines.") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = f"{path}: {'.'.join(map(str, first['loc']))}"
        raise BuildError(f"{where}: {first['msg']}. Build the engine again: make build-engines.") from error
    except ValueError as error:
        raise BuildError(f"{path} is no JSON ({error}). Build the engine again: make build-engines.") from error


def _engine_config(file: EngineFile, parameters: ModelParameters, model_config: Mapping[str, Any]) -> EngineConfig:
    """What was built, with what config.pbtxt sets on top; it can only lower what the engine was built for."""
    try:
        built = EngineConfig(**file.build_config)
    except TypeError as error:
        raise BuildError(f"build_config of the engine: {error}. Build the engine again: make build-engines.") from error
    strategy = _BATCHING.get(parameters.gpt_model_type.lower())
    if strategy is None:
        raise BuildError(f"Invalid gpt_model_type {parameters.gpt_model_type}; allowed: {', '.join(_BATCHING)}.")
    changes: dict[str, Any] = {"batching_strategy": strategy}
    if file.lora is not None:
        changes["max_lora_rank"] = file.lora.max_rank
        changes["lora_projections"] = tuple(PROJECTIONS[module] for module in file.lora.modules)
    if parameters.max_beam_width is not None:
        _at_most("max_beam_width", parameters.max_beam_width, built.max_beam_width)
        changes["max_beam_width"] = parameters.max_beam_width
    if parameters.max_tokens_in_paged_kv_cache is not None:
        changes["kv_cache_tokens"] = parameters.max_tokens_in_paged_kv_cache
    for key in ("enable_kv_cache_reuse", "enable_chunked_context", "batch_scheduler_policy"):
        value = getattr(parameters, key)
        if value is not None:
            changes[key] = value
    _check_attention_window(parameters.max_attention_window_size, built.max_seq_len)
    if (queue_size := _max_queue_size(model_config)) is not None:
        changes["max_queue_size"] = queue_size
    return dataclasses.replace(built, **changes)


def _at_most(key: str, value: int, built: int) -> None:
    if value > built:
        raise BuildError(f"Parameter {key} is {value}, but the engine was built for {built}. Lower it, or build again.")


def _check_attention_window(text: str | None, max_seq_len: int) -> None:
    if text is None:
        return
    windows = text.split(",")
    if any(not window.strip().isdigit() or int(window) < max_seq_len for window in windows):
        raise BuildError(
            f"Parameter max_attention_window_size is {text}, but the CPU engine always attends to the whole sequence: "
            f"allowed are numbers >= max_seq_len ({max_seq_len}). Remove it from config.pbtxt."
        )


def _max_queue_size(model_config: Mapping[str, Any]) -> int | None:
    """Upstream reads the executor's queue bound here and nowhere else; 0 is no bound, None is not set."""
    policy = model_config.get("dynamic_batching", {}).get("default_queue_policy")
    return None if policy is None else int(policy.get("max_queue_size", 0))


def _check_instances(model_config: Mapping[str, Any]) -> None:
    count = sum(int(group.get("count", 1)) for group in model_config.get("instance_group", []))
    if count > 1:
        raise BuildError(
            f"instance_group of tensorrt_llm asks for {count} instances; one engine batches all requests. Set count: 1."
        )
