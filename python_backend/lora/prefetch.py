"""Reads lora_prefetch_dir as upstream lays it out: <task id>/model.lora_weights.npy and model.lora_config.npy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from python_backend.errors import BuildError, StackError
from python_backend.lora.rows import from_rows

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from python_backend.lora.adapter import Adapter
    from python_backend.lora.modules import BaseModel

_WEIGHTS, _CONFIGS = "model.lora_weights.npy", ("model.lora_config.npy", "model.lora_keys.npy")


def read_prefetched(directory: Path, base: BaseModel) -> Iterator[Adapter]:
    """Every adapter of the directory, by ascending task id.

    Raises:
        BuildError: names the folder or file and what is wrong with it.
    """
    if not directory.is_dir():
        raise BuildError(f"lora_prefetch_dir is {directory}, which is no directory. Correct it in config.pbtxt.")
    for place in sorted(directory.iterdir(), key=lambda place: (len(place.name), place.name)):
        if not (place.name.isascii() and place.name.isdigit()):
            raise BuildError(f"{place}: folders of lora_prefetch_dir are named by a task id, in digits. Rename it.")
        names = [name for name in _CONFIGS if (place / name).is_file()] or _CONFIGS[:1]
        weights, config = _load(place / _WEIGHTS), _load(place / names[0])
        try:
            yield from_rows(_rows(weights), _rows(config), base, int(place.name))
        except StackError as error:
            raise BuildError(f"{place}: {error}") from error


def _load(path: Path) -> np.ndarray:
    try:
        array: np.ndarray = np.load(path)
    except (OSError, ValueError, EOFError) as error:
        raise BuildError(f"{path}: cannot be read ({error}); convert the adapter again.") from error
    if array.dtype == np.dtype("V2"):  # numpy's name for bfloat16, which it does not know
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array


def _rows(array: np.ndarray) -> np.ndarray:
    """Without the batch dimension that converters write."""
    return array[0] if array.ndim == 3 and len(array) == 1 else array
