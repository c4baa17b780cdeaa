"""What each token of a vocabulary looks like in a list of log-probabilities: text, bytes, and the JSON of both.

Knows nothing of requests or of numbers.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from python_backend.text.vocabulary import SPACE, byte_alphabet

if TYPE_CHECKING:
    from python_backend.text.tokenizer import Tokenizer


class TokenTable:
    """Made on first use, token by token; one for all requests, and for any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = tokenizer.vocabulary
        self._alphabet = byte_alphabet() if self.vocabulary.byte_level else {}
        self._heads: dict[int, str] = {}
        self._lengths: dict[int, int] = {}

    def raw(self, token_id: int) -> bytes | None:
        """The bytes that the token stands for, out of context; None for special tokens and ids that mean nothing."""
        if token_id in self.vocabulary.special_ids:
            return None
        return self.spelled(token_id)

    def spelled(self, token_id: int) -> bytes | None:
        """The same, with special tokens spelled out."""
        vocabulary = self.vocabulary
        token = vocabulary.tokens[token_id] if 0 <= token_id < vocabulary.size else None
        if token is None:
            return None
        byte = vocabulary.byte_values.get(token_id)
        if byte is not None:
            return bytes([byte])
        if token_id in vocabulary.special_ids:
            return token.encode()
        if not vocabulary.byte_level:
            return token.replace(SPACE, " ").encode("utf-8", "replace")
        if self._alphabet.keys() >= set(token):
            return bytes(self._alphabet[char] for char in token)
        return token.encode("utf-8", "replace")  # added behind the model's own vocabulary, and so written as it is

    def text(self, token_id: int) -> str:
        """Readable text; bytes that are no characters by themselves as \\xe4 and so on."""
        return (self.spelled(token_id) or b"").decode("utf-8", "backslashreplace")

    def whole_characters(self, token_id: int) -> int:
        """How many characters the token is by itself, special ones spelled out; -1 when it holds a part of one."""
        length = self._lengths.get(token_id)
        if length is None:
            try:
                length = len((self.spelled(token_id) or b"").decode())
            except UnicodeDecodeError:
                length = -1
            self._lengths[token_id] = length
        return length

    def head(self, token_id: int) -> str:
        """JSON up to the place where the number of `logprob` belongs."""
        head = self._heads.get(token_id)
        if head is None:
            raw = self.raw(token_id)
            entry = {
                "token": self.text(token_id),
                "bytes": None if raw is None else list(raw),
                "id": token_id,
            }
            head = json.dumps(entry, separators=(",", ":"))[:-1] + ',"logprob":'
            self._heads[token_id] = head
        return head
