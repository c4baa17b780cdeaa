"""Decides after each chosen token whether a sequence ends, and why. Knows nothing of sampling or of text itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as TokenIds

    from python_backend.engine.sequence import Sequence
    from python_backend.request import FinishReason


@dataclass(frozen=True, slots=True)
class StopDecision:
    """What becomes of a token that was chosen."""

    append: bool  # whether it belongs to the output; an end id never does
    finish_reason: FinishReason | None = None  # None: go on
    text_cut: int = 0  # characters to drop from the end of the text, when a stop text ended it


_GO_ON = StopDecision(append=True)
_END_ID = StopDecision(append=False, finish_reason="stop")
_LENGTH = StopDecision(append=True, finish_reason="length")


def decide(sequence: Sequence, token_id: int, max_seq_len: int) -> StopDecision:
    """Judge a token before it is appended; call it once per token, since it feeds the sequence's text stop.

    In this order: an end id; a stop word (as token ids or as text; its tokens stay in the output) once min_tokens
    are there; max_tokens or max_seq_len. A stop word that is complete exactly at the limit counts as "stop".
    Stop words are looked for in the output only, never across the border to the prompt.

    Args:
        sequence: without the token.
        token_id: the token chosen.
        max_seq_len: longest prompt + output, in tokens.
    """
    request = sequence.request
    if token_id in request.end_ids:
        return _END_ID
    text_cut = None if sequence.text_stop is None else sequence.text_stop.push(token_id)
    length = sequence.num_output_tokens + 1
    if length >= request.sampling.min_tokens:
        if text_cut is not None:
            return StopDecision(append=True, finish_reason="stop", text_cut=text_cut)
        if ends_with_stop_word(sequence.token_ids, sequence.num_prompt_tokens, token_id, request.stop_words):
            return StopDecision(append=True, finish_reason="stop")
    if length >= request.sampling.max_tokens or len(sequence.token_ids) + 1 >= max_seq_len:
        return _LENGTH
    return _GO_ON


def ends_with_stop_word(
    token_ids: TokenIds[int], num_prompt_tokens: int, token_id: int, stop_words: Iterable[tuple[int, ...]]
) -> bool:
    """Whether the output with `token_id` behind it ends with one of the words; `token_ids` is prompt and output."""
    for word in stop_words:
        if not word or word[-1] != token_id:
            continue
        start = len(token_ids) + 1 - len(word)
        if start >= num_prompt_tokens and tuple(token_ids[start:]) == word[:-1]:
            return True
    return False
