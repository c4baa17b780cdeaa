"""Beam search of one request: which beams go on with which token, and which hypotheses are complete.

As TensorRT-LLM defines it: a hypothesis scores cum_log_prob / length ** length_penalty, an end id counts in the length,
and only the beam_width best candidates of a step can complete one. Knows nothing of blocks or the model: the caller
runs the beams and forks their block tables by `BeamStep.parents`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from python_backend.engine.batch_scorer import BatchScorer, RowScore
from python_backend.engine.candidates import padded_size, top_k_ids
from python_backend.engine.log_probs import TokenLogProbs, log_probs_at
from python_backend.engine.logits_processor import LogitsProcessor
from python_backend.engine.sampling_errors import all_banned, not_finite
from python_backend.engine.stopping import ends_with_stop_word

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from python_backend.request import FinishReason, GenerationRequest


@dataclass(frozen=True, slots=True)
class BeamStep:
    """The outcome of one step: surviving beam i continues beam parents[i] of the step before with tokens[i]."""

    parents: list[int]
    tokens: list[int]
    done: bool  # no further step is needed; `hypotheses` has the result


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One complete answer. `log_probs` has one entry per output token; `cum_log_prob` counts an end id, too."""

    output_ids: list[int]
    cum_log_prob: float
    score: float
    finish_reason: FinishReason
    log_probs: list[float]
    top_log_probs: list[TokenLogProbs] = field(default_factory=list)
    text_cut: int = 0


@dataclass(slots=True)
class Beam:
    """One beam that still grows."""

    token_ids: list[int]  # prompt + output
    processor: LogitsProcessor
    cum_ranking: float = 0.0  # sum of the processed log-probabilities, which the search compares
    cum_log_prob: float = 0.0  # sum of the raw ones, which it reports
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[TokenLogProbs] = field(default_factory=list)


class _Candidate(NamedTuple):
    """Sorts best first; equal ones by beam, then by token."""

    negative_rank: float
    parent: int
    token_id: int
    cum_ranking: float
    log_prob: float
    shown: TokenLogProbs | None  # what `logprobs` says of it


class BeamSearch:
    """The beams of one request, ranked by their processed logits (penalties, bans) and reported with the raw ones."""

    def __init__(
        self,
        request: GenerationRequest,
        vocab_size: int,
        max_seq_len: int,
        find_text_stop: Callable[[list[int]], int | None] | None = None,
    ) -> None:
        """Start with the prompt as the only beam.

        Args:
            request: its sampling.beam_width beams are kept.
            vocab_size: length of a row of logits.
            max_seq_len: longest prompt + output, in tokens.
            find_text_stop: takes the output ids of a candidate; returns how many characters of its text lie behind a
                stop text that its last token completes, or None.
        """
        self._request = request
        self._vocab_size = vocab_size
        self._max_output = min(request.sampling.max_tokens, max_seq_len - len(request.prompt_ids))
        self._find_text_stop = find_text_stop
        size = padded_size(vocab_size)
        self._logits = np.full(size, -np.inf, dtype=np.float32)
        self._scorer = BatchScorer(vocab_size)
        self.beams = [Beam(list(request.prompt_ids), LogitsProcessor(request))]
        self._complete: list[Hypothesis] = []  # at most beam_width, best first
        self._settled = False  # what still grows cannot win any more

    @property
    def num_output_tokens(self) -> int:
        """Tokens that each growing beam has so far."""
        return len(self.beams[0].token_ids) - len(self._request.prompt_ids) if self.beams else 0

    def advance(self, logits: NDArray[np.float32]) -> BeamStep:
        """Take the logits of every growing beam and choose the next ones.

        Args:
            logits: float32 [len(beams), vocab]; one row at the first step.

        Raises:
            EngineFailure: the logits hold NaN or infinity, or every continuation is forbidden.
        """
        assert len(logits) == len(self.beams), "one row of logits per beam"
        length = self.num_output_tokens + 1
        candidates = self._candidates(logits)
        width = self._request.sampling.beam_width
        survivors: list[_Candidate] = []
        for rank, candidate in enumerate(candidates):
            ending = self._ending(candidate, length)
            if ending is None:
                survivors.append(candidate)
                if len(survivors) == width:
                    break
            elif rank < width:
                self._add_complete(candidate, length, *ending)
        self._settled = not survivors or self._nothing_better(-candidates[0].negative_rank, length)
        self.beams = [self._grown(candidate) for candidate in survivors]
        return BeamStep(
            parents=[candidate.parent for candidate in survivors],
            tokens=[candidate.token_id for candidate in survivors],
            done=self._settled or length >= self._max_output,
        )

    def hypotheses(self) -> list[Hypothesis]:
        """The beam_width best answers so far, best first; before the search is settled, growing beams take part."""
        found = list(self._complete)
        if not self._settled and self.num_output_tokens:
            found += [self._unfinished(beam) for beam in self.beams]
        found.sort(key=lambda hypothesis: -hypothesis.score)
        return found[: self._request.sampling.beam_width]

    def _candidates(self, logits: NDArray[np.float32]) -> list[_Candidate]:
        candidates: list[_Candidate] = []
        scores = self._scorer.score(list(logits), self._request.top_logprobs or 0)
        for index, (row, score) in enumerate(zip(logits, scores, strict=True)):
            if not np.isfinite(score.maximum):
                raise not_finite()
            candidates += self._row_candidates(index, row, score)
        if not candidates:
            raise all_banned(self.num_output_tokens)
        return sorted(candidates, key=lambda candidate: candidate[:3])

    def _row_candidates(self, index: int, row: NDArray[np.float32], raw: RowScore) -> list[_Candidate]:
        request, beam, width = self._request, self.beams[index], self._request.sampling.beam_width
        logits, score = self._logits[: self._vocab_size], raw
        logits[:] = row
        if not beam.processor.neutral:
            beam.processor.apply(row, beam.token_ids, None, out=logits)
            (score,) = self._scorer.score([logits], request.top_logprobs or 0)
            if score.maximum == -np.inf:
                return []
        # Enough of each beam to fill all places even if each token that ends it is among them.
        count = max(2 * width, width + len(request.end_ids) + len(request.stop_words))
        bonus = request.sampling.beam_search_diversity_rate * index
        candidates = []
        for token_id in top_k_ids(self._logits, min(count, self._vocab_size)).tolist():
            cum_ranking = beam.cum_ranking + float(logits[token_id]) - score.normalizer
            log_prob = float(row[token_id]) - raw.normalizer
            shown = None
            if request.top_logprobs is not None:
                of_mode = (row, raw) if request.logprobs_mode == "raw" else (logits, score)
                shown = log_probs_at(*of_mode, token_id, request.top_logprobs)
            candidates.append(_Candidate(-(cum_ranking + bonus), index, token_id, cum_ranking, log_prob, shown))
        return candidates

    def _ending(self, candidate: _Candidate, length: int) -> tuple[bool, int] | None:
        """Whether the candidate completes its beam: (its token is output, text_cut), or None."""
        request = self._request
        if candidate.token_id in request.end_ids:
            return False, 0
        if length < request.sampling.min_tokens:
            return None
        token_ids = self.beams[candidate.parent].token_ids
        if self._find_text_stop is not None:
            text_cut = self._find_text_stop([*token_ids[len(request.prompt_ids) :], candidate.token_id])
            if text_cut is not None:
                return True, text_cut
        if ends_with_stop_word(token_ids, len(request.prompt_ids), candidate.token_id, request.stop_words):
            return True, 0
        return None

    def _add_complete(self, candidate: _Candidate, length: int, token_is_output: bool, text_cut: int) -> None:
        grown = self._grown(candidate)
        beam = grown if token_is_output else self.beams[candidate.parent]
        self._complete.append(
            Hypothesis(
                output_ids=beam.token_ids[len(self._request.prompt_ids) :],
                cum_log_prob=grown.cum_log_prob,
                score=self._score(grown.cum_ranking, length),
                finish_reason="stop",
                log_probs=list(beam.log_probs),
                top_log_probs=list(beam.top_log_probs),
                text_cut=text_cut,
            )
        )
        self._complete.sort(key=lambda hypothesis: -hypothesis.score)
        del self._complete[self._request.sampling.beam_width :]

    def _unfinished(self, beam: Beam) -> Hypothesis:
        return Hypothesis(
            output_ids=beam.token_ids[len(self._request.prompt_ids) :],
            cum_log_prob=beam.cum_log_prob,
            score=self._score(beam.cum_ranking, len(beam.log_probs)),
            finish_reason="length",
            log_probs=list(beam.log_probs),
            top_log_probs=list(beam.top_log_probs),
        )

    def _grown(self, candidate: _Candidate) -> Beam:
        parent = self.beams[candidate.parent]
        return Beam(
            token_ids=[*parent.token_ids, candidate.token_id],
            processor=parent.processor.copy(),
            cum_ranking=candidate.cum_ranking,
            cum_log_prob=parent.cum_log_prob + candidate.log_prob,
            log_probs=[*parent.log_probs, candidate.log_prob],
            top_log_probs=[] if candidate.shown is None else [*parent.top_log_probs, candidate.shown],
        )

    def _score(self, cum_ranking: float, length: int) -> float:
        return cum_ranking / math.pow(length, self._request.sampling.length_penalty)

    def _nothing_better(self, best_ranking: float, length: int) -> bool:
        """Whether no growing beam needs to be followed: by early stopping, or since none can beat the worst found."""
        sampling = self._request.sampling
        if len(self._complete) < sampling.beam_width:
            return False
        return sampling.early_stopping or self._complete[-1].score >= self._score(best_ranking, length)
