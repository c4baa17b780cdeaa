"""What a beam search keeps and gives: beams, candidates, hypotheses. Knows nothing of how they are chosen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from python_backend.engine.log_probs import TokenLogProbs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from python_backend.engine.batch_scorer import RowScore
    from python_backend.engine.logits_processor import LogitsProcessor
    from python_backend.engine.protocols import ForkableMask
    from python_backend.request import FinishReason


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
    mask: ForkableMask | None = None  # has taken the output


class Row(NamedTuple):
    """What the next token of one beam is chosen by."""

    logits: NDArray[np.float32]  # raw, [vocab]
    score: RowScore
    bitmask: NDArray[np.int32] | None  # allowed tokens, [ceil(vocab / 32)]


class Candidate(NamedTuple):
    """Sorts best first; equal ones by beam, then by token."""

    negative_rank: float
    parent: int
    token_id: int
    cum_ranking: float
    log_prob: float
    shown: TokenLogProbs | None  # what `logprobs` says of it


class Choice(NamedTuple):
    """What becomes of the best candidates of a step."""

    survivors: list[tuple[Candidate, ForkableMask | None]]  # with the mask behind the token
    complete: list[tuple[Candidate, bool, int]]  # whether the token is output, text_cut
    used_up: bool  # every candidate of some beam was looked at
