"""Chooses the next token of every sequence of a step.

Every row is worked on alone, so that neither the company in a batch nor a preemption changes what comes out.
Knows nothing of stop conditions, blocks or the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from python_backend.engine.batch_scorer import BatchScorer
from python_backend.engine.candidates import (
    Candidates,
    draw,
    draw_from_row,
    padded_size,
    softmax_weights,
    top_k_ids,
    top_p_candidates,
    top_p_prefix,
)
from python_backend.engine.log_probs import forbidden_share, log_probs_at
from python_backend.engine.logits_processor import LogitsProcessor
from python_backend.engine.random_stream import RandomStream
from python_backend.engine.sampling_errors import all_banned, not_finite

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from python_backend.engine.batch_scorer import RowScore
    from python_backend.engine.log_probs import TokenLogProbs
    from python_backend.engine.sequence import Sequence
    from python_backend.errors import RequestError
    from python_backend.request import GenerationRequest, SamplingParams


class TopPDecay:
    """top_p of the next draw; it falls after each token and returns to its start after top_p_reset_id."""

    __slots__ = ("_num_seen", "_sampling", "_value")

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling
        self._value = sampling.top_p
        self._num_seen = 0

    @staticmethod
    def wanted(sampling: SamplingParams) -> bool:
        """As upstream, only where top_p works without top_k."""
        if sampling.top_k > 0 or sampling.top_p <= 0:
            return False
        return sampling.top_p_decay < 1 or sampling.top_p_min > sampling.top_p

    def value(self, sequence: Sequence) -> float:
        """What to use for the next token of the sequence."""
        if sequence.num_output_tokens < self._num_seen:
            self._value, self._num_seen = self._sampling.top_p, 0
        for token_id in sequence.token_ids[sequence.num_prompt_tokens + self._num_seen :]:
            if token_id == self._sampling.top_p_reset_id:
                self._value = self._sampling.top_p
            else:
                self._value = max(self._value * self._sampling.top_p_decay, self._sampling.top_p_min)
        self._num_seen = sequence.num_output_tokens
        return self._value


class SamplerState:
    """What the sampler keeps of one sequence; it can be rebuilt from the seed and the tokens."""

    __slots__ = ("greedy", "plain", "processor", "random", "top_p_decay", "wants_log_probs")

    def __init__(self, request: GenerationRequest, index: int) -> None:
        sampling = request.sampling
        self.greedy = sampling.greedy
        self.processor = LogitsProcessor(request)
        self.wants_log_probs = request.return_log_probs or request.top_logprobs is not None
        self.random = RandomStream(sampling.seed, index)
        self.top_p_decay = TopPDecay(sampling) if TopPDecay.wanted(sampling) else None
        self.plain = self.greedy and self.processor.idle and not self.wants_log_probs


class Sampler:
    """Chooses tokens and keeps their log-probabilities. Not for more than one thread at a time."""

    def __init__(self, vocab_size: int) -> None:
        """`vocab_size` is the length of a row of logits."""
        self.vocab_size = vocab_size
        size = padded_size(vocab_size)
        self._scorer = BatchScorer(vocab_size)
        self._logits = np.full(size, -np.inf, dtype=np.float32)
        self._weights = np.zeros(size, dtype=np.float32)

    def open(self, sequence: Sequence) -> None:
        """Prepare the state of a new sequence; `sample` does it, too, for one that has none."""
        sequence.sampler_state = SamplerState(sequence.request, sequence.index)

    def sample(
        self, logits: NDArray[np.float32], sequences: list[Sequence], bitmasks: NDArray[np.int32] | None = None
    ) -> list[int | RequestError]:
        """Choose one token per sequence; the caller appends it to the sequence.

        Where the request asks for log-probabilities, `cum_log_prob` grows by that of the chosen token, and `log_probs`
        and, with top_logprobs, `top_log_probs` get one entry, unless it is an end id: that is no part of the output.

        Args:
            logits: float32 [n, vocab], rows contiguous.
            sequences: the n sequences that the rows belong to.
            bitmasks: allowed tokens, int32 [n, ceil(vocab / 32)]; a row of ones (-1) allows all.

        Returns:
            For each sequence a token id, or the error that ends this request: the logits hold NaN or infinity,
            or every token is forbidden.
        """
        states = [self._state(sequence) for sequence in sequences]
        if bitmasks is None and all(state.plain for state in states):
            return self._most_probable(logits)
        scores = self._score_together(logits, sequences, states)
        results: list[int | RequestError] = []
        for row, (sequence, state) in enumerate(zip(sequences, states, strict=True)):
            bitmask = None if bitmasks is None or (bitmasks[row] == -1).all() else bitmasks[row]
            results.append(self._sample_row(logits[row], sequence, state, bitmask, scores.get(row)))
        return results

    def _score_together(
        self, logits: NDArray[np.float32], sequences: list[Sequence], states: list[SamplerState]
    ) -> dict[int, RowScore]:
        """By row, where log-probabilities are asked for."""
        wanted = [row for row, state in enumerate(states) if state.wants_log_probs]
        n = max((sequences[row].request.top_logprobs or 0 for row in wanted), default=0)
        return dict(zip(wanted, self._scorer.score([logits[row] for row in wanted], n), strict=True))

    def score(self, row: NDArray[np.float32], token_id: int, sequence: Sequence) -> RequestError | None:
        """Keep the log-probabilities of a token that was not chosen but forced; the error of unsound logits.

        Args:
            row: raw logits of its place, float32 [vocab], contiguous.
            token_id: the token that stands there.
            sequence: that it belongs to.
        """
        if not self._state(sequence).wants_log_probs:
            return None if np.isfinite(row.max()) else not_finite()
        (score,) = self._scorer.score([row], sequence.request.top_logprobs or 0)
        if not np.isfinite(score.maximum):
            return not_finite()
        bitmask = sequence.unscored_bitmasks.pop(0) if sequence.unscored_bitmasks else None
        self._record(row, score, token_id, sequence, bitmask)
        return None

    def score_prompt(self, rows: NDArray[np.float32], token_ids: list[int], n: int) -> list[TokenLogProbs]:
        """Log-probabilities of a prompt's tokens in the raw distribution, with n alternatives each.

        Args:
            rows: logits of the places before them, float32 [tokens, vocab], rows contiguous.
            token_ids: the tokens that stand there.
            n: how many.
        """
        scores = self._scorer.score(list(rows), n)
        return [log_probs_at(*of_token, n) for of_token in zip(rows, scores, token_ids, strict=True)]

    def _state(self, sequence: Sequence) -> SamplerState:
        if sequence.sampler_state is None:
            self.open(sequence)
        state: SamplerState = sequence.sampler_state
        return state

    def _most_probable(self, logits: NDArray[np.float32]) -> list[int | RequestError]:
        token_ids = logits.argmax(axis=1)
        best = logits[np.arange(len(token_ids)), token_ids]
        finite = np.isfinite(best)
        if finite.all():
            return list(token_ids.tolist())
        return [int(t) if ok else not_finite() for t, ok in zip(token_ids, finite, strict=True)]

    def _sample_row(
        self,
        row: NDArray[np.float32],
        sequence: Sequence,
        state: SamplerState,
        bitmask: NDArray[np.int32] | None,
        score: RowScore | None,
    ) -> int | RequestError:
        # NaN and +inf win, so this one value tells whether the row is sound.
        best = int(row.argmax()) if score is None else score.token_ids[0]
        if not np.isfinite(row[best] if score is None else score.maximum):
            return not_finite()
        chosen = self._choose(row, best, sequence, state, bitmask)
        if sequence.budget is not None and isinstance(chosen, int):
            settled = sequence.budget.settle(chosen)
            sequence.cut_short |= settled != chosen
            chosen = settled
        if score is not None and isinstance(chosen, int):
            self._record(row, score, chosen, sequence, bitmask)
        return chosen

    def _choose(
        self,
        row: NDArray[np.float32],
        best: int,
        sequence: Sequence,
        state: SamplerState,
        bitmask: NDArray[np.int32] | None,
    ) -> int | RequestError:
        processor = state.processor
        if state.greedy and processor.keeps_order and processor.allows(best, sequence.token_ids, bitmask):
            return best
        processor.apply(row, sequence.token_ids, bitmask, out=self._logits[: self.vocab_size])
        if bitmask is not None or not processor.idle:
            best = int(self._logits.argmax())
        maximum = self._logits[best]
        if not np.isfinite(maximum):
            return all_banned(sequence.num_output_tokens)
        return best if state.greedy else self._draw(maximum, sequence, state)

    def _draw(self, maximum: np.float32, sequence: Sequence, state: SamplerState) -> int:
        sampling = sequence.request.sampling
        top_p = sampling.top_p if state.top_p_decay is None else state.top_p_decay.value(sequence)
        uniform = state.random.uniform(sequence.num_output_tokens)
        if 0 < sampling.top_k < self.vocab_size:
            token_ids = top_k_ids(self._logits, sampling.top_k)
            weights = np.exp(self._logits[token_ids].astype(np.float64) - float(maximum))
            size = top_p_prefix(weights, top_p) if 0 < top_p < 1 else len(weights)
            return draw(Candidates(token_ids[:size], weights[:size]), uniform)
        sums = softmax_weights(self._logits, maximum, out=self._weights)
        if 0 < top_p < 1:
            return draw(top_p_candidates(self._weights, float(sums.sum()), top_p), uniform)
        return draw_from_row(self._weights, sums, uniform)

    def _record(
        self,
        row: NDArray[np.float32],
        score: RowScore,
        token_id: int,
        sequence: Sequence,
        bitmask: NDArray[np.int32] | None,
    ) -> None:
        """Keep the log-probabilities of the next token, or of the first one that is unscored."""
        request = sequence.request
        log_prob = float(row[token_id]) - score.normalizer
        sequence.cum_log_prob += log_prob
        if token_id in request.end_ids:
            return
        sequence.log_probs.append(log_prob)
        if request.top_logprobs is None:
            return
        masked = None if sequence.mask is None else forbidden_share(row, score.normalizer, bitmask)
        processor: LogitsProcessor = self._state(sequence).processor
        if request.logprobs_mode == "processed" and not (processor.neutral and bitmask is None):
            before = sequence.token_ids[: len(sequence.token_ids) - sequence.num_unscored_tokens]
            processor.apply(row, before, bitmask, out=self._logits[: self.vocab_size])
            row = self._logits[: self.vocab_size]
            (score,) = self._scorer.score([row], request.top_logprobs)
        sequence.top_log_probs.append(log_probs_at(row, score, token_id, request.top_logprobs, masked))
