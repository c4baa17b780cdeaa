"""Matrices of a Hugging Face checkpoint, plain or FP8, cut and fused into those of TensorRT-LLM.

A fused FP8 matrix has one scale: the largest of its parts, which are rounded anew where theirs was smaller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from build_engines.quantize import to_e4m3
from build_engines.safetensors_file import DTYPES
from python_backend.errors import BuildError

if TYPE_CHECKING:
    from build_engines.checkpoint import Checkpoint
    from build_engines.safetensors_file import TensorEntry

Cut = Callable[[NDArray], NDArray]


@dataclass(frozen=True, slots=True)
class Linear:
    """One matrix [out, in] of the source; in FP8 its value is `weight * scale`."""

    weight: TensorEntry
    scale: float | None
    input_scale: float | None

    @classmethod
    def of(cls, source: Checkpoint, name: str) -> Linear:
        """The matrix of a linear layer, by its name without `.weight`.

        Raises:
            BuildError: it is missing, or FP8 without its scales.
        """
        weight = tensor(source, f"{name}.weight")
        if weight.dtype != "F8_E4M3":
            return cls(weight, None, None)
        return cls(weight, scalar(source, f"{name}.weight_scale"), scalar(source, f"{name}.input_scale"))


def tensor(source: Checkpoint, name: str) -> TensorEntry:
    """A tensor of the source.

    Raises:
        BuildError: it is not there.
    """
    entry = source.tensors.get(name)
    if entry is None:
        raise BuildError(f"{source.directory}: tensor {name} is missing.")
    return entry


def scalar(source: Checkpoint, name: str) -> float:
    """A scale of the source.

    Raises:
        BuildError: it is not there, no single number, or not over 0.
    """
    values = np.asarray(tensor(source, name).read(), np.float32).reshape(-1)
    if values.size != 1 or not np.isfinite(values[0]) or values[0] <= 0:
        raise BuildError(f"{source.directory}: {name} is {values.tolist()}; it must be one number over 0.")
    return float(values[0])


def fused(parts: list[tuple[Linear, Cut]]) -> NDArray[Any]:
    """The cut parts one after the other, as FP8 of `fused_scale` when they are FP8."""
    scale = fused_scale([linear for linear, _ in parts])
    return np.concatenate([_values(linear, cut, scale) for linear, cut in parts])


def cut_shape(entry: TensorEntry, cut: Cut) -> tuple[int, ...]:
    """The shape that a cut leaves of a tensor, without reading it."""
    return cut(np.broadcast_to(np.zeros((), DTYPES[entry.dtype]), entry.shape)).shape


def fused_shape(parts: list[tuple[Linear, Cut]]) -> tuple[int, ...]:
    """The shape of the cut parts one after the other, without reading them."""
    shapes = [cut_shape(linear.weight, cut) for linear, cut in parts]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def fused_scale(linears: list[Linear]) -> float | None:
    """The one scale of matrices that become one; None when they are not quantised.

    Raises:
        BuildError: some are FP8 and some are not.
    """
    scales = [linear.scale for linear in linears if linear.scale is not None]
    if not scales:
        return None
    if len(scales) != len(linears):
        names = ", ".join(linear.weight.name for linear in linears)
        raise BuildError(f"{linears[0].weight.file}: of {names}, some are FP8 and some are not; fused they must agree.")
    return max(scales)


def fused_input_scale(linears: list[Linear]) -> float:
    """The one activation scale of FP8 matrices that become one."""
    return max(linear.input_scale for linear in linears if linear.input_scale is not None)


def _values(linear: Linear, cut: Cut, scale: float | None) -> NDArray[Any]:
    values = cut(linear.weight.read())
    if linear.scale is None or scale is None or linear.scale == scale:
        return values
    return to_e4m3(values.astype(np.float32) * np.float32(linear.scale), scale)
