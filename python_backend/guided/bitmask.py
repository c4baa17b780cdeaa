"""Token masks: one bit for each token in int32 words, the first token in the lowest bit. Knows nothing of backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np


def set_bits(bitmask: np.ndarray, token_ids: Iterable[int], value: bool) -> None:
    """Allow these tokens or forbid them, in int32 [ceil(vocab / 32)]."""
    words = bitmask.view("uint32")
    for token_id in token_ids:
        bit = 1 << (token_id & 31)
        word = int(words[token_id >> 5])
        words[token_id >> 5] = word | bit if value else word & ~bit
