"""Reads the files beside tokenizer.json: special tokens, end ids and chat templates. Knows nothing of encoding."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from python_backend.errors import BuildError

if TYPE_CHECKING:
    from pathlib import Path

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What stands beside tokenizer.json, as far as a tokenizer needs it."""

    special_tokens: dict[str, str] = field(default_factory=dict)  # bos_token, eos_token, … -> text
    add_bos: bool | None = None  # None: as tokenizer.json has it
    generation_eos_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    chat_templates: dict[str, str] = field(default_factory=dict)  # "default" and others


def read_tokenizer_files(directory: Path) -> TokenizerFiles:
    """What tokenizer_config.json, special_tokens_map.json, generation_config.json, config.json and templates say.

    Every file is optional.

    Raises:
        BuildError: one of them is no JSON object, or an entry has an unusable type.
    """
    config = _read_json(directory / "tokenizer_config.json")
    special_map = _read_json(directory / "special_tokens_map.json")
    generation = _read_json(directory / "generation_config.json")
    model = _read_json(directory / "config.json")
    special_tokens = {}
    for name in _SPECIAL_NAMES:
        text = _token_text(config.get(name) or special_map.get(name))
        if text is not None:
            special_tokens[name] = text
    eos_ids = generation.get("eos_token_id", model.get("eos_token_id"))
    pad_id = generation.get("pad_token_id", model.get("pad_token_id"))
    return TokenizerFiles(
        special_tokens=special_tokens,
        add_bos=_flag(config.get("add_bos_token")),
        generation_eos_ids=_ids(eos_ids, directory),
        pad_token_id=pad_id if isinstance(pad_id, int) and pad_id >= 0 else None,
        chat_templates=_chat_templates(directory, config),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise BuildError(f"{path} is no readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise BuildError(f"{path} holds a JSON {type(content).__name__}; an object is needed.")
    return content


def _token_text(entry: Any) -> str | None:
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _ids(value: Any, directory: Path) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise BuildError(f"eos_token_id in {directory} is {value!r}; an id or a list of ids is needed.")
    return tuple(i for i in ids if i >= 0)


def _chat_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """The named templates; a file of its own wins over tokenizer_config.json, as it does for transformers.

    Raises:
        BuildError: a list of templates has an entry without name or template.
    """
    entry = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(entry, str):
        templates["default"] = entry
    elif isinstance(entry, list):
        for named in entry:
            if not isinstance(named, dict) or not {"name", "template"} <= named.keys():
                raise BuildError(f"chat_template in {directory} lists {named!r:.80}; name and template are needed.")
            templates[named["name"]] = named["template"]
    path = directory / "chat_template.jinja"
    if path.is_file():
        templates["default"] = path.read_text(encoding="utf-8")
    return templates
