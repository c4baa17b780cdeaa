"""Repetition, presence and frequency penalties of one sequence; the work grows with the distinct tokens seen only.

Knows nothing of sampling. As in TensorRT-LLM all three look at prompt and output together.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from python_backend.request import SamplingParams


class TokenPenalties:
    """Counts the tokens of one sequence and lowers their logits."""

    __slots__ = ("_additive", "_counts", "_frequency", "_ids", "_num_counted", "_presence", "_repetition", "_slots")

    _slots: dict[int, int]  # token id -> its place in the two arrays
    _ids: NDArray[np.int64]
    _counts: NDArray[np.float32]
    _num_counted: int

    def __init__(self, sampling: SamplingParams) -> None:
        self._repetition = np.float32(sampling.repetition_penalty)
        self._presence = np.float32(sampling.presence_penalty)
        self._frequency = np.float32(sampling.frequency_penalty)
        self._additive = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
        self._clear()

    @staticmethod
    def wanted(sampling: SamplingParams) -> bool:
        """Whether the request asks for any of the three."""
        return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0

    def copy(self) -> TokenPenalties:
        """An independent twin, for a beam that forks."""
        twin = object.__new__(TokenPenalties)
        for name in self.__slots__:
            setattr(twin, name, getattr(self, name))
        twin._slots, twin._ids, twin._counts = dict(self._slots), self._ids.copy(), self._counts.copy()
        return twin

    def apply(self, logits: NDArray[np.float32], token_ids: Sequence[int]) -> None:
        """Penalise in place every token of `token_ids` (prompt and output); logits float32 [vocab].

        Tokens outside the vocabulary (virtual tokens of a prompt table) are not counted.
        """
        self._count(token_ids, vocab_size=len(logits))
        size = len(self._slots)
        ids = self._ids[:size]
        values = logits[ids]
        if self._repetition != 1:
            values = np.where(values < 0, values * self._repetition, values / self._repetition)
        if self._additive:
            values -= self._presence + self._frequency * self._counts[:size]
        logits[ids] = values

    def _count(self, token_ids: Sequence[int], vocab_size: int) -> None:
        if len(token_ids) < self._num_counted:
            self._clear()
        for token_id, times in Counter(token_ids[self._num_counted :]).items():
            if 0 <= token_id < vocab_size:
                slot = self._slot(token_id)
                self._counts[slot] += times
        self._num_counted = len(token_ids)

    def _slot(self, token_id: int) -> int:
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token_id
        return slot

    def _clear(self) -> None:
        self._slots = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)
        self._num_counted = 0
