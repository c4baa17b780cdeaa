"""Two engines that follow a rule instead of weights: a large one, and a small one that is wrong now and then."""

from __future__ import annotations

from collections.abc import Sequence

VOCAB = 120  # ids from FIRST on: no special tokens
FIRST = 20
END_EVERY = 37  # the large one ends where the length is a multiple


def next_id(ids: Sequence[int], end_id: int) -> int:
    """What the large engine picks behind `ids`."""
    if len(ids) % END_EVERY == 0:
        return end_id
    return FIRST + (7 * ids[-1] + 3 * ids[-2:][0] + len(ids)) % VOCAB


def draft_next_id(ids: Sequence[int], end_id: int) -> int:
    """What the small one picks: the same, three times of four."""
    found = next_id(ids, end_id)
    return found if len(ids) % 4 else FIRST + (found + 1) % VOCAB


def answer(ids: Sequence[int], max_tokens: int, end_id: int, proposed: Sequence[int] | None = None) -> list[int]:
    """The large engine's tokens; with a proposal, those of it that it agrees with and one of its own."""
    found = list(ids)
    for index in range(max_tokens):
        token = next_id(found, end_id)
        if token == end_id:
            break
        found.append(token)
        if proposed is not None and (index >= len(proposed) or proposed[index] != token):
            break
    return found[len(ids) :]


def propose(ids: Sequence[int], size: int, end_id: int) -> list[int]:
    """The small engine's tokens."""
    found = list(ids)
    for _ in range(size):
        token = draft_next_id(found, end_id)
        if token == end_id:
            break
        found.append(token)
    return found[len(ids) :]
