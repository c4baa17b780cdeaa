"""A guide that is complete before the tokens run out: budget-aware closing.

A way to complete the structure within the tokens left is always at hand. A chosen token stands where such a way leads
on from it, and otherwise gives place to the first token of the way at hand; so the model chooses freely for as long as
there is room. Knows nothing of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from python_backend.errors import EngineFailure
from python_backend.guided.completion import (
    Searchable,
    SearchLimits,
    TokenOrder,
    advanced,
    shortest_completion,
    spliced,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    import numpy as np

    class ClosableMask(Searchable, Protocol):
        """A matcher, or one behind a marker."""

        def fork(self) -> ClosableMask:
            """An independent twin."""

        @property
        def finished(self) -> bool:
            """Whether nothing can follow."""


# On the step thread, where the ways of others are waiting: a search that fails only closes the structure earlier.
STEP_LIMITS = SearchLimits(max_forks=192, seconds=0.01, first=True)


@dataclass(frozen=True, slots=True)
class Closer:
    """Finds completions for one tokenizer.

    Args:
        order: of the vocabulary.
        vocab_size: width of the logits.
    """

    order: TokenOrder
    vocab_size: int

    def completion(
        self,
        mask: Searchable,
        limit: int,
        end_ids: Sequence[int],
        lead_in: Sequence[int] = (),
        *,
        limits: SearchLimits | None = None,
        known: Sequence[int] = (),
    ) -> list[int] | None:
        """At most `limit` tokens that complete the structure; where it has not begun, behind those of `lead_in`."""
        begun = mask
        before = [] if getattr(mask, "begun", True) else list(lead_in)
        if before:
            behind = advanced(mask, before)
            if behind is None or not getattr(behind, "begun", True):
                return None
            begun = behind
        room = limit - len(before)
        found = shortest_completion(
            begun,
            room,
            self.order,
            vocab_size=self.vocab_size,
            end_ids=end_ids,
            limits=limits or SearchLimits(),
            known=known,
        )
        return None if found is None else before + found


class ClosingMask:
    """A mask whose structure is complete by `max_tokens`.

    Args:
        mask: at its beginning.
        closer: of the tokenizer.
        completion: a way to complete it from there, `max_tokens` long at most.
        max_tokens: of the answer.
        end_ids: one of them ends the answer where no other token leads on; not empty.
        lead_in: tokens of the marker behind which the structure begins.
    """

    __slots__ = ("_closer", "_completion", "_end_ids", "_lead_in", "_mask", "_next", "_num_left")

    def __init__(
        self,
        mask: ClosableMask,
        closer: Closer,
        *,
        completion: Sequence[int],
        max_tokens: int,
        end_ids: tuple[int, ...],
        lead_in: Sequence[int] = (),
    ) -> None:
        self._mask, self._closer, self._completion = mask, closer, list(completion)
        self._num_left, self._end_ids, self._lead_in = max_tokens, end_ids, lead_in
        self._next: tuple[int, list[int]] | None = None  # a settled token and the completion behind it

    def fill(self, bitmask: np.ndarray) -> None:
        """Write the allowed tokens, one bit each, into int32 [ceil(vocab / 32)]."""
        self._mask.fill(bitmask)

    def settle(self, token_id: int) -> int:
        """The token to take: the one chosen, or the one that completes the structure in time."""
        if token_id in self._end_ids:
            return token_id
        completion = self._behind([token_id])
        if completion is None:
            if not self._completion:
                return self._end_ids[0]
            token_id, completion = self._completion[0], self._completion[1:]
        self._next = (token_id, completion)
        return token_id

    def accept(self, token_id: int) -> None:
        """Take a token that `settle` or `forced_tokens` gave."""
        if self._next is not None and self._next[0] == token_id:
            self._completion = self._next[1]
        elif self._completion[:1] == [token_id]:
            del self._completion[0]
        else:
            raise EngineFailure(f"Token {token_id} was not settled; the structure could not be closed in time.")
        self._next = None
        self._mask.accept(token_id)
        self._num_left -= 1

    def forced_tokens(self) -> list[int]:
        """Tokens that must come next, unless writing them in this way would take too many."""
        tokens = self._mask.forced_tokens()
        tokens = tokens[: next((i for i, token_id in enumerate(tokens) if token_id in self._end_ids), len(tokens))]
        if not tokens:
            return []
        completion = self._behind(tokens)
        if completion is None:
            return []
        self._completion = tokens + completion
        return tokens

    @property
    def finished(self) -> bool:
        """Whether the structure is complete and nothing can follow."""
        return self._mask.finished

    def _behind(self, tokens: list[int]) -> list[int] | None:
        """A completion that fits behind these tokens."""
        if self._completion[: len(tokens)] == tokens:
            return self._completion[len(tokens) :]
        limit = self._num_left - len(tokens)
        behind = advanced(self._mask, tokens)
        if behind is None or limit < 0:
            return None
        # Inside a string or a number the way at hand stays the right one, or its end does.
        end = spliced(behind, self._completion, limit)
        if end is not None:
            return end
        return self._closer.completion(
            behind, limit, self._end_ids, self._lead_in, limits=STEP_LIMITS, known=self._completion
        )
