"""What can go wrong when a token is chosen, in the words for it. Knows nothing of how one is chosen."""

from __future__ import annotations

from python_backend.errors import EngineFailure


def not_finite() -> EngineFailure:
    """The model gave logits that no token can be chosen from."""
    return EngineFailure(
        "The model's logits hold NaN or infinity; allowed: finite numbers. "
        "Check the checkpoint, or serve it with precision exact."
    )


def all_banned(position: int) -> EngineFailure:
    """Mask, bad words, n-grams and bias together leave nothing to choose; `position` counts output tokens."""
    return EngineFailure(
        f"Every token is forbidden at output position {position}; at least one must be allowed. "
        "Relax bad_words, no_repeat_ngram_size, embedding_bias or the guide."
    )
