"""Log-probabilities of the raw model distribution. Knows nothing of requests or of how tokens are chosen."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from python_backend.engine.candidates import softmax_weights, top_k_ids

if TYPE_CHECKING:
    from numpy.typing import NDArray


class TopLogProbs(NamedTuple):
    """The most probable tokens at one position, most probable first."""

    token_ids: NDArray[np.int32]  # [n]
    log_probs: NDArray[np.float32]  # [n], natural logarithm


def log_sum_exp(logits: NDArray[np.float32], maximum: np.float32, scratch: NDArray[np.float32]) -> float:
    """log(sum(exp(logits))) of a padded row; `scratch` is overwritten."""
    return float(maximum) + math.log(softmax_weights(logits, maximum, out=scratch).sum())


def top_log_probs(logits: NDArray[np.float32], normalizer: float, n: int) -> TopLogProbs:
    """The n most probable tokens of a padded row whose log_sum_exp is `normalizer`."""
    if n == 0:
        return TopLogProbs(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32))
    token_ids = top_k_ids(logits, n)
    return TopLogProbs(token_ids.astype(np.int32), (logits[token_ids] - normalizer).astype(np.float32))
