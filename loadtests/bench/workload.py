"""Seeded prompts and traces; both sides of a comparison get the same ones.

Knows nothing of engines and servers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

FIRST_PLAIN_ID = 300
"""Ids from here on are no special tokens in the demo model's vocabulary, nor single bytes."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that are submitted at once. Greedy, and no token ends them."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]
    texts: tuple[str, ...] = ()  # the same prompts as text, where a server gets them
    adapters: tuple[str, ...] = ()  # names, one for each request; none: no request has an adapter

    @property
    def output_tokens(self) -> int:
        """How many tokens have to come back."""
        return sum(self.max_tokens)

    def as_json(self) -> dict[str, Any]:
        """What a driver process reads."""
        return {"prompts": self.prompts, "max_tokens": self.max_tokens, "streaming": True, "texts": self.texts}


class Workload:
    """Makes batches for one vocabulary; every call gives other prompts, so that no cache helps by accident."""

    def __init__(self, tokenizer_file: Path, seed: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self.seed = seed
        self._random = random.Random(seed)
        self._plain = range(FIRST_PLAIN_ID, self._tokenizer.get_vocab_size(with_added_tokens=False))

    def random_ids(self, length: int) -> tuple[int, ...]:
        """A prompt of random tokens."""
        return tuple(self._random.choices(self._plain, k=length))

    def same_length(self, count: int, prompt_tokens: int, max_tokens: int) -> Batch:
        """Prompts and answers of fixed lengths, random tokens."""
        prompts = tuple(self.random_ids(prompt_tokens) for _ in range(count))
        return Batch(prompts, (max_tokens,) * count)

    def same_length_text(self, count: int, prompt_tokens: int, max_tokens: int) -> Batch:
        """The same as text that the tokenizer turns into exactly so many tokens."""
        pairs = [self._text(prompt_tokens) for _ in range(count)]
        return Batch(tuple(ids for ids, _ in pairs), (max_tokens,) * count, tuple(text for _, text in pairs))

    def mixed_lengths(self, count: int, prompt_tokens: int) -> Batch:
        """A trace: 90 % of the answers take 8 to 32 tokens, 10 % take 256, in random order."""
        long = max(1, count // 10)
        lengths = [256] * long + [self._random.randint(8, 32) for _ in range(count - long)]
        self._random.shuffle(lengths)
        return Batch(tuple(self.random_ids(prompt_tokens) for _ in lengths), tuple(lengths))

    def zipf(self, names: Sequence[str], count: int) -> tuple[str, ...]:
        """So many draws of names: the n-th is drawn 1/n as often as the first."""
        weights = [1 / place for place in range(1, len(names) + 1)]
        return tuple(self._random.choices(names, weights, k=count))

    def _text(self, length: int) -> tuple[tuple[int, ...], str]:
        while True:
            text = self._tokenizer.decode(self.random_ids(2 * length))
            cut = self._tokenizer.decode(self._tokenizer.encode(text, add_special_tokens=False).ids[:length])
            ids = self._tokenizer.encode(cut, add_special_tokens=False).ids
            if len(ids) == length and "\0" not in cut:
                return tuple(ids), cut
