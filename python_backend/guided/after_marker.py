"""A guide that begins behind a marker: what a reasoning model writes before it is free.

Knows nothing of grammars.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from python_backend.guided.backend import Matcher


class AfterMarker:
    """Allows every token but an end id until the text holds the marker; the next token is the matcher's first.

    Args:
        matcher: at its beginning.
        marker: not empty.
        end_ids: tokens that would end the answer before the guide has begun.
        decode: text of token ids, special tokens included.
    """

    __slots__ = ("_decode", "_end_ids", "_marker", "_matcher", "_tail", "begun")

    def __init__(
        self, matcher: Matcher, marker: str, end_ids: Sequence[int], decode: Callable[[list[int]], str]
    ) -> None:
        self._matcher, self._marker, self._end_ids, self._decode = matcher, marker, tuple(end_ids), decode
        self.begun = False  # whether the text holds the marker
        self._tail: list[int] = []  # enough tokens to hold the marker: each has a byte of it at least

    def fork(self) -> AfterMarker:
        """An independent twin."""
        twin = AfterMarker(self._matcher.fork(), self._marker, self._end_ids, self._decode)
        twin.begun, twin._tail = self.begun, self._tail
        return twin

    def fill(self, bitmask: np.ndarray) -> None:
        """Write the allowed tokens, one bit each, into int32 [ceil(vocab / 32)]."""
        if self.begun:
            self._matcher.fill(bitmask)
            return
        bitmask.fill(-1)
        words = bitmask.view("uint32")
        for token_id in self._end_ids:
            words[token_id >> 5] &= 0xFFFFFFFF ^ (1 << (token_id & 31))

    def accept(self, token_id: int) -> None:
        """Take the token that was chosen."""
        if self.begun:
            self._matcher.accept(token_id)
            return
        self._tail = [*self._tail, token_id][-len(self._marker.encode()) :]
        self.begun = self._marker in self._decode(self._tail)

    def forced_tokens(self) -> list[int]:
        """Tokens that must come next; none before the guide has begun."""
        return self._matcher.forced_tokens() if self.begun else []

    @property
    def is_accepting(self) -> bool:
        """Whether the guide has begun and is satisfied."""
        return self.begun and self._matcher.is_accepting

    @property
    def finished(self) -> bool:
        """Whether the guide has begun and nothing can follow."""
        return self.begun and self._matcher.finished
