"""Incremental detokenization: the text that new tokens add, at constant cost, so that the pieces join to the whole.

The pieces are cut by decoding a few tokens twice, with and without the new ones. Knows nothing of requests or Triton.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from python_backend.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# A character has at most four bytes, so four tokens settle its start; the rest is room for special tokens,
# which show no text and so hide whether a space is due.
MAX_CONTEXT_TOKENS = 64


def context_start(tokenizer: Tokenizer, ids: Sequence[int], sent: int) -> int:
    """Where the context of the next piece begins in `ids`, of which the first `sent` were sent already.

    The context is `ids[context_start(…):sent]`: the shortest that begins with a token which shows text from a character
    boundary on. Everything before it cannot change what follows it. 0 <= result <= sent.
    """
    starts_clean = tokenizer.vocabulary.starts_clean
    size = len(starts_clean)
    floor = max(0, sent - MAX_CONTEXT_TOKENS)
    for index in range(sent - 1, floor - 1, -1):
        token_id = ids[index]
        if 0 <= token_id < size and starts_clean[token_id]:
            return index
    return floor


def decode_delta(
    tokenizer: Tokenizer,
    context: Sequence[int],
    new: Sequence[int],
    final: bool,
    skip_special_tokens: bool = True,
) -> str:
    """The text that `new` adds behind `context`; a character that is not whole yet is held back unless `final`."""
    if not context:
        text = tokenizer.decode(new, skip_special_tokens)
        return text if final else settled(text)
    before = settled(tokenizer.decode(context, skip_special_tokens))
    text = tokenizer.decode([*context, *new], skip_special_tokens)
    return (text if final else settled(text))[len(before) :]


def settled(text: str) -> str:
    """The text without an incomplete character at its end, which decodes to exactly one U+FFFD."""
    return text[:-1] if text.endswith(_REPLACEMENT) else text


class Detokenizer:
    """The text of one growing sequence, for who keeps state anyway."""

    __slots__ = ("_before", "_context", "_skip_special_tokens", "_tokenizer", "held")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []
        self._before = ""
        self.held = 0  # characters (0 or 1) that the tokens so far would show besides, if they were the last

    def push(self, ids: Sequence[int], final: bool = False) -> str:
        """Take the next tokens and return the text they add."""
        decode = self._tokenizer.decode
        tokens = [*self._context, *ids]
        whole = decode(tokens, self._skip_special_tokens)
        text = settled(whole)
        self.held = len(whole) - len(text)
        delta = (whole if final else text)[len(self._before) :]
        start = context_start(self._tokenizer, tokens, len(tokens))
        self._context = tokens[start:]
        self._before = text if start == 0 else settled(decode(self._context, self._skip_special_tokens))
        return delta


class DetokenizerTable:
    """Detokenizers by stream, for a backend that cannot send the context along. Memory is bounded."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, max_streams: int = 4096, max_idle_s: float = 120.0
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._max_streams = max_streams
        self._max_idle_s = max_idle_s
        self._streams: OrderedDict[Hashable, tuple[Detokenizer, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._streams)

    def push(self, stream: Hashable, ids: Sequence[int], final: bool = False) -> str:
        """The text that these tokens add to a stream; a stream ends when `final`, or when nothing comes for long."""
        now = time.monotonic()
        self._drop_idle(now)
        entry = self._streams.pop(stream, None)
        detokenizer = entry[0] if entry else Detokenizer(self._tokenizer, self._skip_special_tokens)
        text = detokenizer.push(ids, final)
        if not final:
            self._streams[stream] = (detokenizer, now)
            if len(self._streams) > self._max_streams:
                self._streams.popitem(last=False)
        return text

    def _drop_idle(self, now: float) -> None:
        while self._streams:
            stream, (_, last_used) = next(iter(self._streams.items()))
            if now - last_used <= self._max_idle_s:
                return
            del self._streams[stream]
