"""Where the matrices of the adapters in use lie: side by side in buffers that the graph reads, some rows for each.

An adapter is written once and stays until its rows are needed. Knows nothing of requests, names or files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import openvino as ov
from openvino import Type

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from python_backend.engine.protocols import AdapterWeights

MIN_ROWS = 16  # the number of rows doubles from here, so that kernels are made for a few shapes only


@dataclass(frozen=True, slots=True)
class Adaptable:
    """What adapters may change in a graph."""

    kind: Type  # of their matrices, as the graph reads them
    projections: tuple[str, ...]  # in every layer


@dataclass(frozen=True, slots=True)
class AdaptedLinears:
    """Linears of one layer with the same input, as far as adapters may change them."""

    layer: int
    projections: tuple[str, ...]
    size_in: int
    sizes_out: tuple[int, ...]

    @classmethod
    def of(cls, names: Sequence[str], size_in: int, sizes_out: Sequence[int]) -> AdaptedLinears:
        """From names such as model.layers.0.self_attn.q_proj."""
        cut = [name.split(".", 3) for name in names]
        return cls(int(cut[0][2]), tuple(parts[3] for parts in cut), size_in, tuple(sizes_out))


@dataclass(frozen=True, slots=True)
class _Slot:
    start: int
    end: int


class Unchanged:
    """An adapter that changes nothing, to warm up with."""

    version, rank = -1, 1

    def low_rank(self, layer: int, projection: str) -> None:
        """Nothing."""
        del layer, projection


class AdapterPool:
    """Buffers of `rows` rows for every linear, a row for each rank of an adapter, and who has which."""

    def __init__(self, linears: Mapping[str, AdaptedLinears], kind: Type, rows: int) -> None:
        """Memory is taken when rows are written."""
        self.rows = rows
        self._linears, self._kind = linears, kind
        self._slots: dict[int, _Slot] = {}
        dtype = np.dtype(ml_dtypes.bfloat16 if kind == Type.bf16 else np.float32)
        # A of linears with the same input lie below each other and are one product. B are products of their own, with
        # the rows last: what the CPU multiplies by is packed anew in each step, and this layout packs fastest.
        self._a: dict[str, np.ndarray] = {}
        self._b: dict[str, list[np.ndarray]] = {}
        for name, group in linears.items():
            self._a[name] = np.zeros((len(group.projections), rows, group.size_in), dtype)
            self._b[name] = [np.zeros((size_out, rows), dtype) for size_out in group.sizes_out]

    def holds(self, needed: Iterable[AdapterWeights]) -> bool:
        """Whether all of these are written."""
        return all(adapter.version in self._slots for adapter in needed)

    def place(self, needed: Sequence[AdapterWeights]) -> None:
        """Write those that are missing over those that are not needed; `rows` is at least the sum of their ranks."""
        for _ in range(2):
            if all(self._insert(adapter, needed) for adapter in needed):
                return
            self._slots.clear()  # there is room, in pieces: move all together
        raise AssertionError("adapters have more ranks than the pool has rows")

    def masks(self, counts: Iterable[tuple[int, AdapterWeights | None]]) -> dict[str, np.ndarray]:
        """`lora_mask.<n>`, bool [tokens, n * rows], of sequences given by their tokens in the step and adapter."""
        spans, total = [], 0
        for count, adapter in counts:
            if adapter is not None:
                spans.append((total, total + count, self._slots[adapter.version]))
            total += count
        mask = np.zeros((total, self.rows), bool)
        for begin, end, slot in spans:
            mask[begin:end, slot.start : slot.end] = True
        sizes = {len(group.projections) for group in self._linears.values()}
        return {f"lora_mask.{size}": np.tile(mask, size) for size in sizes}

    def tensors(self) -> dict[str, ov.Tensor]:
        """The graph's other inputs."""
        found = {}
        for name, linears in self._linears.items():
            found[f"lora_a.{name}"] = self._tensor(self._a[name].reshape(-1, linears.size_in))
            for projection, b in zip(linears.projections, self._b[name], strict=True):
                found[f"lora_b.{linears.layer}.{projection}"] = self._tensor(b)
        return found

    def _tensor(self, values: np.ndarray) -> ov.Tensor:
        raw = values.view(np.uint16) if self._kind == Type.bf16 else values
        return ov.Tensor(raw, ov.Shape(raw.shape), self._kind)

    def _insert(self, adapter: AdapterWeights, needed: Sequence[AdapterWeights]) -> bool:
        """Write one, unless it is here; False when no rows beside the others that are needed lie together."""
        if adapter.version in self._slots:
            return True
        keep = {other.version for other in needed}
        start = _gap(adapter.rank, list(self._slots.values()))
        if start + adapter.rank > self.rows:
            start = _gap(adapter.rank, [slot for version, slot in self._slots.items() if version in keep])
        slot = _Slot(start, start + adapter.rank)
        if slot.end > self.rows:
            return False
        for version, other in list(self._slots.items()):
            if other.start < slot.end and slot.start < other.end:
                del self._slots[version]
        self._slots[adapter.version] = slot
        for name in self._linears:
            self._write(name, adapter, slot)
        return True

    def _write(self, name: str, adapter: AdapterWeights, slot: _Slot) -> None:
        linears = self._linears[name]
        for projection, all_a, all_b in zip(linears.projections, self._a[name], self._b[name], strict=True):
            a, b = all_a[slot.start : slot.end], all_b[:, slot.start : slot.end]
            found = adapter.low_rank(linears.layer, projection)
            rank = 0 if found is None else len(found[0])
            a[rank:], b[:, rank:] = 0, 0
            if found is not None:
                a[:rank], b[:, :rank] = found


class AdapterRows:
    """Pools of 16, 32, 64 … rows: a step reads, and pays for, about as many as its adapters have ranks."""

    def __init__(self, linears: Mapping[str, AdaptedLinears], kind: Type) -> None:
        self._linears, self._kind = linears, kind
        self._pools: dict[int, AdapterPool] = {}
        self._last: AdapterPool | None = None

    def place(self, needed: Sequence[AdapterWeights]) -> AdapterPool:
        """The pool to read, with all of a step's adapters in it."""
        rows = _bucket(sum(adapter.rank for adapter in needed))
        if self._last is None or not rows <= self._last.rows <= 2 * rows or not self._last.holds(needed):
            self._last = self._pools.get(rows) or AdapterPool(self._linears, self._kind, rows)
            self._pools[rows] = self._last
            self._last.place(needed)
        return self._last


def _gap(width: int, taken: list[_Slot]) -> int:
    """The first place where `width` rows are free."""
    start = 0
    for slot in sorted(taken, key=lambda slot: slot.start):
        if slot.start - start >= width:
            break
        start = max(start, slot.end)
    return start


def _bucket(rows: int) -> int:
    size = MIN_ROWS
    while size < rows:
        size *= 2
    return size
