"""From what the engine generated to the text of one response. Knows nothing of Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from python_backend.text.detokenize import decode_delta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from python_backend.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """The new tokens of one sequence (sample or beam) and what the engine says about them."""

    ids: Sequence[int]
    context: Sequence[int] = ()  # generated tokens sent before, from a clean start
    final: bool = True
    text_cut: int = 0  # characters (code points) to drop from the end


def piece_text(tokenizer: Tokenizer, piece: Piece, skip_special_tokens: bool = True) -> str:
    """The text that a piece adds to the answer."""
    text = decode_delta(tokenizer, piece.context, piece.ids, piece.final, skip_special_tokens)
    return text[: max(0, len(text) - piece.text_cut)] if piece.text_cut > 0 else text
