"""The two texts of an FP8 build: one to calibrate with, one to score; and the verdict on the score.

Knows nothing of how a model is run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from python_backend.errors import BuildError

TEXTS = Path(__file__).resolve().parent / "texts"
CALIBRATION_TEXT = TEXTS / "calibration.txt"
QUALITY_TEXT = TEXTS / "quality.txt"
_WINDOW = 512  # tokens
_LEAST = 64  # tokens of text below which a figure means nothing


@dataclass(frozen=True, slots=True)
class Quality:
    """Perplexity of one text under three precisions."""

    text: str
    tokens: int
    bf16: float
    fp8_weights: float  # weights rounded to E4M3
    fp8: float  # weights and activations rounded
    max_increase: float  # share of bf16's perplexity

    @property
    def increase(self) -> float:
        """The larger share by which a rounded model is over bf16; below 0 when both are better, NaN when one is NaN."""
        shares = [value / self.bf16 - 1 for value in (self.fp8_weights, self.fp8)]
        return math.nan if any(map(math.isnan, shares)) else max(shares)

    def as_data(self) -> dict[str, Any]:
        """What quality.json holds."""
        perplexity = {"bf16": self.bf16, "fp8_weights": self.fp8_weights, "fp8": self.fp8}
        return {
            "text": self.text,
            "tokens": self.tokens,
            "perplexity": perplexity,
            "increase": self.increase,
            "max_perplexity_increase": self.max_increase,
        }

    def sentence(self) -> str:
        """The figures for a person."""
        return (
            f"perplexity on {self.text} ({self.tokens} tokens): bf16 {self.bf16:.3f}, "
            f"fp8 weights {self.fp8_weights:.3f}, fp8 weights and activations {self.fp8:.3f} "
            f"({self.increase:+.1%}, allowed {self.max_increase:+.1%})"
        )

    def check(self) -> None:
        """Stop the build when the rounded model is too much worse.

        Raises:
            BuildError: with the figures.
        """
        if not self.increase <= self.max_increase:  # NaN is not
            raise BuildError(
                f"FP8 costs too much quality: {self.sentence()}. Calibrate with text closer to your use "
                "(quantization.calibration_text), or raise quantization.max_perplexity_increase."
            )


def token_batches(text: Path, tokenizer_json: Path, limit: int) -> list[list[int]]:
    """The first `limit` tokens of a calibration text, in windows that are run one by one.

    Raises:
        BuildError: the text cannot be read or is too short to tell anything.
    """
    ids = token_ids(text, tokenizer_json, limit)
    return [ids[start : start + _WINDOW] for start in range(0, len(ids), _WINDOW)]


def token_ids(text: Path, tokenizer_json: Path, limit: int) -> list[int]:
    """The first `limit` tokens of a text.

    Raises:
        BuildError: the text cannot be read or is too short to tell anything.
    """
    ids: list[int] = _tokenizer(tokenizer_json).encode(_read(text)).ids[:limit]
    if len(ids) < _LEAST:
        raise BuildError(f"{text}: {len(ids)} tokens of text are too few; give at least {_LEAST}.")
    return ids


def _tokenizer(tokenizer_json: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(tokenizer_json))


def _read(text: Path) -> str:
    try:
        return text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BuildError(f"{text}: cannot be read as UTF-8 text: {error}.") from error
