"""What is told of a token's log-probability. Knows nothing of requests or of how tokens are chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from python_backend.engine.batch_scorer import RowScore


class TokenLogProbs(NamedTuple):
    """One token's natural log-probability, and those of the most probable tokens at its place, most probable first."""

    log_prob: float
    token_ids: list[int]  # [n], or fewer where fewer have a probability over 0
    log_probs: list[float]  # as many
    masked: float | None = None  # probability of all that a mask forbade there, of the raw distribution; None: no mask


def log_probs_at(
    row: NDArray[np.float32], score: RowScore, token_id: int, n: int, masked: float | None = None
) -> TokenLogProbs:
    """Of a token and of the n most probable ones of a row, whose score holds at least so many."""
    log_prob = float(row[token_id]) - score.normalizer
    return TokenLogProbs(log_prob, score.token_ids[:n], score.log_probs[:n], masked)


def forbidden_share(row: NDArray[np.float32], normalizer: float, bitmask: NDArray[np.int32] | None) -> float:
    """Which part of the probability of a row a mask forbids, 0 to 1.

    Args:
        row: logits, float32 [vocab].
        normalizer: log(sum(exp(row))).
        bitmask: allowed tokens, int32 [ceil(vocab / 32)], or None where all are; those behind its end are not.
    """
    if bitmask is None:
        return 0.0
    bits = np.unpackbits(np.ascontiguousarray(bitmask).view(np.uint8), bitorder="little", count=len(row))
    allowed = np.flatnonzero(bits)
    if 2 * len(allowed) <= len(row):
        share = 1 - _share(row[allowed], normalizer)
    else:  # one minus nearly one would lose the small share
        share = _share(row[np.flatnonzero(bits == 0)], normalizer)
    return min(1.0, max(0.0, share))


def _share(logits: NDArray[np.float32], normalizer: float) -> float:
    return float(np.exp(logits - np.float32(normalizer)).sum(dtype=np.float64))
