"""Where each token begins in the text of its sequence, in characters. Knows nothing of log-probabilities."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Protocol

from python_backend.text.detokenize import Detokenizer

if TYPE_CHECKING:
    from python_backend.logprobs.tokens import TokenTable


class Offsets(Protocol):
    """Counts along one growing sequence."""

    def place(self, token_id: int) -> int:
        """Take the next token; characters (code points) of the text before it.

        A token that goes on with a character has the offset of that character.
        """

    def end(self) -> int:
        """Characters of the text, if the tokens so far are all."""


def offsets_of(table: TokenTable, *, special: bool = False) -> Offsets:
    """For a new sequence; `special` counts special tokens as text, which an answer does not show."""
    if table.vocabulary.byte_level:
        return _ByteOffsets(table, special)
    return _TextOffsets(table, special)


class _ByteOffsets:
    """Byte-level vocabularies, where the text is what the bytes of all tokens decode to."""

    def __init__(self, table: TokenTable, special: bool) -> None:
        self._table = table
        self._hidden = frozenset() if special else table.vocabulary.special_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = False  # whether a character is not complete
        self._count = 0

    def place(self, token_id: int) -> int:
        if token_id in self._hidden:
            return self._count
        if not self._pending:
            length = self._table.whole_characters(token_id)
            if length >= 0:
                self._count += length
                return self._count - length
        raw = self._table.spelled(token_id) or b""
        if self._pending and raw and not 0x80 <= raw[0] <= 0xBF:
            self._count = self.end()  # what was pending never becomes a character
            self._decoder.reset()
        offset = self._count
        self._count += len(self._decoder.decode(raw))
        self._pending = bool(self._decoder.getstate()[0])
        return offset

    def end(self) -> int:
        pending, _ = self._decoder.getstate()
        return self._count + len(pending.decode("utf-8", "replace"))


class _TextOffsets:
    """Any other vocabulary, where what a token shows depends on what stands before it."""

    def __init__(self, table: TokenTable, special: bool) -> None:
        self._detokenizer = Detokenizer(table.tokenizer, skip_special_tokens=not special)
        self._count = 0

    def place(self, token_id: int) -> int:
        offset = self._count
        self._count += len(self._detokenizer.push([token_id]))
        return offset

    def end(self) -> int:
        return self._count + self._detokenizer.held
