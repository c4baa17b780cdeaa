"""Just enough of triton_python_backend_utils to import and call the models outside a stub process."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar

import numpy as np


@dataclass
class Tensor:
    tensor_name: str
    array: np.ndarray

    def name(self) -> str:
        return self.tensor_name

    def as_numpy(self) -> np.ndarray:
        return self.array


class TritonModelException(Exception):
    """As in Triton, the one exception of the two."""


class TritonError:
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


@dataclass
class InferenceResponse:
    output_tensors: list[Tensor] = field(default_factory=list)
    error: TritonError | None = None

    def __getitem__(self, name: str) -> np.ndarray:
        return next(t.array for t in self.output_tensors if t.tensor_name == name)

    def __contains__(self, name: str) -> bool:
        return any(t.tensor_name == name for t in self.output_tensors)


@dataclass
class InferenceRequest:
    tensors: dict[str, np.ndarray]
    outputs: list[str] = field(default_factory=list)
    id: str = ""

    def inputs(self) -> list[Tensor]:
        return [Tensor(name, array) for name, array in self.tensors.items()]

    def request_id(self) -> str:
        return self.id

    def requested_output_names(self) -> list[str]:
        return self.outputs


class Logger:
    lines: ClassVar[list[tuple[str, str]]] = []

    @classmethod
    def log_info(cls, text: str) -> None:
        cls.lines.append(("info", text))

    @classmethod
    def log_warn(cls, text: str) -> None:
        cls.lines.append(("warn", text))

    @classmethod
    def log_error(cls, text: str) -> None:
        cls.lines.append(("error", text))


def texts(*rows: Any) -> np.ndarray:
    """A BYTES tensor: one row per argument, a str, bytes or list of them."""
    listed = [row if isinstance(row, list) else [row] for row in rows]
    encoded = [[t.encode() if isinstance(t, str) else t for t in row] for row in listed]
    array = np.empty((len(encoded), len(encoded[0])), dtype=object)
    for i, row in enumerate(encoded):
        array[i, :] = row
    return array


def install() -> ModuleType:
    """Make `import triton_python_backend_utils` give this module, unless a real or fake one is there already."""
    this = sys.modules[__name__]
    return sys.modules.setdefault("triton_python_backend_utils", this)
