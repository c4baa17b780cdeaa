"""Log-probabilities of one row of logits. Knows nothing of requests or of how tokens are chosen."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from python_backend.engine.candidates import GROUPS, top_k_ids

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SAFE = 60.0  # exp of so large a logit, summed over a vocabulary, is far from the ends of float32


class TokenLogProbs(NamedTuple):
    """One token's natural log-probability, and those of the most probable tokens at its place, most probable first."""

    log_prob: float
    token_ids: list[int]  # [n]
    log_probs: list[float]  # [n]
    masked: float | None = None  # probability of all that a mask forbade there, of the raw distribution; None: no mask


class RowScorer:
    """Works on padded rows (see `candidates`) with memory of its own. Not for more than one thread at a time."""

    def __init__(self, vocab_size: int, padded_size: int) -> None:
        self._vocab_size = vocab_size
        self._padded = np.full(padded_size, -np.inf, dtype=np.float32)
        self._weights = np.zeros(padded_size, dtype=np.float32)
        self._sum = 0.0

    def padded(self, row: NDArray[np.float32]) -> NDArray[np.float32]:
        """The row, or a padded copy that lasts until the next call."""
        if len(row) == len(self._padded):
            return row
        self._padded[: self._vocab_size] = row
        return self._padded

    def normalizer(self, logits: NDArray[np.float32], maximum: np.float32) -> float:
        """log(sum(exp(logits))) of a padded row whose largest value is `maximum`."""
        weights, shift = self._weights, 0.0
        if abs(maximum) < _SAFE:
            np.exp(logits, out=weights)
        else:
            shift = float(maximum)
            np.subtract(logits, maximum, out=weights)
            np.exp(weights, out=weights)
        self._sum = float(np.add.reduce(weights.reshape(-1, GROUPS), axis=0).sum())
        return shift + math.log(self._sum)

    def forbidden_share(self, bitmask: NDArray[np.int32] | None) -> float:
        """Which part of the probability of the row that `normalizer` saw last a mask forbids; 0 to 1.

        Args:
            bitmask: allowed tokens, int32 [ceil(vocab / 32)], or None where all are; those behind its end are not.
        """
        if bitmask is None:
            return 0.0
        bits = np.unpackbits(np.ascontiguousarray(bitmask).view(np.uint8), bitorder="little", count=self._vocab_size)
        allowed = np.flatnonzero(bits)
        if 2 * len(allowed) <= self._vocab_size:
            share = 1 - float(self._weights[allowed].sum(dtype=np.float64)) / self._sum
        else:  # one minus nearly one would lose the small share
            share = float(self._weights[np.flatnonzero(bits == 0)].sum(dtype=np.float64)) / self._sum
        return min(1.0, max(0.0, share))


def log_probs_at(
    logits: NDArray[np.float32], normalizer: float, token_id: int, n: int, masked: float | None = None
) -> TokenLogProbs:
    """Of a token and of the n most probable ones of a padded row whose `RowScorer.normalizer` is given.

    Fewer than n come back where fewer have a probability over 0.
    """
    log_prob = float(logits[token_id]) - normalizer
    if n == 0:
        return TokenLogProbs(log_prob, [], [], masked)
    token_ids = top_k_ids(logits, n)
    return TokenLogProbs(
        log_prob, token_ids.tolist(), (logits[token_ids].astype(np.float64) - normalizer).tolist(), masked
    )
