"""Tensors of a checkpoint in Hugging Face naming, plain or FP8 in ModelOpt's unified layout."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
from safetensors import safe_open

from python_backend.errors import BuildError

if TYPE_CHECKING:
    from pathlib import Path

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, slots=True)
class Weight:
    """One matrix [out, in]; `scale` [out, 1] multiplies `values` when those are FP8 or int8."""

    values: np.ndarray
    scale: np.ndarray | None = None
    input_scale: float | None = None  # FP8 step of the activations, amax / 448

    @classmethod
    def stack(cls, parts: list[Weight]) -> Weight:
        """Several matrices of the same input as one, [sum of out, in]."""
        if len(parts) == 1:
            return parts[0]
        if any(p.values.dtype != parts[0].values.dtype for p in parts):
            return cls(np.concatenate([p.float32() for p in parts]))
        scales = [p.scale for p in parts if p.scale is not None]
        steps = [p.input_scale for p in parts if p.input_scale is not None]
        return cls(
            np.concatenate([p.values for p in parts]),
            np.concatenate(scales) if scales else None,
            max(steps) if steps else None,
        )

    @property
    def is_fp8(self) -> bool:
        """Whether `values` are E4M3 codes."""
        return bool(self.values.dtype == FP8)

    def int8(self) -> Weight:
        """The matrix on a grid of 8 bits, one step per row: amax of the row / 127."""
        codes = np.empty(self.values.shape, np.int8)
        scale = np.empty((len(codes), 1), np.float32)
        for rows in _blocks(len(codes)):
            values = self._float32(rows)
            amax = np.maximum(values.max(1, keepdims=True), -values.min(1, keepdims=True))
            scale[rows] = np.maximum(amax, 1e-12) / 127
            values /= scale[rows]
            codes[rows] = np.rint(values, out=values)
        return Weight(codes, scale)

    def bfloat16(self) -> np.ndarray:
        """The matrix as it is meant, rounded to bfloat16 [out, in]."""
        if self.values.dtype == BF16:
            return self.values
        rounded = np.empty(self.values.shape, BF16)
        for rows in _blocks(len(rounded)):
            rounded[rows] = self._float32(rows)
        return rounded

    def float32(self) -> np.ndarray:
        """The matrix as it is meant, float32 [out, in]."""
        return self._float32(slice(None))

    def _float32(self, rows: slice) -> np.ndarray:
        values = self.values[rows].astype(np.float32)
        if self.scale is not None:
            values *= self.scale[rows]
        return values


def _blocks(rows: int, size: int = 256) -> list[slice]:
    """Rows by the block: what one pass over a block has written is still in the cache for the next one."""
    return [slice(start, start + size) for start in range(0, rows, size)]


class Weights:
    """Opens every safetensors file of a checkpoint directory and hands tensors out by name."""

    def __init__(self, checkpoint_dir: Path) -> None:
        files = sorted(checkpoint_dir.glob("*.safetensors"))
        if not files:
            raise BuildError(f"{checkpoint_dir}: no *.safetensors file; build the checkpoint first.")
        self._dir = checkpoint_dir
        self._files = [safe_open(str(f), "np") for f in files]
        self._where = {name: f for f in self._files for name in f.keys()}  # noqa: SIM118 - not a dict
        self._paths = {name: path for path, f in zip(files, self._files, strict=True) for name in f.keys()}  # noqa: SIM118

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def array(self, name: str) -> np.ndarray:
        """The stored array under its full name."""
        if name not in self._where:
            raise BuildError(f"{self._dir}: tensor {name} is missing.")
        if self._where[name].get_slice(name).get_dtype() == "F8_E4M3":
            return _read_fp8(self._paths[name], name)
        return np.asarray(self._where[name].get_tensor(name))

    def vector(self, name: str) -> np.ndarray:
        """A norm's weight or a bias, float32."""
        return self.array(name).astype(np.float32)

    def linear(self, name: str) -> Weight:
        """The matrix `<name>.weight` with its FP8 scales where it has them."""
        values = self.array(f"{name}.weight")
        if values.dtype != FP8:
            return Weight(values)
        scale = self.array(f"{name}.weight_scale").astype(np.float32).reshape(-1, 1)
        if scale.size not in (1, len(values)):
            raise BuildError(f"{self._dir}: {name}.weight_scale has {scale.size} values; allowed: 1 or {len(values)}.")
        scale = np.broadcast_to(scale, (len(values), 1))
        key = f"{name}.input_scale"
        input_scale = float(self.array(key).reshape(-1)[0]) if key in self else None
        return Weight(values, scale, input_scale)


def _read_fp8(path: Path, name: str) -> np.ndarray:
    # safetensors looks for the type in numpy, which has no 8-bit floats.
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(length))[name]
    start, end = entry["data_offsets"]
    raw = np.fromfile(path, np.uint8, end - start, offset=8 + length + start)
    return raw.view(FP8).reshape(entry["shape"])


class Int8Weights(Weights):
    """The same checkpoint with every matrix rounded to 8 bits per row, once."""

    def __init__(self, checkpoint_dir: Path) -> None:
        super().__init__(checkpoint_dir)
        self._rounded: dict[str, Weight] = {}

    def linear(self, name: str) -> Weight:
        """The rounded matrix."""
        if name not in self._rounded:
            self._rounded[name] = super().linear(name).int8()
        return self._rounded[name]
