"""Exact top-k and top-p selection and the draw from what is left, without sorting a vocabulary.

Works on padded rows: float32, a multiple of `GROUPS` long. Reshaped to [-1, GROUPS], the columns are groups whose
maxima or sums one vectorised pass finds; padding is -inf in logits and 0 in weights, so it is never chosen.
Knows nothing of requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

GROUPS = 512


class Candidates(NamedTuple):
    """Tokens that may be drawn, with their unnormalised probabilities."""

    token_ids: NDArray[np.int64]  # [n]
    weights: NDArray[np.float64]  # [n]


def padded_size(vocab_size: int) -> int:
    """The length of a padded row."""
    return -(-vocab_size // GROUPS) * GROUPS


def top_k_ids(logits: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Ids of the k largest values of a padded row, largest first; equal values by rising id.

    Values of -inf are never among them, so that fewer than k may come back.
    """
    if k < GROUPS:
        # k groups have a maximum of at least the k-th largest maximum: no smaller value can be among the k largest.
        maxima = logits.reshape(-1, GROUPS).max(axis=0)
        bound = np.partition(maxima, GROUPS - k)[GROUPS - k]
        ids = np.flatnonzero(logits >= bound) if bound > -np.inf else np.flatnonzero(logits > -np.inf)
    else:
        ids = np.flatnonzero(logits > -np.inf)
    if len(ids) > 4 * k:
        values = logits[ids]
        ids = ids[values >= np.partition(values, len(ids) - k)[len(ids) - k]]
    order: NDArray[np.int64] = np.argsort(-logits[ids], kind="stable")[:k]
    return ids[order]


def softmax_weights(logits: NDArray[np.float32], maximum: np.float32, out: NDArray[np.float32]) -> float:
    """Write exp(logits - maximum) of a padded row to `out`; returns the sum."""
    np.subtract(logits, maximum, out=out)
    np.exp(out, out=out)
    return float(_group_sums(out).sum())


def top_p_prefix(sorted_weights: NDArray[np.float64], top_p: float) -> int:
    """How many of the descending weights reach the share top_p of their sum; at least one."""
    cumulative = np.cumsum(sorted_weights)
    return min(int(np.searchsorted(cumulative, top_p * cumulative[-1])) + 1, len(sorted_weights))


def top_p_candidates(weights: NDArray[np.float32], total: float, top_p: float) -> Candidates:
    """The smallest set of most probable tokens that reaches the share top_p, equal weights by rising id.

    Args:
        weights: padded row of unnormalised probabilities.
        total: their sum.
        top_p: over 0, below 1.
    """
    # All weights below this bound together hold less than 1 - top_p (halved: room for rounding), so they are out.
    bound = np.float32((1 - top_p) * total * 0.5 / len(weights))
    token_ids = np.flatnonzero(weights > bound)
    kept = weights[token_ids]
    descending = np.sort(kept)[::-1]
    cumulative = np.cumsum(descending, dtype=np.float64)
    count = min(int(np.searchsorted(cumulative, top_p * total)) + 1, len(kept))
    last = descending[count - 1]
    chosen = kept > last
    ties = np.flatnonzero(kept == last)[: count - int(np.count_nonzero(chosen))]
    chosen[ties] = True
    return Candidates(token_ids[chosen], kept[chosen].astype(np.float64))


def draw(candidates: Candidates, uniform: float) -> int:
    """The token on which the number in [0, 1) falls."""
    return int(candidates.token_ids[_locate(candidates.weights, uniform)])


def draw_from_row(weights: NDArray[np.float32], uniform: float) -> int:
    """The same over a whole padded row: first the group, then the token within it."""
    cumulative = np.cumsum(_group_sums(weights), dtype=np.float64)
    target = uniform * cumulative[-1]
    group = _position(cumulative, target)
    before = cumulative[group - 1] if group else 0.0
    column = weights[group::GROUPS]
    inside = np.cumsum(column, dtype=np.float64)
    # The group's sum was rounded to float32: scale, so that the target cannot fall behind its last token.
    share = (target - before) / (cumulative[group] - before)
    return group + GROUPS * _position(inside, share * inside[-1])


def _locate(weights: NDArray[np.float64], uniform: float) -> int:
    cumulative = np.cumsum(weights)
    return _position(cumulative, uniform * cumulative[-1])


def _position(cumulative: NDArray[np.float64], target: float) -> int:
    """The first index whose cumulative weight exceeds the target, or the last index that adds any."""
    index = int(np.searchsorted(cumulative, target, side="right"))
    return index if index < len(cumulative) else int(np.searchsorted(cumulative, cumulative[-1]))


def _group_sums(weights: NDArray[np.float32]) -> NDArray[np.float32]:
    sums: NDArray[np.float32] = weights.reshape(-1, GROUPS).sum(axis=0)
    return sums
