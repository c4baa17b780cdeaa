"""safetensors files, read lazily and written as a stream: one tensor in memory at a time.

The format is 8 bytes of header length, a JSON header, then the raw tensors. bfloat16 and float8 need no torch here.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from python_backend.errors import BuildError, EnvironmentFault

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
MAX_SHARD_BYTES = 5_000_000_000
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: where its bytes lie and how to read them."""

    name: str
    file: Path
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    size: int  # bytes

    def read(self) -> NDArray[Any]:
        """The tensor, mapped from the file (read only)."""
        if self.size == 0:
            return np.zeros(self.shape, DTYPES[self.dtype])
        raw = np.memmap(self.file, mode="r", offset=self.offset, shape=(self.size,), dtype=np.uint8)
        return raw.view(DTYPES[self.dtype]).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor to write: `make` is called when its turn comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], NDArray[Any]]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def read_entries(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one file, checked against the file's size; no weights are read.

    Raises:
        BuildError: not a safetensors file, truncated, or a tensor whose bytes do not fit its shape.
    """
    total = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if total < 8 or not 2 <= length <= min(total - 8, _MAX_HEADER_BYTES):
            raise BuildError(f"{file}: not a whole safetensors file ({total} bytes); copy it again.")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise BuildError(f"{file}: the safetensors header is not JSON ({error}); copy the file again.") from error
    header.pop("__metadata__", None)
    return {name: _entry(file, name, meta, 8 + length, total) for name, meta in header.items()}


def _entry(file: Path, name: str, meta: dict[str, Any], start: int, total: int) -> TensorEntry:
    dtype, shape = meta.get("dtype"), tuple(meta.get("shape", ()))
    begin, end = meta.get("data_offsets", (0, 0))
    if dtype not in DTYPES:
        raise BuildError(f"{file}: tensor {name} has data type {dtype}; readable: {', '.join(DTYPES)}.")
    if start + end > total:
        raise BuildError(
            f"{file}: tensor {name} ends at byte {start + end}, the file at {total}: it is truncated; copy it again."
        )
    if end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise BuildError(f"{file}: tensor {name} has {end - begin} bytes, which is not {dtype} {list(shape)}.")
    return TensorEntry(name, file, dtype, shape, start + begin, end - begin)


def write_checkpoint(
    directory: Path, plans: list[TensorPlan], advance: Callable[[int], None], shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write tensors as model.safetensors, or as numbered shards with their index; `advance` hears of bytes written.

    Raises:
        EnvironmentFault: the disk has no room for them.
    """
    needed, free = sum(plan.size for plan in plans), shutil.disk_usage(directory).free
    if needed > free:
        raise EnvironmentFault(f"{directory}: the weights need {needed:,} bytes, the disk has {free:,} free.")
    shards = list(_shards(plans, shard_bytes))
    if len(shards) == 1:
        write_file(directory / "model.safetensors", shards[0], advance)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(directory / name, shard, advance)
        weight_map |= {plan.name: name for plan in shard}
    index = {"metadata": {"total_size": sum(plan.size for plan in plans)}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _shards(plans: list[TensorPlan], shard_bytes: int) -> Iterator[list[TensorPlan]]:
    shard: list[TensorPlan] = []
    size = 0
    for plan in plans:
        if shard and size + plan.size > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(plan)
        size += plan.size
    yield shard


def write_file(path: Path, plans: list[TensorPlan], advance: Callable[[int], None]) -> None:
    """Write one file; `advance` hears of bytes written."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for plan in plans:
        header[plan.name] = {"dtype": plan.dtype, "shape": plan.shape, "data_offsets": [offset, offset + plan.size]}
        offset += plan.size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        for plan in plans:
            array = np.asarray(plan.make(), order="C")
            assert array.shape == plan.shape, f"{plan.name}: made {array.shape}, planned {plan.shape}"
            assert array.dtype == DTYPES[plan.dtype], f"{plan.name}: made {array.dtype}, planned {plan.dtype}"
            stream.write(array.reshape(-1).view(np.uint8).data)
            advance(plan.size)
