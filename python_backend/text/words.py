"""Stop and bad words: texts to token ids, and token ids to and from the int32 layout [2, N] of the contract.

Row 0 holds the ids of all words one after another, padded with 0; row 1 the end offset of each word, padded with -1.
Knows nothing of Triton or of how words are matched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from python_backend.errors import InvalidRequest, LimitExceeded
from python_backend.text.tokenizer import check_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from python_backend.text.tokenizer import Tokenizer

MAX_WORDS = 256
MAX_WORD_CHARACTERS = 4096

WordIds = tuple[int, ...]


def clean_words(words: str | Iterable[str], name: str) -> list[str]:
    """The words to look for: one text or several; empty ones ask for nothing and are dropped, repeated ones merged.

    Raises:
        LimitExceeded: more than MAX_WORDS words, or one longer than MAX_WORD_CHARACTERS.
        InvalidRequest: a word has lone surrogates.
    """
    kept = [word for word in dict.fromkeys([words] if isinstance(words, str) else words) if word]
    if len(kept) > MAX_WORDS:
        raise LimitExceeded(f"{name} has {len(kept)} words; at most {MAX_WORDS} are allowed.")
    for word in kept:
        if len(word) > MAX_WORD_CHARACTERS:
            raise LimitExceeded(
                f"{name} has a word of {len(word)} characters; at most {MAX_WORD_CHARACTERS} are allowed."
            )
        check_text(word, name)
    return kept


def stop_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[list[WordIds], list[str]]:
    """The ids of each stop word as it stands, never with a BOS, and warnings about words the vocabulary cannot write.

    Those are left out here; they still stop an answer where text is matched.
    """
    return _encode(tokenizer, words, "stop_words", "it can stop an answer by text only")


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[list[WordIds], list[str]]:
    """The ids of each bad word, both at the start of a text and behind a space, and warnings as `stop_word_ids`."""
    forms = [form for word in words for form in (word, " " + word.lstrip(" "))]
    ids, warnings = _encode(tokenizer, forms, "bad_words", "it is not banned")
    return list(dict.fromkeys(ids)), warnings


def _encode(tokenizer: Tokenizer, words: Sequence[str], name: str, effect: str) -> tuple[list[WordIds], list[str]]:
    found: list[WordIds] = []
    warnings: list[str] = []
    if not words:
        return found, warnings
    for word, ids in zip(words, tokenizer.encode_batch(words, add_special_tokens=False), strict=True):
        if not ids or (tokenizer.unk_id is not None and tokenizer.unk_id in ids):
            warnings.append(f"{name}: the vocabulary has no tokens for {word[:80]!r}; {effect}.")
        else:
            found.append(tuple(ids))
    return found, warnings


def pack_words(batch: Sequence[Sequence[Sequence[int]]]) -> npt.NDArray[np.int32]:
    """Word ids of each batch element as int32 [B, 2, N]; [B, 2, 0] when there is no word at all."""
    if not any(len(words) for words in batch):
        return np.zeros((len(batch), 2, 0), np.int32)
    width = max(1, *(max(sum(map(len, words)), len(words)) for words in batch))
    packed = np.zeros((len(batch), 2, width), np.int32)
    packed[:, 1, :] = -1
    for row, words in zip(packed, batch, strict=True):
        flat = [token_id for word in words for token_id in word]
        row[0, : len(flat)] = flat
        row[1, : len(words)] = np.cumsum([len(word) for word in words], dtype=np.int32)
    return packed


def unpack_words(packed: npt.NDArray[np.int32], name: str) -> list[WordIds]:
    """The words of one batch element, from int32 [2, N].

    Raises:
        InvalidRequest: the shape or the offsets are not those of the layout; the text begins as upstream's does.
    """
    if packed.ndim != 2 or packed.shape[0] != 2:
        shape = list(packed.shape)
        raise InvalidRequest(f"Invalid format for word list. {name} has shape {shape}; a word list is [2, N].")
    ids, offsets = packed[0].tolist(), packed[1].tolist()
    if -1 in offsets:
        used = offsets.index(-1)
        if any(offset != -1 for offset in offsets[used:]):
            raise InvalidRequest(f"Sparse list must not have additional -1s: {name} has offsets {offsets[:64]}.")
        offsets = offsets[:used]
    words: list[WordIds] = []
    start = 0
    for end in offsets:
        if not 0 <= end <= len(ids):
            raise InvalidRequest(f"Sparse list must not have out-of-bound offsets: {name} has {end}, N is {len(ids)}.")
        if end < start:
            raise InvalidRequest(f"Sparse list must not have non-increasing offsets: {name} has {end} after {start}.")
        if end > start:  # upstream packs an empty word as an offset that does not advance
            words.append(tuple(ids[start:end]))
        start = end
    return words
