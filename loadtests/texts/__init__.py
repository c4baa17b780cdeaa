"""The shipped text that prompts are made of, and prompts of a wanted length out of it.

Lengths are tokens of the served tokenizer: how many a piece has is asked of the server once.
Knows nothing of workloads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).parent
CountTokens = Callable[[Sequence[str]], list[int]]
"""Pieces of text in, how many tokens each has out."""


@dataclass(frozen=True, slots=True)
class Text:
    """Pieces of a text with their lengths in tokens."""

    pieces: tuple[str, ...]
    tokens: tuple[int, ...]
    separator: str

    def cut(self, rng: random.Random, tokens: int) -> tuple[str, int]:
        """Pieces in random order, the last one shortened, and about how many tokens they have together.

        No two cuts begin with the same pieces, except by chance, so that one is no prefix of another.
        """
        chosen: list[str] = []
        have = 0
        while have < tokens:
            place = rng.randrange(len(self.pieces))
            piece, length = self.pieces[place], self.tokens[place]
            if have + length > tokens:
                piece, length = _shorten(piece, length, tokens - have)
            chosen.append(piece)
            have += length
        return self.separator.join(chosen), have


def _shorten(piece: str, length: int, wanted: int) -> tuple[str, int]:
    words = piece.split(" ")
    keep = max(1, round(len(words) * wanted / length))
    return " ".join(words[:keep]), wanted


@dataclass(frozen=True, slots=True)
class Library:
    """The texts that workloads draw on."""

    prose: Text
    code: Text

    @classmethod
    def load(cls, count_tokens: CountTokens) -> Library:
        """The shipped texts, their pieces counted."""
        prose = tuple((_HERE / "prose.txt").read_text(encoding="utf-8").splitlines())
        code = tuple((_HERE / "code.txt").read_text(encoding="utf-8").strip().split("\n\n"))
        counts = count_tokens([*prose, *code])
        return cls(Text(prose, tuple(counts[: len(prose)]), " "), Text(code, tuple(counts[len(prose) :]), "\n\n"))
