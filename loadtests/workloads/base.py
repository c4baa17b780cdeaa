"""What a workload is: a seeded, endless sequence of requests, each a function of its position alone.

So the same index is the same kind of request, with the same lengths, in every run, on every worker and at every load.
Knows nothing of transports.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from loadtests.texts import Library

CheckText = Callable[[str], "str | None"]
"""Looks at a complete answer; says what is wrong with it, or None."""


@dataclass(frozen=True, slots=True)
class Item:
    """One request: fields of clients.GenerateRequest, and what is known about it beforehand."""

    index: int
    workload: str
    fields: dict[str, Any]
    max_tokens: int
    adapter: str | None = None
    shared_tokens: int = 0  # of the prompt, known to repeat the beginning of an earlier request
    check: CheckText | None = field(default=None, compare=False)

    def request_fields(self) -> dict[str, Any]:
        """What goes into the request."""
        named = {} if self.adapter is None else {"lora_name": self.adapter}
        return {**self.fields, **named, "max_tokens": self.max_tokens}


@dataclass(frozen=True, slots=True)
class Setting:
    """What workloads are made with."""

    library: Library
    seed: int = 1  # of lengths, choices and arrivals
    salt: str = ""  # of the words: another one for each run, so that none profits from the prefix cache of the last
    adapters: tuple[str, ...] = ()
    trace: Path | None = None
    trace_scale: float = 1.0
    max_seq_len: int = 4096


class Workload(ABC):
    """A sequence of requests."""

    name: ClassVar[str]
    about: ClassVar[str]
    """One sentence for reports."""

    rates: ClassVar[tuple[float, ...] | None] = None
    """Requests per second to run at, for a workload that is open loop by nature; None: a ladder of users."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @abstractmethod
    def item(self, index: int) -> Item:
        """The request at a position."""

    def rng(self, *key: object) -> random.Random:
        """Random numbers that depend on the seed, the workload and the key only."""
        return random.Random(f"{self.setting.seed}/{self.name}/{'/'.join(map(str, key))}")

    def prose(self, tokens: int, *key: object) -> tuple[str, int]:
        """Text of a length in tokens and its true length, the same for the same key within a run."""
        return self.setting.library.prose.cut(self._text_rng(key), tokens)

    def code(self, tokens: int, *key: object) -> tuple[str, int]:
        """The same as code."""
        return self.setting.library.code.cut(self._text_rng(key), tokens)

    def _text_rng(self, key: tuple[object, ...]) -> random.Random:
        return self.rng("text", self.setting.salt, *key)


def log_normal(rng: random.Random, median: float, sigma: float, low: int, high: int) -> int:
    """A length as they occur: many short ones, few long ones, clipped to low..high."""
    return min(high, max(low, round(math.exp(rng.gauss(math.log(median), sigma)))))


def zipf(rng: random.Random, count: int, exponent: float = 1.0) -> int:
    """A number from 0 to count - 1, the first ones the likeliest: P(i) ~ 1 / (i + 1) ** exponent."""
    return rng.choices(range(count), [1 / (rank + 1) ** exponent for rank in range(count)])[0]


FIXED_LENGTH: dict[str, Any] = {"end_id": -1}
"""No token ends the answer: it has the length asked for, so that runs can be compared."""
