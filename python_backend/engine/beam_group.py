"""Joins beam search with paged memory: beams are sequences that share blocks. Knows nothing of scoring."""

from __future__ import annotations

from typing import TYPE_CHECKING

from python_backend.engine.beam_search import BeamSearch
from python_backend.engine.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from python_backend.engine.block_manager import BlockManager
    from python_backend.engine.protocols import TextStop
    from python_backend.engine.scheduler import SequenceGroup
    from python_backend.request import FinishReason, GenerationRequest


def open_beams(
    request: GenerationRequest,
    vocab_size: int,
    max_seq_len: int,
    make_text_stop: Callable[[GenerationRequest], TextStop] | None,
) -> BeamSearch:
    """The search of a new request."""

    def find_text_stop(output_ids: list[int]) -> int | None:
        assert make_text_stop is not None
        stop = make_text_stop(request)
        return [stop.push(token_id) for token_id in output_ids][-1]

    wanted = request.stop_texts and make_text_stop is not None
    return BeamSearch(request, vocab_size, max_seq_len, find_text_stop if wanted else None)


def step_beams(group: SequenceGroup, logits: np.ndarray, blocks: BlockManager) -> bool:
    """Choose the next beams and fork their block tables; True when the search is done.

    Raises:
        EngineFailure: see BeamSearch.advance.
    """
    assert group.beams is not None
    step = group.beams.advance(logits)
    if step.done:
        return True
    parents = group.sequences
    group.sequences = [
        _fork(parents[p], i, token, blocks) for i, (p, token) in enumerate(zip(step.parents, step.tokens, strict=True))
    ]
    for sequence, beam in zip(group.sequences, group.beams.beams, strict=True):
        sequence.cum_log_prob, sequence.log_probs = beam.cum_log_prob, beam.log_probs
        sequence.top_log_probs = list(beam.top_log_probs)
    for parent in parents:
        blocks.free(parent)
    return False


def best_hypotheses(group: SequenceGroup, reason: FinishReason | None = None) -> list[Sequence]:
    """The sequences to return, best first; `reason` replaces that of beams that still grew."""
    assert group.beams is not None
    found = []
    for index, hypothesis in enumerate(group.beams.hypotheses()[: group.request.sampling.num_return_sequences]):
        sequence = Sequence(group.request, index, [*group.request.prompt_ids, *hypothesis.output_ids])
        stopped = hypothesis.finish_reason == "stop"
        sequence.finish_reason = hypothesis.finish_reason if stopped or reason is None else reason
        sequence.cum_log_prob, sequence.log_probs = hypothesis.cum_log_prob, hypothesis.log_probs
        sequence.top_log_probs, sequence.text_cut = list(hypothesis.top_log_probs), hypothesis.text_cut
        found.append(sequence)
    return found or [_nothing_yet(group, reason)]


def _nothing_yet(group: SequenceGroup, reason: FinishReason | None) -> Sequence:
    """A search that ended before its first step has one empty answer."""
    sequence = Sequence(group.request)
    sequence.finish_reason = reason
    return sequence


def _fork(parent: Sequence, index: int, token_id: int, blocks: BlockManager) -> Sequence:
    child = Sequence(parent.request, index, [*parent.token_ids, token_id])
    child.num_computed_tokens = parent.num_computed_tokens
    child.num_cached_tokens = parent.num_cached_tokens
    blocks.fork(parent, child)
    return child
