"""The model repository of one deployment: the templates of model_repo/ with what the spec decides written in."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from python_backend.errors import BuildError

if TYPE_CHECKING:
    from build_engines.spec import Spec

TEMPLATES = Path(__file__).resolve().parent.parent / "model_repo"
ADAPTERS = "adapters"  # the model that lists them
HEALTH = "health"  # the model that says whether the others serve


@dataclass(frozen=True, slots=True)
class Settings:
    """What config.pbtxt takes from a deployment."""

    engine_dir: str
    tokenizer_dir: str
    max_batch_size: int
    max_beam_width: int
    max_queue_size: int
    kv_cache_tokens: int
    batching_strategy: str
    batch_scheduler_policy: str
    enable_kv_cache_reuse: bool
    enable_chunked_context: bool
    decoupled: bool
    exclude_input_in_output: bool
    add_special_tokens: bool
    skip_special_tokens: bool
    preprocessing_instance_count: int
    max_queue_delay_microseconds: int
    cancellation_check_period_ms: int
    stats_check_period_ms: int
    guided_decoding_backend: str = "llguidance"
    lora: bool = False
    lora_prefetch_dir: str = ""

    @classmethod
    def of(cls, spec: Spec, root: Path) -> Settings:
        """The settings of a spec whose deployment lies in `root`."""
        limits, server = spec.deployment.limits, spec.deployment.server
        return cls(
            engine_dir=str(root / "engine"),
            tokenizer_dir=str(root / "checkpoint"),
            max_batch_size=spec.server_batch_size,
            max_beam_width=limits.max_beam_width,
            max_queue_size=limits.max_queue_size,
            kv_cache_tokens=limits.kv_cache_tokens,
            batching_strategy=limits.batching_strategy,
            batch_scheduler_policy=limits.batch_scheduler_policy,
            enable_kv_cache_reuse=limits.enable_kv_cache_reuse,
            enable_chunked_context=limits.enable_chunked_context,
            decoupled=server.decoupled,
            exclude_input_in_output=server.exclude_input_in_output,
            add_special_tokens=server.add_special_tokens,
            skip_special_tokens=server.skip_special_tokens,
            preprocessing_instance_count=server.preprocessing_instance_count,
            max_queue_delay_microseconds=server.max_queue_delay_microseconds,
            cancellation_check_period_ms=server.cancellation_check_period_ms,
            stats_check_period_ms=server.stats_check_period_ms,
            guided_decoding_backend=spec.deployment.guided.backend,
            lora=spec.deployment.lora is not None,
            lora_prefetch_dir=_prefetch_dir(spec),
        )

    def as_data(self) -> dict[str, Any]:
        """Plain data, for hashing."""
        return asdict(self)


def template_files() -> list[Path]:
    """The files of model_repo/ that a rendered repository is made from."""
    return sorted([*TEMPLATES.glob("*/config.pbtxt"), *TEMPLATES.glob("*/1/*.py")])


def render(settings: Settings, place: Path) -> None:
    """Write the repository of a deployment into an empty directory.

    Raises:
        BuildError: a template is missing or no model configuration.
    """
    from google.protobuf.text_format import ParseError

    from build_engines.templates import MODELS, from_text, to_text  # protobuf and gRPC are slow to import

    for name in (*MODELS, HEALTH, *([ADAPTERS] if settings.lora else [])):
        source = TEMPLATES / name
        try:
            config = from_text((source / "config.pbtxt").read_text())
        except (OSError, ParseError) as error:
            raise BuildError(f"{source / 'config.pbtxt'}: not a model configuration: {error}") from error
        config.max_batch_size = settings.max_batch_size
        _FILL.get(name, _fill_nothing)(config, settings)
        (place / name / "1").mkdir(parents=True)
        (place / name / "config.pbtxt").write_text(to_text(config))
        if (source / "1" / "model.py").is_file():
            shutil.copyfile(source / "1" / "model.py", place / name / "1" / "model.py")


def _prefetch_dir(spec: Spec) -> str:
    lora = spec.deployment.lora
    return "" if lora is None or lora.prefetch_directory is None else str(spec.path(lora.prefetch_directory))


def _fill_nothing(config: Any, settings: Settings) -> None:
    del config, settings


def _fill_preprocessing(config: Any, settings: Settings) -> None:
    config.instance_group[0].count = settings.preprocessing_instance_count
    _batch_dynamically(config, settings)
    _set(
        config,
        tokenizer_dir=settings.tokenizer_dir,
        add_special_tokens=settings.add_special_tokens,
        gpt_model_path=settings.engine_dir,  # whose limits say which prompts are too long to be tokenised
    )


def _fill_tensorrt_llm(config: Any, settings: Settings) -> None:
    config.model_transaction_policy.decoupled = settings.decoupled
    _batch_dynamically(config, settings)
    _set(
        config,
        FORCE_CPU_ONLY_INPUT_TENSORS="no",
        gpt_model_path=settings.engine_dir,
        gpt_model_type=settings.batching_strategy,
        tokenizer_dir=settings.tokenizer_dir,
        max_beam_width=settings.max_beam_width,
        max_tokens_in_paged_kv_cache=settings.kv_cache_tokens,
        batch_scheduler_policy=settings.batch_scheduler_policy,
        enable_kv_cache_reuse=settings.enable_kv_cache_reuse,
        enable_chunked_context=settings.enable_chunked_context,
        exclude_input_in_output=settings.exclude_input_in_output,
        cancellation_check_period_ms=settings.cancellation_check_period_ms,
        stats_check_period_ms=settings.stats_check_period_ms,
        guided_decoding_backend=settings.guided_decoding_backend,
    )
    if settings.lora_prefetch_dir:
        _set(config, lora_prefetch_dir=settings.lora_prefetch_dir)


def _fill_postprocessing(config: Any, settings: Settings) -> None:
    # One instance and kept order: the chunks of a stream must leave in the order they came.
    config.dynamic_batching.preserve_ordering = True
    _set(config, tokenizer_dir=settings.tokenizer_dir, skip_special_tokens=settings.skip_special_tokens)


def _fill_health(config: Any, settings: Settings) -> None:
    del settings
    config.max_batch_size = 0


def _fill_adapters(config: Any, settings: Settings) -> None:
    config.max_batch_size = 0
    _set(config, gpt_model_path=settings.engine_dir)


_FILL: dict[str, Callable[[Any, Settings], None]] = {
    "preprocessing": _fill_preprocessing,
    "tensorrt_llm": _fill_tensorrt_llm,
    "postprocessing": _fill_postprocessing,
    HEALTH: _fill_health,
    ADAPTERS: _fill_adapters,
}


def _batch_dynamically(config: Any, settings: Settings) -> None:
    batching = config.dynamic_batching
    batching.preferred_batch_size[:] = [settings.max_batch_size]
    batching.max_queue_delay_microseconds = settings.max_queue_delay_microseconds
    batching.default_queue_policy.max_queue_size = settings.max_queue_size


def _set(config: Any, **parameters: object) -> None:
    for key, value in parameters.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        config.parameters[key].string_value = text
