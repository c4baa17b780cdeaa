"""Checks that a model repository, the engine it names and the tokenizer agree: limits, versions, files, cards."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build_engines.checkpoint import read_json
from build_engines.files import sha256_file
from build_engines.trtllm.tool import flag_table
from build_engines.trtllm.versions import CONTAINER
from python_backend.errors import BuildError

_ABSURD_INPUT_LEN = 16
Found = list[tuple[str, str]]  # model name, finding


@dataclass(frozen=True, slots=True)
class _Engine:
    """config.json of an engine directory, and the parameters of the model that serves it."""

    directory: Path
    config: dict[str, Any]
    parameters: dict[str, str]
    max_batch_size: int
    backend: str
    instances: int

    @property
    def build(self) -> dict[str, Any]:
        """The limits it was built with."""
        return dict(self.config.get("build_config") or {})

    @property
    def model(self) -> dict[str, Any]:
        """The model in it."""
        return dict(self.config.get("pretrained_config") or {})

    def number(self, key: str) -> int | None:
        """A parameter that is a whole number."""
        text = self.parameters.get(key, "")
        return int(text) if text.isdigit() else None


def check_engine(configs: dict[str, Any]) -> Found:
    """What does not fit between the configurations of all models and the files they name.

    Directories that are not there are left to the check of parameters.
    """
    values = {
        name: {key: entry.string_value for key, entry in config.parameters.items()} for name, config in configs.items()
    }
    found = _check_tokenizers(values)
    served = configs.get("tensorrt_llm")
    text = values.get("tensorrt_llm", {}).get("gpt_model_path", "")
    if served is None or not text or not Path(text).is_dir():
        return found
    path = Path(text) / "config.json"
    try:
        config = read_json(path)
    except BuildError as error:
        return [*found, ("tensorrt_llm", f"parameter gpt_model_path: {error} Build the engine again.")]
    instances = sum(group.count for group in served.instance_group) or 1
    engine = _Engine(Path(text), config, values["tensorrt_llm"], served.max_batch_size, served.backend, instances)
    texts = _check_limits(engine) + _check_vocabulary(engine)
    texts += _check_compiled(engine) if engine.backend == "tensorrtllm" else _check_hashes(engine)
    return found + [("tensorrt_llm", finding) for finding in texts]


def _check_tokenizers(values: dict[str, dict[str, str]]) -> Found:
    before, after = (values.get(name, {}).get("tokenizer_dir") for name in ("preprocessing", "postprocessing"))
    if before and after and Path(before) != Path(after):
        text = f"parameter tokenizer_dir is {after}, that of preprocessing is {before}; answers would be garbled."
        return [("postprocessing", text)]
    return []


def _check_limits(engine: _Engine) -> list[str]:
    found: list[str] = []
    build, path = engine.build, engine.directory / "config.json"
    limit = build.get("max_batch_size")
    if isinstance(limit, int) and engine.max_batch_size > limit:
        found.append(f"max_batch_size is {engine.max_batch_size}; the engine takes {limit} ({path}).")
    beams, limit = engine.number("max_beam_width"), build.get("max_beam_width")
    if beams is not None and isinstance(limit, int) and beams > limit:
        found.append(f"parameter max_beam_width is {beams}; the engine takes {limit} ({path}).")
    longest = build.get("max_input_len")
    if isinstance(longest, int) and longest < _ABSURD_INPUT_LEN:
        found.append(
            f"parameter gpt_model_path: the engine takes {longest} prompt tokens; build it with a larger max_input_len."
        )
    tokens, longest = engine.number("max_tokens_in_paged_kv_cache"), build.get("max_seq_len")
    if tokens is not None and isinstance(longest, int):
        needed = longest if engine.backend == "python" else longest * (beams or 1)
        if tokens < needed:
            found.append(
                f"parameter max_tokens_in_paged_kv_cache is {tokens}; one sequence of the engine's max_seq_len "
                f"({longest}, {beams or 1} beams) needs {needed}. Raise it, or build with a smaller max_seq_len."
            )
    return found


def _check_vocabulary(engine: _Engine) -> list[str]:
    rows = engine.model.get("vocab_size")
    path = Path(engine.parameters.get("tokenizer_dir") or "/nowhere") / "tokenizer.json"
    if not isinstance(rows, int) or not path.is_file():
        return []
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer.get("model", {}).get("vocab", {})
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
    largest = max([*ids, *(token["id"] for token in tokenizer.get("added_tokens", []))], default=0)
    if largest < rows:
        return []
    return [
        f"parameter tokenizer_dir: {path} has token {largest}; the engine's model has {rows}. They are of two models."
    ]


def _check_hashes(engine: _Engine) -> list[str]:
    """Our own engine records what it was built with."""
    recorded = (engine.config.get("hashes") or {}).get("tokenizer")
    path = Path(engine.parameters.get("tokenizer_dir") or "/nowhere") / "tokenizer.json"
    if recorded and path.is_file() and sha256_file(path) != recorded:
        return [f"parameter tokenizer_dir: {path} is not the tokenizer that the engine was built with; build again."]
    return []


def _check_compiled(engine: _Engine) -> list[str]:
    """A compiled engine: version, rank files, cards, plugins."""
    found: list[str] = []
    version, known = engine.config.get("version"), flag_table()["version"]
    if version != known:
        found.append(
            f"parameter gpt_model_path: the engine was compiled with TensorRT-LLM {version}, {CONTAINER} runs "
            f"{known}; compile it again there, or serve it in the container it was made in."
        )
    world = (engine.model.get("mapping") or {}).get("world_size", 1)
    missing = [f"rank{i}.engine" for i in range(world) if not (engine.directory / f"rank{i}.engine").is_file()]
    if missing:
        found.append(f"parameter gpt_model_path: {engine.directory} lacks {', '.join(missing)}.")
    found += _check_cards(engine, world)
    plugins = engine.build.get("plugin_config") or {}
    for key in ("enable_kv_cache_reuse", "enable_chunked_context"):
        if engine.parameters.get(key) == "true" and plugins.get("use_paged_context_fmha") is False:
            found.append(
                f"parameter {key} is true; the engine was built without use_paged_context_fmha. Build it with."
            )
    rank, built = (
        engine.number("lora_cache_max_adapter_size"),
        (engine.build.get("lora_config") or {}).get("max_lora_rank"),
    )
    if rank is not None and not plugins.get("lora_plugin"):
        found.append("parameter lora_cache_max_adapter_size is set; the engine was built without lora_plugin.")
    elif rank is not None and isinstance(built, int) and rank < built:
        found.append(f"parameter lora_cache_max_adapter_size is {rank}; the engine takes adapters of rank {built}.")
    return found


def _check_cards(engine: _Engine, world: int) -> list[str]:
    text = engine.parameters.get("gpu_device_ids", "")
    if not text:
        return []
    groups = [group.split(",") for group in text.split(";")]
    if len(groups) != engine.instances or any(len(group) != world for group in groups):
        return [
            f"parameter gpu_device_ids is {text!r}; {engine.instances} instances of {world} ranks need "
            f"{engine.instances} groups of {world} cards, as in 0,1;2,3."
        ]
    return []
