"""Where the matrices of the adapters in use lie: below each other in buffers that the graph reads, some rows for each.

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
class FusedLinear:
    """A product of the graph: linears of one layer with the same input."""

    layer: int
    projections: tuple[str, ...]
    size_in: int
    sizes_out: tuple[int, ...]

    @classmethod
    def of(cls, names: Sequence[str], size_in: int, sizes_out: Sequence[int]) -> FusedLinear:
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


class AdapterRows:
    """The buffers of every product, and who has which rows.

    Rows are counted in ranks. A product of n linears has n rows for each, those of an adapter side by side: rank rows
    of the first linear, then of the second.
    """

    def __init__(self, linears: Mapping[str, FusedLinear], kind: Type, max_rows: int) -> None:
        """Reserve address space for `max_rows`; memory is taken when rows are written."""
        self._linears, self._kind = linears, kind
        self._slots: dict[int, _Slot] = {}
        dtype = np.dtype(ml_dtypes.bfloat16 if kind == Type.bf16 else np.float32)
        capacity = _bucket(max_rows)
        self._a: dict[str, np.ndarray] = {}
        self._b: dict[str, np.ndarray] = {}
        for name, linear in linears.items():
            rows = capacity * len(linear.projections)
            self._a[name] = np.zeros((rows, linear.size_in), dtype)
            self._b[name] = np.zeros((rows, sum(linear.sizes_out)), dtype)

    def place(self, needed: Sequence[AdapterWeights]) -> int:
        """See to it that all of a step's adapters are in the buffers; returns how many ranks the step has to read."""
        keep = {adapter.version for adapter in needed}
        for adapter in needed:
            if adapter.version not in self._slots:
                self._insert(adapter, keep)
        tight = _bucket(sum(adapter.rank for adapter in needed))
        rows = self._rows(keep)
        if rows > 2 * tight:  # many have left: what remains would pay for their rows
            self._slots.clear()
            for adapter in needed:
                self._insert(adapter, keep)
            rows = self._rows(keep)
        return rows

    def masks(self, rows: int, counts: Iterable[tuple[int, AdapterWeights | None]]) -> dict[str, np.ndarray]:
        """`lora_mask.<n>`, bool [tokens, n * rows], of sequences given by their tokens in the step and adapter."""
        spans, total = [], 0
        for count, adapter in counts:
            if adapter is not None:
                spans.append((total, total + count, self._slots[adapter.version]))
            total += count
        found = {}
        for fused in {len(linear.projections) for linear in self._linears.values()}:
            mask = np.zeros((total, fused * rows), bool)
            for begin, end, slot in spans:
                mask[begin:end, fused * slot.start : fused * slot.end] = True
            found[f"lora_mask.{fused}"] = mask
        return found

    def tensors(self, rows: int) -> dict[str, ov.Tensor]:
        """The graph's other inputs, over the first `rows` ranks of the buffers."""
        found = {}
        for name, linear in self._linears.items():
            count = rows * len(linear.projections)
            found[f"lora_a.{name}"] = self._view(self._a[name][:count])
            found[f"lora_b.{name}"] = self._view(self._b[name][:count])
        return found

    def _view(self, values: np.ndarray) -> ov.Tensor:
        raw = values.view(np.uint16) if self._kind == Type.bf16 else values
        return ov.Tensor(raw, ov.Shape(raw.shape), self._kind)

    def _rows(self, versions: set[int]) -> int:
        return _bucket(max(self._slots[version].end for version in versions))

    def _insert(self, adapter: AdapterWeights, keep: set[int]) -> None:
        """Write into rows that nobody has, or that an adapter outside of `keep` has, whichever makes the step small."""
        rank, kept = adapter.rank, [slot for version, slot in self._slots.items() if version in keep]
        start, free = _gap(rank, kept), _gap(rank, list(self._slots.values()))
        if _bucket(free + rank) <= _bucket(max([start + rank, *(slot.end for slot in kept)])):
            start = free
        slot = _Slot(start, start + rank)
        for version, other in list(self._slots.items()):
            if other.start < slot.end and slot.start < other.end:
                del self._slots[version]
        self._slots[adapter.version] = slot
        for name in self._linears:
            self._write(name, adapter, slot)

    def _write(self, name: str, adapter: AdapterWeights, slot: _Slot) -> None:
        linear = self._linears[name]
        fused = len(linear.projections)
        a, b = (buffer[name][fused * slot.start : fused * slot.end] for buffer in (self._a, self._b))
        a[:], b[:] = 0, 0
        row = column = 0
        for projection, size_out in zip(linear.projections, linear.sizes_out, strict=True):
            found = adapter.low_rank(linear.layer, projection)
            if found is not None:
                rank = len(found[0])
                a[row : row + rank] = found[0]
                b[row : row + rank, column : column + size_out] = found[1].T
            row += adapter.rank
            column += size_out


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
