"""Beam search of one request: which beams go on with which token, and which hypotheses are complete.

As TensorRT-LLM defines it: a hypothesis scores cum_log_prob / length ** length_penalty, an end id counts in the length,
and only the beam_width best candidates of a step can complete one. With a mask every beam has its own; a hypothesis is
complete as soon as nothing can follow, and complete ones come before those that the length cut off. Knows nothing of
blocks or the model: the caller runs the beams and forks their block tables by `BeamStep.parents`.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from python_backend.engine.batch_scorer import BatchScorer
from python_backend.engine.beam import Beam, BeamStep, Candidate, Choice, Hypothesis, Row
from python_backend.engine.candidates import padded_size, top_k_ids
from python_backend.engine.log_probs import forbidden_share, log_probs_at
from python_backend.engine.logits_processor import LogitsProcessor
from python_backend.engine.sampling_errors import all_banned, not_finite
from python_backend.engine.stopping import ends_with_stop_word

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from python_backend.engine.protocols import ForkableMask
    from python_backend.request import GenerationRequest


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
        self._fill_mask: Callable[[ForkableMask], NDArray[np.int32]] | None = None  # None: nothing is constrained

    def constrain(self, mask: ForkableMask | None, fill_mask: Callable[[ForkableMask], NDArray[np.int32]]) -> None:
        """Keep every beam to a mask, which is at its beginning; before the first step.

        Args:
            mask: of the prompt's beam, or None.
            fill_mask: gives what a mask allows, int32 [ceil(vocab / 32)]; a RequestError ends the search.
        """
        self.beams[0].mask = mask
        self._fill_mask = None if mask is None else fill_mask

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
        candidates, choice = self._choose(self._rows(logits), length)
        for candidate, token_is_output, text_cut in choice.complete:
            self._add_complete(candidate, length, token_is_output, text_cut)
        if not candidates and not self._complete:
            raise all_banned(self.num_output_tokens)
        survivors = choice.survivors
        self._settled = not survivors or self._nothing_better(-candidates[0].negative_rank, length)
        self.beams = [self._grown(candidate, mask) for candidate, mask in survivors]
        return BeamStep(
            parents=[candidate.parent for candidate, _ in survivors],
            tokens=[candidate.token_id for candidate, _ in survivors],
            done=self._settled or length >= self._max_output,
        )

    def hypotheses(self) -> list[Hypothesis]:
        """The beam_width best answers so far, best first; before the search is settled, growing beams take part."""
        found = list(self._complete)
        if not self._settled and self.num_output_tokens:
            found += [self._unfinished(beam) for beam in self.beams]
        guided = self._fill_mask is not None
        found.sort(key=lambda hypothesis: (guided and hypothesis.finish_reason == "length", -hypothesis.score))
        return found[: self._request.sampling.beam_width]

    def _rows(self, logits: NDArray[np.float32]) -> list[Row]:
        scores = self._scorer.score(list(logits), self._request.top_logprobs or 0)
        if not all(np.isfinite(score.maximum) for score in scores):
            raise not_finite()
        bitmasks: list[NDArray[np.int32] | None] = [None] * len(scores)
        if self._fill_mask is not None:
            bitmasks = [None if beam.mask is None else self._fill_mask(beam.mask) for beam in self.beams]
        return [Row(*row) for row in zip(logits, scores, bitmasks, strict=True)]

    def _choose(self, rows: list[Row], length: int) -> tuple[list[Candidate], Choice]:
        """The candidates, best first, and what becomes of them."""
        request, width = self._request, self._request.sampling.beam_width
        # Enough of each beam to fill all places even if each token that ends it is among them. With a mask or a stop
        # text any token may end a beam: more are looked at where those of a beam have been used up.
        count = max(2 * width, width + len(request.end_ids) + len(request.stop_words))
        while True:
            candidates: list[Candidate] = []
            for index, row in enumerate(rows):
                candidates += self._row_candidates(index, row, min(count, self._vocab_size))
            candidates.sort(key=lambda candidate: candidate[:3])
            choice = self._judged(candidates, length, count)
            if not choice.used_up or count >= self._vocab_size:
                return candidates, choice
            count *= 4

    def _judged(self, candidates: list[Candidate], length: int, count: int) -> Choice:
        """Go through the candidates until enough survive; `count` is how many of each beam there are at most."""
        width = self._request.sampling.beam_width
        choice = Choice([], [], False)
        looked_at: Counter[int] = Counter()
        for rank, candidate in enumerate(candidates):
            looked_at[candidate.parent] += 1
            mask = self._mask_behind(candidate)
            ending = self._ending(candidate, mask, length)
            if ending is None:
                choice.survivors.append((candidate, mask))
                if len(choice.survivors) == width:
                    break
            elif rank < width:
                choice.complete.append((candidate, *ending))
        return choice._replace(used_up=any(looked_at[parent] == count for parent in looked_at))

    def _mask_behind(self, candidate: Candidate) -> ForkableMask | None:
        """A twin of the parent's mask that has taken the token; None without a mask, or behind an end."""
        mask = self.beams[candidate.parent].mask
        if mask is None or candidate.token_id in self._request.end_ids:
            return None
        twin = mask.fork()
        twin.accept(candidate.token_id)
        return twin

    def _row_candidates(self, index: int, of_beam: Row, count: int) -> list[Candidate]:
        """The `count` best of one beam, or fewer where fewer are allowed."""
        request, beam, (row, raw, bitmask) = self._request, self.beams[index], of_beam
        logits, score = self._logits[: self._vocab_size], raw
        logits[:] = row
        if bitmask is not None or not beam.processor.neutral:
            beam.processor.apply(row, beam.token_ids, bitmask, out=logits)
            (score,) = self._scorer.score([logits], request.top_logprobs or 0)
            if score.maximum == -np.inf:
                return []
        masked = None
        if request.top_logprobs is not None and bitmask is not None:
            masked = forbidden_share(row, raw.normalizer, bitmask)
        bonus = request.sampling.beam_search_diversity_rate * index
        candidates = []
        for token_id in top_k_ids(self._logits, count).tolist():
            cum_ranking = beam.cum_ranking + float(logits[token_id]) - score.normalizer
            log_prob = float(row[token_id]) - raw.normalizer
            shown = None
            if request.top_logprobs is not None:
                of_mode = (row, raw) if request.logprobs_mode == "raw" else (logits, score)
                shown = log_probs_at(*of_mode, token_id, request.top_logprobs, masked)
            candidates.append(Candidate(-(cum_ranking + bonus), index, token_id, cum_ranking, log_prob, shown))
        return candidates

    def _ending(self, candidate: Candidate, mask: ForkableMask | None, length: int) -> tuple[bool, int] | None:
        """Whether the candidate completes its beam: (its token is output, text_cut), or None."""
        if candidate.token_id in self._request.end_ids:
            return False, 0
        stop = self._stop(candidate) if length >= self._request.sampling.min_tokens else None
        return (True, 0) if stop is None and mask is not None and mask.finished else stop

    def _stop(self, candidate: Candidate) -> tuple[bool, int] | None:
        """Whether a stop word ends here; as `_ending` says it."""
        request = self._request
        token_ids = self.beams[candidate.parent].token_ids
        if self._find_text_stop is not None:
            text_cut = self._find_text_stop([*token_ids[len(request.prompt_ids) :], candidate.token_id])
            if text_cut is not None:
                return True, text_cut
        if ends_with_stop_word(token_ids, len(request.prompt_ids), candidate.token_id, request.stop_words):
            return True, 0
        return None

    def _add_complete(self, candidate: Candidate, length: int, token_is_output: bool, text_cut: int) -> None:
        grown = self._grown(candidate, None)
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

    def _grown(self, candidate: Candidate, mask: ForkableMask | None) -> Beam:
        parent = self.beams[candidate.parent]
        return Beam(
            token_ids=[*parent.token_ids, candidate.token_id],
            processor=parent.processor.copy(),
            cum_ranking=candidate.cum_ranking,
            cum_log_prob=parent.cum_log_prob + candidate.log_prob,
            log_probs=[*parent.log_probs, candidate.log_prob],
            top_log_probs=[] if candidate.shown is None else [*parent.top_log_probs, candidate.shown],
            mask=mask,
        )

    def _score(self, cum_ranking: float, length: int) -> float:
        return cum_ranking / math.pow(length, self._request.sampling.length_penalty)

    def _nothing_better(self, best_ranking: float, length: int) -> bool:
        """Whether no growing beam needs to be followed: by early stopping, or since none can beat the worst found."""
        sampling = self._request.sampling
        if len(self._complete) < sampling.beam_width:
            return False
        return sampling.early_stopping or self._complete[-1].score >= self._score(best_ranking, length)
