"""Normalizers and most probable tokens of many rows of logits at once.

The large passes go row by row, while a row is in the core's cache, the small steps behind them for all rows together.
Knows nothing of requests.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from python_backend.engine.candidates import padded_size, top_k_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_WIDE = 4096  # columns of a row folded into that many maxima
_NARROW = 512  # the same for the sums
_COARSE = 256  # maxima that the bound of the largest values is looked for among
_SAFE = 60.0  # exp of so large a logit, summed over a vocabulary, is far from the ends of float32


class RowScore(NamedTuple):
    """What one row says; `token_ids` has at least one entry, the first is the most probable token."""

    maximum: float  # NaN or infinite where the row is not sound; then the rest means nothing
    normalizer: float  # log(sum(exp(logits)))
    token_ids: list[int]  # most probable first, equal ones by rising id
    log_probs: list[float]


class BatchScorer:
    """Owns its memory. Not for more than one thread at a time."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._width = _WIDE if vocab_size >= 2 * _WIDE else vocab_size
        self._weights = np.zeros(padded_size(vocab_size), np.float32)

    def score(self, rows: Sequence[NDArray[np.float32]], n: int) -> list[RowScore]:
        """Score rows, float32 [vocab] each and contiguous, with their n most probable tokens, at least one."""
        if not rows:
            return []
        with np.errstate(all="ignore"):  # a row may hold anything; its maximum tells
            return self._score(rows, min(n, self._vocab_size)) if n > 1 else [self._best(row) for row in rows]

    def _score(self, rows: Sequence[NDArray[np.float32]], n: int) -> list[RowScore]:
        maxima, normalizers = self._passes(rows)
        coarse = maxima.reshape(len(rows), -1, _COARSE).max(axis=1) if self._width == _WIDE else maxima
        maximum = coarse.max(axis=1)
        found = None
        if 2 * n <= coarse.shape[1] and np.isfinite(maximum).all():
            bounds = np.partition(coarse, -n, axis=1)[:, -n]
            if np.isfinite(bounds).all():  # else fewer than n tokens may be possible
                found = self._top(rows, maxima, bounds, n)
        if found is None:
            alone = zip(rows, maximum.tolist(), normalizers, strict=True)
            return [self._alone(row, highest, normalizer, n) for row, highest, normalizer in alone]
        token_ids, logits = found
        log_probs = logits.astype(np.float64) - np.array(normalizers)[:, None]
        columns = (maximum.tolist(), normalizers, token_ids.tolist(), log_probs.tolist())
        return [RowScore(*of_row) for of_row in zip(*columns, strict=True)]

    def _best(self, row: NDArray[np.float32]) -> RowScore:
        best = int(row.argmax())
        maximum, normalizer = float(row[best]), self._normalizer(row, row[best])
        return RowScore(maximum, normalizer, [best], [maximum - normalizer])

    def _passes(self, rows: Sequence[NDArray[np.float32]]) -> tuple[NDArray[np.float32], list[float]]:
        """Maxima of the columns of each folded row [n, width], and the normalizers."""
        size, width = self._vocab_size, self._width
        whole = size // width * width
        maxima = np.empty((len(rows), width), np.float32)
        normalizers = []
        for row, row_maxima in zip(rows, maxima, strict=True):
            np.maximum.reduce(row[:whole].reshape(-1, width), axis=0, out=row_maxima)
            if whole < size:
                rest = row_maxima[: size - whole]
                np.maximum(rest, row[whole:], out=rest)
            normalizers.append(self._normalizer(row, row_maxima.max()))
        return maxima, normalizers

    def _normalizer(self, row: NDArray[np.float32], maximum: np.float32) -> float:
        weights, shift = self._weights[: self._vocab_size], 0.0
        if abs(maximum) < _SAFE:
            np.exp(row, out=weights)
        else:
            shift = float(maximum)
            np.subtract(row, maximum, out=weights)
            np.exp(weights, out=weights)
        parts = np.add.reduce(self._weights.reshape(-1, _NARROW), axis=0)
        return shift + math.log(parts.sum(dtype=np.float64))

    def _top(
        self, rows: Sequence[NDArray[np.float32]], maxima: NDArray[np.float32], bounds: NDArray[np.float32], n: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
        """Ids and logits [rows, n] of the largest values; None when so many are equal that another way is faster.

        n columns have a maximum of at least a row's bound: no smaller value can be among its n largest.
        """
        of_row, columns = np.divmod(np.flatnonzero(maxima >= bounds[:, None]), self._width)
        if len(columns) > 16 * n * len(rows):
            return None
        ids = np.arange(0, self._vocab_size, self._width)[:, None] + columns
        inside = ids < self._vocab_size
        if not inside.all():
            ids = np.where(inside, ids, 0)
        starts = np.searchsorted(of_row, np.arange(len(rows) + 1))
        values = np.empty(ids.shape, np.float32)
        for row, start, end in zip(rows, starts[:-1], starts[1:], strict=True):
            values[:, start:end] = row[ids[:, start:end]]
        kept = (values >= bounds[of_row]) & inside
        of_row, ids, values = np.broadcast_to(of_row, ids.shape)[kept], ids[kept], values[kept]
        order = np.lexsort((ids, -values, of_row))
        firsts = np.searchsorted(of_row[order], np.arange(len(rows)))
        taken = order[firsts[:, None] + np.arange(n)]
        return ids[taken], values[taken]

    def _alone(self, row: NDArray[np.float32], maximum: float, normalizer: float, n: int) -> RowScore:
        """The plain way, for rows where most values are equal or most tokens are asked for."""
        if not np.isfinite(maximum):
            return RowScore(maximum, normalizer, [0], [0.0])
        logits = np.full(len(self._weights), -np.inf, np.float32)
        logits[: self._vocab_size] = row
        token_ids = top_k_ids(logits, n)
        log_probs = logits[token_ids].astype(np.float64) - normalizer
        return RowScore(maximum, normalizer, token_ids.tolist(), log_probs.tolist())
