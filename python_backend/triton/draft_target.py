"""Draft-target decoding: a small model proposes tokens, the large one checks them all in one step.

The loop alone; knows nothing of Triton. The models are two functions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that the small model expects, none when it expects the end; logits [tokens, vocab] when they are used."""

    ids: list[int] = field(default_factory=list)
    logits: NDArray[Any] | None = None


@dataclass(frozen=True, slots=True)
class Verified:
    """What the large model makes of a proposal: the tokens of it that it agrees with, and one of its own.

    The last one is missing when it is an end token, which is never shown.
    """

    ids: list[int]
    log_probs: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Round:
    """New tokens, and how they came about."""

    ids: list[int]
    log_probs: list[float]
    num_proposed: int
    num_accepted: int


class Propose(Protocol):
    """The small model."""

    def __call__(self, ids: Sequence[int], size: int) -> Proposal:
        """Up to `size` tokens that may follow `ids`."""


class Verify(Protocol):
    """The large model."""

    def __call__(self, ids: Sequence[int], proposal: Proposal) -> Verified:
        """The tokens that follow `ids`: at most one more than were proposed."""


def rounds(
    prompt: Sequence[int], max_tokens: int, num_draft_tokens: int, propose: Propose, verify: Verify
) -> Iterator[Round]:
    """Generate up to `max_tokens` tokens behind `prompt`, a round of proposal and check at a time.

    The tokens are those that the large model would have given alone. A round that shows none of its own tokens met an
    end token or a stop word: a token that it disagrees about would differ from the one proposed.
    """
    ids, left = list(prompt), max_tokens
    while left > 0:
        size = min(num_draft_tokens, left - 1)
        proposal = propose(ids, size) if size > 0 else Proposal()
        found = verify(ids, proposal)
        accepted = _common(found.ids, proposal.ids)
        ids += found.ids
        left -= len(found.ids)
        yield Round(found.ids, found.log_probs, len(proposal.ids), accepted)
        if accepted == len(found.ids):
            return


def _common(found: Sequence[int], proposed: Sequence[int]) -> int:
    """Length of the common beginning."""
    count = 0
    for one, other in zip(found, proposed, strict=False):
        if one != other:
            break
        count += 1
    return count
