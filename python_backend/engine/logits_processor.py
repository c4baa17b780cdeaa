"""Everything that changes the logits of one sequence before a token is chosen.

The order is TensorRT-LLM's: embedding bias, temperature, penalties, then the bans (bad words, repeated n-grams,
end ids before min_tokens) and the mask. Knows nothing of how a token is then chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from python_backend.engine.bans import TokenBans
from python_backend.engine.penalties import TokenPenalties

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from python_backend.request import GenerationRequest

# For each byte of a bitmask, what to add to the eight logits it speaks of: branch-free, so that the pattern is no cost.
_ADDENDS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf
).astype(np.float32)


class LogitsProcessor:
    """What one request asks to be done to the logits of one of its sequences."""

    __slots__ = ("_bans", "_bias", "_end_ids", "_inverse_temperature", "_penalties")

    def __init__(self, request: GenerationRequest) -> None:
        sampling = request.sampling
        self._bias = (
            request.embedding_bias if request.embedding_bias is not None and len(request.embedding_bias) else None
        )
        temperature = sampling.temperature
        # Temperature 0 means greedy and would only blow the logits up.
        self._inverse_temperature = np.float32(1.0 if not temperature else 1.0 / max(temperature, 1e-6))
        self._penalties = TokenPenalties(sampling) if TokenPenalties.wanted(sampling) else None
        self._bans = TokenBans(request) if TokenBans.wanted(request) else None
        self._end_ids = request.end_ids

    @property
    def keeps_order(self) -> bool:
        """Whether the most probable token that is not banned stays the most probable one."""
        return self._bias is None and self._penalties is None

    @property
    def idle(self) -> bool:
        """Whether the most probable token stays the most probable one, whatever came before."""
        return self.keeps_order and self._bans is None

    @property
    def neutral(self) -> bool:
        """Whether logits come out as they went in, but for a mask."""
        return self.idle and self._inverse_temperature == 1

    def copy(self) -> LogitsProcessor:
        """An independent twin, for a beam that forks."""
        twin = object.__new__(LogitsProcessor)
        for name in self.__slots__:
            setattr(twin, name, getattr(self, name))
        twin._penalties = None if self._penalties is None else self._penalties.copy()
        twin._bans = None if self._bans is None else self._bans.copy()
        return twin

    def allows(self, token_id: int, token_ids: Sequence[int], bitmask: NDArray[np.int32] | None) -> bool:
        """Whether neither the mask nor a ban forbids that `token_id` follows `token_ids`."""
        if bitmask is not None:
            word = token_id >> 5
            if word >= len(bitmask) or not int(bitmask[word]) >> (token_id & 31) & 1:
                return False
        return self._bans is None or token_id not in self._bans.next_banned(token_ids)

    def apply(
        self,
        row: NDArray[np.float32],
        token_ids: Sequence[int],
        bitmask: NDArray[np.int32] | None,
        out: NDArray[np.float32],
    ) -> None:
        """Write the processed logits of `row` to `out`.

        Args:
            row: raw logits, float32 [vocab]; left as they are.
            token_ids: prompt and output so far.
            bitmask: allowed tokens, int32 [ceil(vocab / 32)], or None. Tokens behind its end are forbidden.
            out: float32 [vocab]; what is forbidden becomes -inf.
        """
        if self._bias is not None:
            size = min(len(self._bias), len(out))
            np.add(row[:size], self._bias[:size], out=out[:size])
            out[size:] = row[size:]
            row = out
        np.multiply(row, self._inverse_temperature, out=out)
        if self._penalties is not None:
            self._penalties.apply(out, token_ids)
        if bitmask is not None:
            _apply_bitmask(out, bitmask)
        if self._bans is not None:
            self._apply_bans(out, token_ids, bitmask)

    def _apply_bans(
        self, out: NDArray[np.float32], token_ids: Sequence[int], bitmask: NDArray[np.int32] | None
    ) -> None:
        assert self._bans is not None
        before = {token_id: out[token_id] for token_id in self._end_ids if token_id < len(out)}
        banned = [token_id for token_id in self._bans.next_banned(token_ids) if 0 <= token_id < len(out)]
        out[banned] = -np.inf
        if bitmask is not None and self._bans.ends_banned(token_ids) and out.max() == -np.inf:
            # A finished structure allows nothing but its end: it outranks min_tokens.
            for token_id, value in before.items():
                out[token_id] = value


def _apply_bitmask(logits: NDArray[np.float32], bitmask: NDArray[np.int32]) -> None:
    addends = _ADDENDS.take(np.ascontiguousarray(bitmask).view(np.uint8), axis=0).reshape(-1)
    size = min(len(addends), len(logits))
    logits[:size] += addends[:size]
    logits[size:] = -np.inf
