"""embedding_bias_words and their weights as one row of numbers to add to the logits. Knows nothing of Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from python_backend.errors import InvalidRequest, out_of_range
from python_backend.text.words import clean_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from python_backend.text.tokenizer import Tokenizer


def embedding_bias(tokenizer: Tokenizer, words: Sequence[str], weights: Sequence[float]) -> npt.NDArray[np.float32]:
    """float32 [vocab_size]: each word's weight on each of its tokens, added up.

    As upstream has it, a word is tokenised with the tokenizer's special tokens, so a BOS gets the weight too (no model
    writes one). An empty word is skipped together with its weight.

    Raises:
        InvalidRequest: the counts differ, or a weight is NaN or +inf.
    """
    if len(words) != len(weights):
        raise InvalidRequest(
            f"embedding_bias_words has {len(words)} words and embedding_bias_weights has {len(weights)} weights; "
            "send one weight for each word."
        )
    for weight in weights:
        if np.isnan(weight) or weight == np.inf:
            raise out_of_range("embedding_bias_weights", weight, "finite numbers, and -inf to ban a token")
    clean_words(words, "embedding_bias_words")
    bias = np.zeros(tokenizer.vocab_size, np.float32)
    for word, weight in zip(words, weights, strict=True):
        if word:
            np.add.at(bias, tokenizer.encode(word), np.float32(weight))
    return bias
