"""Log-probabilities from logits, for engines that give no more than those. Knows nothing of requests."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class DerivedScores(NamedTuple):
    """What one row of logits says of the token that follows; see content.Scores."""

    log_prob: float
    token_ids: list[int]
    log_probs: list[float]
    masked: float | None = None  # a mask is not to be seen in logits


def derive_scores(logits: NDArray[np.floating], token_ids: Sequence[int], n: int) -> list[DerivedScores]:
    """For each token, with its n most probable alternatives.

    Args:
        logits: [tokens, vocab], any float type.
        token_ids: the tokens that were chosen.
        n: at least 0.
    """
    return [_derive(row.astype(np.float32), token_id, n) for row, token_id in zip(logits, token_ids, strict=True)]


def _derive(row: NDArray[np.float32], token_id: int, n: int) -> DerivedScores:
    maximum = row.max()
    normalizer = float(maximum) + math.log(np.exp(row - maximum).sum(dtype=np.float64))
    log_prob = float(row[token_id]) - normalizer
    if n == 0:
        return DerivedScores(log_prob, [], [])
    bound = np.partition(row, -n)[-n] if n < len(row) else -np.inf
    ids = np.flatnonzero((row >= bound) & (row > -np.inf))
    ids = ids[np.argsort(-row[ids], kind="stable")[:n]]
    return DerivedScores(log_prob, ids.tolist(), (row[ids].astype(np.float64) - normalizer).tolist())
