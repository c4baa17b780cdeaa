"""A Hugging Face checkpoint directory, used where it is. Knows nothing of specs and targets."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from python_backend.errors import BuildError

_TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
_NEEDED = ("config.json", "tokenizer.json")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def checkpoint_files(directory: Path) -> list[Path]:
    """The files that make up the checkpoint; anything else in the directory is not ours.

    Raises:
        BuildError: config.json, tokenizer.json or the weights are missing.
    """
    for name in _NEEDED:
        if not (directory / name).is_file():
            raise BuildError(f"{directory}: {name} is missing; a Hugging Face checkpoint directory has one.")
    files = [directory / name for name in _TEXT_FILES if (directory / name).is_file()]
    return files + weight_files(directory)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, with the index first when it is sharded.

    Raises:
        BuildError: there are none, or the index names a file that is not there.
    """
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    index = directory / _INDEX
    if not index.is_file():
        raise BuildError(
            f"{directory}: neither {_SINGLE} nor {_INDEX} is there; convert other weight formats to safetensors first."
        )
    shards = sorted({directory / name for name in read_weight_map(index).values()})
    for shard in shards:
        if not shard.is_file():
            raise BuildError(f"{index}: the index names {shard.name}, which is missing; download it again.")
    return [index, *shards]


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name of a sharded checkpoint.

    Raises:
        BuildError: the index is not JSON, lacks weight_map, or points outside the directory.
    """
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        names = set(weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BuildError(f"{index}: not an index with a weight_map ({error}).") from error
    for name in names:
        if Path(name).name != name:
            raise BuildError(f"{index}: the index names {name}; weights must lie in the same directory.")
    return dict(weight_map)


def place_files(directory: Path, target: Path, *, copy: bool) -> None:
    """Put the checkpoint's files into `target`: links to where they are, or copies."""
    for file in checkpoint_files(directory):
        if copy:
            shutil.copyfile(file, target / file.name)
        else:
            (target / file.name).symlink_to(file.resolve())
