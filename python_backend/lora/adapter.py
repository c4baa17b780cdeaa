"""One adapter in memory: a pair of small matrices for each linear it changes. Knows nothing of files or tensors."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping


# Far from what any type of a step overflows at: zero times a value has to be zero for the tokens beside it.
MAX_VALUE = 1e30


@dataclass(frozen=True, slots=True)
class LowRank:
    """The change of one linear: y += b @ (a @ x). Every scale is inside `b`."""

    a: np.ndarray  # float32 [rank, in]
    b: np.ndarray  # float32 [out, rank]

    def count_unusable(self) -> int:
        """Values that are NaN, infinite or over MAX_VALUE."""
        return sum(int(values.size - (np.abs(values) <= MAX_VALUE).sum()) for values in (self.a, self.b))


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """What the engine computes with. Two adapters with the same content have the same `version`."""

    task_id: int
    parts: Mapping[tuple[int, str], LowRank]  # (layer, projection such as self_attn.q_proj)
    rank: int = field(init=False)
    nbytes: int = field(init=False)
    version: int = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.blake2b(digest_size=8)
        for (layer, projection), part in sorted(self.parts.items(), key=lambda item: item[0]):
            digest.update(f"{layer}.{projection} {part.a.shape} {part.b.shape}".encode())
            digest.update(part.a.tobytes())
            digest.update(part.b.tobytes())
        object.__setattr__(self, "rank", max((len(part.a) for part in self.parts.values()), default=0))
        object.__setattr__(self, "nbytes", sum(part.a.nbytes + part.b.nbytes for part in self.parts.values()))
        object.__setattr__(self, "version", int.from_bytes(digest.digest(), "little"))

    def low_rank(self, layer: int, projection: str) -> tuple[np.ndarray, np.ndarray] | None:
        """(a [rank, in], b [out, rank]) of one linear; None when it is left as it is."""
        part = self.parts.get((layer, projection))
        return None if part is None else (part.a, part.b)

    @property
    def projections(self) -> tuple[str, ...]:
        """What it changes, in any layer."""
        return tuple(sorted({projection for _, projection in self.parts}))
