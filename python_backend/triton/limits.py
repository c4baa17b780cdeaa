"""What a deployment serves, for checks at the border. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from python_backend.engine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """What this deployment serves; sizes in tokens."""

    vocab_size: int
    max_seq_len: int
    max_input_len: int
    max_beam_width: int
    max_batch_size: int
    decoupled: bool
    exclude_input_in_output: bool

    @classmethod
    def of(cls, config: EngineConfig, vocab_size: int, decoupled: bool, exclude_input_in_output: bool) -> ServingLimits:
        """Limits of an engine and of the model that fronts it."""
        return cls(
            vocab_size=vocab_size,
            max_seq_len=config.max_seq_len,
            max_input_len=config.max_input_len,
            max_beam_width=config.max_beam_width,
            max_batch_size=config.max_batch_size,
            decoupled=decoupled,
            exclude_input_in_output=exclude_input_in_output,
        )
