"""Takes chosen tokens into a sequence, and behind them those that its mask forces: they need no step each.

Forced tokens are computed together in the next step. Where log-probabilities or logits are wanted, that step gives a
row for each of them; until then they are unscored and not shown.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from python_backend.engine.prompt_reader import reads_prompt
from python_backend.engine.stopping import StopDecision, decide

if TYPE_CHECKING:
    from collections.abc import Iterator

    from python_backend.engine.config import EngineConfig
    from python_backend.engine.masks import MaskFiller
    from python_backend.engine.sequence import Sequence
    from python_backend.request import GenerationRequest

_STRUCTURE_END = StopDecision(append=True, finish_reason="stop")


def take(sequence: Sequence, token_id: int, max_seq_len: int) -> StopDecision:
    """Append a chosen token, unless it is an end id, and say whether the sequence ends.

    Raises:
        RequestError: the sequence's mask does not allow the token.
    """
    decision = decide(sequence, token_id, max_seq_len)
    if not decision.append:
        return _closed(sequence, decision)
    sequence.token_ids.append(token_id)
    if sequence.mask is not None:
        sequence.mask.accept(token_id)
        # Complete at the last token that was allowed is complete, not cut off.
        if decision.finish_reason in (None, "length") and sequence.mask.finished:
            return _closed(sequence, _STRUCTURE_END)
    return decision


def _closed(sequence: Sequence, decision: StopDecision) -> StopDecision:
    """An answer that had to be cut short to be complete ends because of its length."""
    return replace(decision, finish_reason="length") if sequence.cut_short else decision


def take_forced(sequence: Sequence, max_seq_len: int, masks: MaskFiller) -> StopDecision | None:
    """Append the tokens that must come next; the last decision, None when nothing is forced."""
    assert sequence.mask is not None
    decision = None
    scored = wants_scores(sequence.request)
    for token_id in sequence.mask.forced_tokens():
        if token_id in sequence.request.end_ids:
            break  # the mask forbids it here, and allows another way to write the same text
        if sequence.request.top_logprobs is not None:
            sequence.unscored_bitmasks.append(masks.fill_one(sequence.mask))
        decision = take(sequence, token_id, max_seq_len)
        sequence.num_unscored_tokens += scored
        if decision.finish_reason is not None:
            break
    return decision


def may_fast_forward(sequence: Sequence, config: EngineConfig) -> bool:
    """Whether a mask may force tokens, and nothing else can forbid them.

    Without chunked context a run of them might not fit into a step.
    """
    request = sequence.request
    return (
        sequence.mask is not None
        and config.enable_chunked_context
        and config.enable_fast_forward
        and not request.bad_words
        and not request.sampling.no_repeat_ngram_size
        and request.embedding_bias is None
    )


def wants_scores(request: GenerationRequest) -> bool:
    """Whether the model's opinion of every token is asked for."""
    return request.return_log_probs or request.top_logprobs is not None or request.return_generation_logits


def num_logits(sequence: Sequence) -> int:
    """Rows of logits that the scheduled tokens of a sequence give: the last one and those of unscored tokens.

    Who reads the prompt wants all of them.
    """
    if reads_prompt(sequence):
        return sequence.num_scheduled_tokens
    end = sequence.num_computed_tokens + sequence.num_scheduled_tokens
    return max(1, min(sequence.num_scheduled_tokens, end - _first_scoring(sequence)))


def scored_now(sequence: Sequence, num_rows: int) -> Iterator[tuple[int, int]]:
    """Row (of the sequence's rows in this step) and token for each unscored token that it scores, in order."""
    if not sequence.num_unscored_tokens:
        return
    end = sequence.num_computed_tokens + sequence.num_scheduled_tokens
    first = end - num_rows
    for position in range(max(first, _first_scoring(sequence)), min(end, len(sequence.token_ids) - 1)):
        yield position - first, sequence.token_ids[position + 1]


def _first_scoring(sequence: Sequence) -> int:
    """Position of the token whose logits tell of the first unscored token, or of the next one to choose."""
    return len(sequence.token_ids) - 1 - sequence.num_unscored_tokens
