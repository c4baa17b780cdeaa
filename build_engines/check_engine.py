"""Checks that a model repository, the engine it names and the tokenizer agree: limits, versions, files, cards."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build_engines.checkpoint import read_json
from build_engines.files import sha256_file
from build_engines.placeholders import UNKNOWN_NUMBER, holds_placeholder
from build_engines.templates import contract_name
from build_engines.trtllm.tool import flag_table
from build_engines.trtllm.versions import CONTAINER
from python_backend.errors import BuildError

_ABSURD_INPUT_LEN = 16
_SPECULATIVE_MODES = {
    "medusa": "MEDUSA",
    "lookahead": "LOOKAHEAD",
    "eagle": "EAGLE",
    "redrafter": "EXPLICIT_DRAFT_TOKENS",
}
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

    @classmethod
    def of(cls, served: Any, parameters: dict[str, str]) -> _Engine:
        """The engine that a model's configuration names.

        Raises:
            BuildError: its config.json cannot be read.
        """
        directory = Path(parameters["gpt_model_path"])
        config = read_json(directory / "config.json")
        instances = sum(group.count for group in served.instance_group) or 1
        return cls(directory, config, parameters, served.max_batch_size, served.backend, instances)

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
    for name, served in configs.items():
        if (
            contract_name(name, served) != "tensorrt_llm"
            or not Path(values[name].get("gpt_model_path") or "?").is_dir()
        ):
            continue
        try:
            engine = _Engine.of(served, values[name])
        except BuildError as error:
            found.append((name, f"parameter gpt_model_path: {error} Build the engine again."))
            continue
        texts = _check_limits(engine) + _check_vocabulary(engine)
        texts += _check_compiled(engine) if engine.backend == "tensorrtllm" else _check_hashes(engine)
        found += [(name, finding) for finding in texts]
    return found + _check_drafts(configs, values)


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
    if isinstance(limit, int) and UNKNOWN_NUMBER != engine.max_batch_size > limit:
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
    found += _check_cards(engine, world) + _check_speculation(engine)
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


def _check_speculation(engine: _Engine) -> list[str]:
    """A decoding mode that the engine was not built for would fail at load."""
    mode, built = (
        engine.parameters.get("decoding_mode", ""),
        str(engine.build.get("speculative_decoding_mode") or "NONE"),
    )
    if mode not in _SPECULATIVE_MODES or _SPECULATIVE_MODES[mode] in built.upper():
        return []
    return [
        f"parameter decoding_mode is {mode}; the engine was built for {built}. Build it with that mode, or remove it."
    ]


def _check_drafts(configs: dict[str, Any], values: dict[str, dict[str, str]]) -> Found:
    """The loop over a draft model: both models are there, and the large one's engine takes as many tokens."""
    given = values.get("tensorrt_llm_bls", {})
    draft = given.get("tensorrt_llm_draft_model_name", "")
    if not draft or holds_placeholder(draft):
        return []
    target = given.get("tensorrt_llm_model_name") or "tensorrt_llm"
    found: Found = [
        (
            "tensorrt_llm_bls",
            f"parameter {key} is {name}; no such model in the repository. Add it, or correct the name.",
        )
        for key, name in (("tensorrt_llm_model_name", target), ("tensorrt_llm_draft_model_name", draft))
        if name not in configs
    ]
    path, size = (
        Path(values.get(target, {}).get("gpt_model_path") or "?") / "config.json",
        given.get("num_draft_tokens"),
    )
    if path.is_file() and size and size.isdigit():
        takes = (json.loads(path.read_text()).get("build_config") or {}).get("max_draft_len", 0)
        if int(size) > takes:
            text = f"parameter num_draft_tokens is {size}; the engine takes {takes} ({path}). Lower it, or build again."
            found.append(("tensorrt_llm_bls", text))
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
