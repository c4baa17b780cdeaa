"""What the engine asks of the outside: small protocols, so that it needs no tokenizer, grammar or adapter code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np


class TextStop(Protocol):
    """Finds stop strings in the text of one sequence as it grows."""

    def push(self, token_id: int) -> int | None:
        """Take one generated token.

        Returns:
            None while no stop string is complete; else how many characters of the text so far
            lie behind the place where the text has to end.
        """

    def held_tokens(self) -> int:
        """How many of the last tokens must not be shown yet, since they may belong to a stop string."""


class AdapterWeights(Protocol):
    """One LoRA adapter: small matrices beside the model's own."""

    @property
    def version(self) -> int:
        """Equal for equal content: what its prefix blocks and its place in the step are kept by."""

    @property
    def rank(self) -> int:
        """The largest rank of its matrices."""

    def low_rank(self, layer: int, projection: str) -> tuple[np.ndarray, np.ndarray] | None:
        """float32 (a [rank, in], b [out, rank]) with y += b @ (a @ x), or None where it changes nothing.

        `projection` is the linear's name within its layer, such as self_attn.q_proj. Scales are inside b.
        """


class TokenMask(Protocol):
    """Says which tokens may come next (constrained decoding)."""

    def fill(self, bitmask: np.ndarray) -> None:
        """Write the allowed tokens, one bit each, into int32 [ceil(vocab / 32)].

        Raises:
            RequestError: what is allowed cannot be found out; the request ends.
        """

    def accept(self, token_id: int) -> None:
        """Take the token that was chosen.

        Raises:
            RequestError: it is not allowed.
        """

    def forced_tokens(self) -> list[int]:
        """Tokens that must come next, whatever is chosen; `accept` has to follow for each that is taken."""

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing can follow."""


@runtime_checkable
class ForkableMask(TokenMask, Protocol):
    """A mask that beams can share until they part."""

    def fork(self) -> ForkableMask:
        """An independent twin in the same state."""


@runtime_checkable
class BudgetMask(TokenMask, Protocol):
    """A mask that sees to it that the text is complete before the tokens run out."""

    def settle(self, token_id: int) -> int:
        """The token to take in place of the one chosen, mostly that one; `accept` or the end has to follow."""
