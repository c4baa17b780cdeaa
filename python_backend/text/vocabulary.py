"""What the vocabulary says about each token id, as tables that the streaming path can index.

Knows nothing of requests; reads a tokenizer's own JSON, never a model's name.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenizers import Tokenizer as FastTokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "\u2581"  # how SentencePiece writes a space
# Normalizers that keep every character, so that the length of a text bounds its number of tokens from below.
_KEEPING_NORMALIZERS = frozenset({"Prepend", "Replace", "Sequence"})


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tables by token id; ids of the model beyond `size` are padding and decode to nothing."""

    size: int  # highest id + 1
    tokens: list[str | None]
    special_ids: frozenset[int]
    special_texts: tuple[str, ...]  # longest first
    byte_values: dict[int, int]  # byte-fallback tokens (<0xE4>) only
    starts_clean: bytearray  # 1: shows text, and that text begins at a character boundary
    max_token_bytes: int  # most bytes of text that one token stands for
    byte_level: bool  # whether the bytes of the tokens, joined, are the text
    lossless: bool  # whether a text of n bytes needs at least n / max_token_bytes tokens


def build_vocabulary(tokenizer: FastTokenizer) -> Vocabulary:
    """The tables of a tokenizer."""
    ids = tokenizer.get_vocab(with_added_tokens=True)
    size = max(ids.values(), default=-1) + 1
    tokens: list[str | None] = [None] * size
    for text, token_id in ids.items():
        tokens[token_id] = text
    added = tokenizer.get_added_tokens_decoder()
    special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
    decoder_types = list(_types_in(_layout(tokenizer.decoder)))
    decoders = set(decoder_types)
    normalizers = set(_types_in(_layout(tokenizer.normalizer)))
    byte_level = "ByteLevel" in decoders
    byte_values = _byte_values(tokens) if "ByteFallback" in decoders else {}
    starts = _continuation_starts(tokens) if byte_level else {i for i, b in byte_values.items() if 0x80 <= b <= 0xBF}
    starts_clean = bytearray(size)
    for token_id, token in enumerate(tokens):
        starts_clean[token_id] = bool(token) and token_id not in special_ids and token_id not in starts
    special_texts = sorted({added[i].content for i in special_ids if added[i].content}, key=lambda t: (-len(t), t))
    return Vocabulary(
        size=size,
        tokens=tokens,
        special_ids=special_ids,
        special_texts=tuple(special_texts),
        byte_values=byte_values,
        starts_clean=starts_clean,
        max_token_bytes=_max_token_bytes(tokens, byte_level),
        byte_level=decoder_types == ["ByteLevel"],
        lossless=(byte_level or bool(byte_values)) and normalizers <= _KEEPING_NORMALIZERS,
    )


def _layout(component: Any) -> Any:
    """What tokenizer.json says about a component; its pickled state is that text."""
    return None if component is None else json.loads(component.__getstate__())


def _types_in(component: Any) -> Iterator[str]:
    """The types of a tokenizer.json component (normalizer, decoder, …) and of the parts of a Sequence."""
    if not component:
        return
    yield component["type"]
    for key in ("normalizers", "pretokenizers", "processors", "decoders"):
        for part in component.get(key, ()):
            yield from _types_in(part)


def _byte_values(tokens: list[str | None]) -> dict[int, int]:
    matches = ((i, _BYTE_TOKEN.fullmatch(token)) for i, token in enumerate(tokens) if token and token[:3] == "<0x")
    return {i: int(match[1], 16) for i, match in matches if match}


def _continuation_starts(tokens: list[str | None]) -> set[int]:
    """Byte-level tokens whose first byte continues a character that an earlier token began."""
    table = byte_alphabet()
    alphabet = table.keys()
    continuing = {char for char, byte in table.items() if 0x80 <= byte <= 0xBF}
    return {i for i, token in enumerate(tokens) if token and token[0] in continuing and alphabet >= set(token)}


def byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte, as character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _max_token_bytes(tokens: list[str | None], byte_level: bool) -> int:
    alphabet = byte_alphabet().keys() if byte_level else set()
    longest = 1
    for token in tokens:
        if token and len(token) * 4 > longest:
            size = len(token) if alphabet >= set(token) else len(token.replace(SPACE, " ").encode("utf-8", "replace"))
            longest = max(longest, size)
    return longest
