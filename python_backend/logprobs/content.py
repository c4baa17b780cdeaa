"""Log-probabilities as JSON: OpenAI's `content` list, with the id and the text offset of every token.

Knows nothing of Triton, or of where the numbers come from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from python_backend.logprobs.offsets import offsets_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from python_backend.logprobs.tokens import TokenTable

_LEAST = -9999.0  # stands for the logarithm of 0, which JSON cannot say


class Scores(Protocol):
    """What is known of one token."""

    @property
    def log_prob(self) -> float:
        """Its natural log-probability."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The most probable tokens at its place, most probable first."""

    @property
    def log_probs(self) -> Sequence[float]:
        """Theirs."""

    @property
    def masked(self) -> float | None:
        """The probability of all that a mask forbade; None where none was in use."""


class ContentWriter:
    """Writes the tokens of one sequence, piece by piece as they are shown."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._offsets = offsets_of(table)

    def write(self, token_ids: Sequence[int], scores: Sequence[Scores], text_cut: int = 0) -> str:
        """The next tokens as a JSON list.

        Args:
            token_ids: the tokens.
            scores: of the first of them; the rest has none and is left out.
            text_cut: characters that the end of the text loses behind these tokens; so do the tokens within it.
        """
        place = self._offsets.place
        offsets = [place(token_id) for token_id in token_ids]
        shown = len(scores)
        if text_cut > 0:
            end = self._offsets.end() - text_cut
            shown = min(shown, sum(offset < end for offset in offsets))
        table = self._table
        return _list([_entry(table, *of_token) for of_token in zip(token_ids[:shown], offsets, scores, strict=False)])


def prompt_content(table: TokenTable, prompt_ids: Sequence[int], scores: Sequence[Scores]) -> str:
    """A prompt's tokens as a JSON list, special tokens spelled out; nothing precedes the first, so it has no number."""
    offsets = offsets_of(table, special=True)
    first, *others = prompt_ids
    entries = [f'{table.head(first)}null,"text_offset":{offsets.place(first)},"top_logprobs":[]}}']
    entries += [_entry(table, i, offsets.place(i), of_token) for i, of_token in zip(others, scores, strict=True)]
    return _list(entries)


def _list(entries: list[str]) -> str:
    return "[" + ",".join(entries) + "]"


def _entry(table: TokenTable, token_id: int, offset: int, scores: Scores) -> str:
    head = table.head
    others = ",".join(
        [f"{head(other)}{_number(value)}}}" for other, value in zip(scores.token_ids, scores.log_probs, strict=True)]
    )
    masked = "" if scores.masked is None else f',"masked_probability":{scores.masked:.8g}'
    start = f'{head(token_id)}{_number(scores.log_prob)},"text_offset":{offset}'
    return f'{start}{masked},"top_logprobs":[{others}]}}'


def _number(log_prob: float) -> str:
    """Rounding may lift the logarithm of nearly 1 over 0."""
    return f"{min(0.0, max(_LEAST, log_prob)):.8g}"
