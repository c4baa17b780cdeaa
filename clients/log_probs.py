"""Log-probabilities of tokens: parsed, and as a table for people. Knows nothing of requests or servers."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, overload

_BAR = 10  # columns for a probability of 1
_EIGHTHS = " ▏▎▍▌▋▊▉"
_LONGEST_TOKEN = 24  # columns


@dataclass(frozen=True, slots=True)
class LogProb:
    """One token's log-probability (natural logarithm) and those of the likeliest tokens there, likeliest first."""

    token: str
    logprob: float | None  # None: the first token of a prompt, which nothing precedes
    bytes: tuple[int, ...] | None = None  # None: a special token, which shows no text
    top_logprobs: tuple[LogProb, ...] = ()
    id: int | None = None
    text_offset: int | None = None  # characters of the sequence's text before the token; only of chosen tokens
    masked_probability: float | None = None  # what a guide forbade at this place, 0 to 1; None: no guide

    @classmethod
    def parse(cls, entry: Mapping[str, Any]) -> LogProb:
        """From one entry of OpenAI's `content` list."""
        find, value = entry.get, entry["logprob"]
        raw, others = find("bytes"), find("top_logprobs")
        return cls(
            entry["token"],
            None if value is None else float(value),
            None if raw is None else tuple(raw),
            tuple([cls.parse(other) for other in others]) if others else (),
            find("id"),
            find("text_offset"),
            find("masked_probability"),
        )

    @property
    def probability(self) -> float | None:
        """0 to 1."""
        return None if self.logprob is None else math.exp(self.logprob)


class LogProbs(Sequence[LogProb]):
    """The tokens of a sequence, in order; read from the server's JSON when somebody looks at them."""

    __slots__ = ("_entries", "texts")

    def __init__(self, texts: Iterable[str] = ()) -> None:
        """From the content lists of successive responses."""
        self.texts = tuple(texts)
        self._entries: tuple[LogProb, ...] | None = None

    def _all(self) -> tuple[LogProb, ...]:
        if self._entries is None:
            self._entries = tuple(entry for text in self.texts for entry in parse_content(text))
        return self._entries

    @overload
    def __getitem__(self, index: int) -> LogProb: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LogProb]: ...
    def __getitem__(self, index: int | slice) -> LogProb | Sequence[LogProb]:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all() == tuple(other)

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        return repr(self._all())


def parse_content(text: str) -> tuple[LogProb, ...]:
    """From the JSON text of a content list."""
    return tuple(LogProb.parse(entry) for entry in json.loads(text))


def mean_log_prob(entries: Sequence[LogProb]) -> float | None:
    """Over the tokens that have one; None when none has. Its negative's exponential is the perplexity."""
    values = [entry.logprob for entry in entries if entry.logprob is not None]
    return sum(values) / len(values) if values else None


def table(entries: Sequence[LogProb]) -> Iterator[str]:
    """Lines for a terminal: token, probability, what a guide forbade, and the alternatives that were not taken."""
    masked = any(entry.masked_probability is not None for entry in entries)
    rows = []
    for entry in entries:
        cells = [_quoted(entry), _percent(entry.probability), _bar(entry.probability)]
        if masked:
            cells.append(f"guide forbade {_percent(entry.masked_probability)}")
        for other in entry.top_logprobs:
            if (other.id, other.token) != (entry.id, entry.token):
                cells += [_quoted(other), _percent(other.probability)]
        rows.append(cells)
    yield from _aligned(rows)
    mean = mean_log_prob(entries)
    if mean is not None:
        yield f"{len(entries)} tokens, log-prob {mean:.3f} on average, perplexity {math.exp(min(700.0, -mean)):.2f}"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(_columns, column)) for column in zip_longest(*rows, fillvalue="")]
    for row in rows:
        cells = (cell + " " * (width - _columns(cell)) for cell, width in zip(row, widths, strict=False))
        yield "  ".join(cells).rstrip()


def _columns(text: str) -> int:
    """How wide a terminal shows it."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def _quoted(entry: LogProb) -> str:
    text = repr(entry.token)
    return text if len(text) <= _LONGEST_TOKEN else text[: _LONGEST_TOKEN - 1] + "…"


def _percent(probability: float | None) -> str:
    if probability is None:
        return "     –"
    return "<0.1 %".rjust(7) if 0 < probability < 0.0005 else f"{100 * probability:5.1f} %"


def _bar(probability: float | None) -> str:
    eighths = round(8 * _BAR * (probability or 0.0))
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()).ljust(_BAR)
