"""Which tokens may not come next: bad words, repeated n-grams, and end ids before min_tokens.

Knows nothing of logits. Words and n-grams are looked for in prompt and output together, as in TensorRT-LLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from python_backend.request import GenerationRequest


class TokenBans:
    """The bans of one sequence, which only ever grows."""

    __slots__ = ("_ban_ends_until", "_end_ids", "_ngrams", "_single", "_words")

    def __init__(self, request: GenerationRequest) -> None:
        words = [word for word in request.bad_words if word]
        self._single = {word[0] for word in words if len(word) == 1}
        self._words = [word for word in words if len(word) > 1]
        size = request.sampling.no_repeat_ngram_size
        self._ngrams = NgramIndex(size) if size else None
        self._end_ids = request.end_ids
        self._ban_ends_until = len(request.prompt_ids) + request.sampling.min_tokens if request.end_ids else 0

    @staticmethod
    def wanted(request: GenerationRequest) -> bool:
        """Whether the request can ban anything."""
        sampling = request.sampling
        return bool(request.bad_words or sampling.no_repeat_ngram_size or (sampling.min_tokens and request.end_ids))

    def copy(self) -> TokenBans:
        """An independent twin, for a beam that forks."""
        twin = object.__new__(TokenBans)
        for name in self.__slots__:
            setattr(twin, name, getattr(self, name))
        if self._ngrams is not None:
            twin._ngrams = self._ngrams.copy()
        return twin

    def next_banned(self, token_ids: Sequence[int]) -> set[int]:
        """Token ids that may not follow `token_ids` (prompt and output); some may lie outside the vocabulary."""
        banned = set(self._single)
        for word in self._words:
            context = len(word) - 1
            if tuple(token_ids[-context:]) == word[:-1]:
                banned.add(word[-1])
        if self._ngrams is not None:
            banned |= self._ngrams.next_repeats(token_ids)
        if self.ends_banned(token_ids):
            banned.update(self._end_ids)
        return banned

    def ends_banned(self, token_ids: Sequence[int]) -> bool:
        """Whether min_tokens still forbids to end."""
        return len(token_ids) < self._ban_ends_until


class NgramIndex:
    """Which token followed which run of n - 1 tokens so far."""

    __slots__ = ("_context", "_followers", "_num_indexed")

    def __init__(self, size: int) -> None:
        self._context = size - 1
        self._followers: dict[tuple[int, ...], set[int]] = {}
        self._num_indexed = 0

    def copy(self) -> NgramIndex:
        """An independent twin."""
        twin = NgramIndex(self._context + 1)
        twin._followers = {context: set(tokens) for context, tokens in self._followers.items()}
        twin._num_indexed = self._num_indexed
        return twin

    def next_repeats(self, token_ids: Sequence[int]) -> set[int]:
        """Tokens that would complete an n-gram that `token_ids` holds already."""
        length, context = len(token_ids), self._context
        if length < self._num_indexed:
            self._followers.clear()
            self._num_indexed = 0
        for end in range(max(self._num_indexed, context), length):
            key = tuple(token_ids[end - context : end])
            self._followers.setdefault(key, set()).add(token_ids[end])
        self._num_indexed = length
        if length < context:
            return set()
        return self._followers.get(tuple(token_ids[length - context :]), set())
