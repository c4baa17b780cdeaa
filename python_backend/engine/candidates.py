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
_WIDE = 4096  # groups of a first pass where rows are a multiple of it: long runs are faster than many short ones


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
    ids = _at_least_kth(logits, k) if k < GROUPS else np.flatnonzero(logits > -np.inf)
    if len(ids) > 4 * k:
        values = logits[ids]
        ids = ids[values >= np.partition(values, len(ids) - k)[len(ids) - k]]
    order: NDArray[np.int64] = np.argsort(-logits[ids], kind="stable")[:k]
    return ids[order]


def _at_least_kth(logits: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Ids, rising, of some values among which the k largest are; k < GROUPS.

    k groups have a maximum of at least the k-th largest maximum: no smaller value can be among the k largest.
    """
    width = _WIDE if len(logits) % _WIDE == 0 else GROUPS
    groups = logits.reshape(-1, width)
    maxima = np.maximum.reduce(groups, axis=0)
    coarse = np.maximum.reduce(maxima.reshape(-1, GROUPS), axis=0)
    bound = np.partition(coarse, GROUPS - k)[GROUPS - k]
    if bound == -np.inf:
        return np.flatnonzero(logits > -np.inf)
    columns = np.flatnonzero(maxima >= bound)
    if len(columns) * 8 > width:  # many equal values
        return np.flatnonzero(logits >= bound)
    rows, places = np.nonzero(groups[:, columns] >= bound)
    return rows * width + columns[places]


def softmax_weights(logits: NDArray[np.float32], maximum: np.float32, out: NDArray[np.float32]) -> NDArray[np.float32]:
    """Write exp(logits - maximum) of a padded row to `out`; returns the sums of its groups, float32 [GROUPS]."""
    np.subtract(logits, maximum, out=out)
    np.exp(out, out=out)
    sums: NDArray[np.float32] = np.add.reduce(out.reshape(-1, GROUPS), axis=0)
    return sums


def top_p_prefix(sorted_weights: NDArray[np.float64], top_p: float) -> int:
    """How many of the descending weights reach the share top_p of their sum; at least one."""
    cumulative = np.cumsum(sorted_weights)
    return min(int(cumulative.searchsorted(top_p * cumulative[-1])) + 1, len(sorted_weights))


def top_p_candidates(weights: NDArray[np.float32], total: float, top_p: float) -> Candidates:
    """The smallest set of most probable tokens that reaches the share top_p, equal weights by rising id.

    Args:
        weights: padded row of unnormalised probabilities.
        total: their sum.
        top_p: over 0, below 1.
    """
    token_ids, kept = _heaviest(weights, total, top_p)
    descending = np.sort(kept)[::-1]
    cumulative = np.cumsum(descending, dtype=np.float64)
    count = min(int(cumulative.searchsorted(top_p * total)) + 1, len(kept))
    last = descending[count - 1]
    chosen = np.flatnonzero(kept >= last)
    if len(chosen) > count:  # of those as heavy as the last one, the lowest ids
        ties = np.flatnonzero(kept == last)
        chosen = np.setdiff1d(chosen, ties[len(ties) - (len(chosen) - count) :], assume_unique=True)
    return Candidates(token_ids[chosen], kept[chosen].astype(np.float64))


def _heaviest(
    weights: NDArray[np.float32], total: float, top_p: float
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """All tokens over some weight, such that they hold the share top_p: few where the row has a peak."""
    rest = (1 - top_p) * total
    # All weights below the last bound together hold less than 1 - top_p (halved: room for rounding).
    last_bound = rest * 0.5 / len(weights)
    bound = max(rest * 1e-2, last_bound)
    while True:
        token_ids = np.flatnonzero(weights > np.float32(bound))
        kept = weights[token_ids]
        if bound == last_bound or kept.sum(dtype=np.float64) >= top_p * total:
            return token_ids, kept
        bound = max(bound * 0.1, last_bound)


def draw(candidates: Candidates, uniform: float) -> int:
    """The token on which the number in [0, 1) falls."""
    cumulative = np.cumsum(candidates.weights)
    return int(candidates.token_ids[_position(cumulative, uniform * float(cumulative[-1]))])


def draw_from_row(weights: NDArray[np.float32], group_sums: NDArray[np.float32], uniform: float) -> int:
    """The same over a whole padded row and the sums of its groups: first the group, then the token within it."""
    cumulative = np.cumsum(group_sums, dtype=np.float64)
    target = uniform * float(cumulative[-1])
    group = _position(cumulative, target)
    before = float(cumulative[group - 1]) if group else 0.0
    inside = np.cumsum(weights[group::GROUPS], dtype=np.float64)
    # The group's sum was rounded to float32: scale, so that the target cannot fall behind its last token.
    share = (target - before) / (float(cumulative[group]) - before)
    return group + GROUPS * _position(inside, share * float(inside[-1]))


def _position(cumulative: NDArray[np.float64], target: float) -> int:
    """The first index whose cumulative weight exceeds the target, or the last index that adds any."""
    index = int(cumulative.searchsorted(target, side="right"))
    return index if index < len(cumulative) else int(cumulative.searchsorted(cumulative[-1]))
