"""What a constraint backend gives: grammars, compiled guides, and matchers that say which tokens may come next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np

    from python_backend.guided.guide import CheckedGuide
    from python_backend.guided.keywords import Support


@dataclass(frozen=True, slots=True)
class Grammar:
    """A guide in the backend's own language."""

    text: str
    warnings: tuple[str, ...] = field(default=())


class Matcher(Protocol):
    """The state of one answer. It is the engine's TokenMask."""

    def fill(self, bitmask: np.ndarray) -> None:
        """Write the allowed tokens, one bit each, into int32 [ceil(vocab / 32)].

        Raises:
            EngineFailure: the structure has become too complex to go on.
        """

    def accept(self, token_id: int) -> None:
        """Take the next token; it must be an allowed one and no end id."""

    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back."""

    def fork(self) -> Matcher:
        """An independent twin in the same state."""

    def forced_tokens(self) -> list[int]:
        """Tokens that must come next, as the tokenizer itself would write them; they are not accepted yet."""

    @property
    def is_accepting(self) -> bool:
        """Whether the answer so far satisfies the structure."""

    @property
    def finished(self) -> bool:
        """Whether it does, and nothing can follow."""


class CompiledGuide(Protocol):
    """Made once, used by any number of answers."""

    def start(self, end_ids: tuple[int, ...]) -> Matcher:
        """A matcher at the beginning; `end_ids` become allowed where the structure may end, and nowhere else."""


class GuideBackend(Protocol):
    """One constraint library with one tokenizer."""

    name: str
    version: str
    support: Support

    def load_tokenizer(self, tokenizer_json: str, vocab_size: int, end_ids: tuple[int, ...]) -> None:
        """Make ready to compile.

        Args:
            tokenizer_json: text of tokenizer.json.
            vocab_size: width of the logits; may be more than the tokenizer has.
            end_ids: tokens that are never text.

        Raises:
            BuildError: the library cannot use this tokenizer, or the model has fewer tokens.
        """

    def grammar(self, guide: CheckedGuide) -> Grammar:
        """Translate a guide; needs no tokenizer.

        Raises:
            RequestError: it has no translation.
        """

    def compile(self, grammar: Grammar) -> CompiledGuide:
        """Compile, with the limits of the backend.

        Raises:
            RequestError: nothing satisfies it, or it is over a limit.
        """
