"""When requests arrive in open loop: whatever the server does, the next one comes at its time.

Knows nothing of what arrives.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class Arrivals(Protocol):
    """A sequence of moments."""

    def times(self) -> Iterator[float]:
        """Seconds after the start, never falling."""
        ...

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for the way to a worker; see of()."""
        ...


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals. The same seed gives the same pattern at every rate, only stretched."""

    rate: float  # requests per second
    seed: int = 1

    def times(self) -> Iterator[float]:
        """Seconds after the start, endless."""
        rng = random.Random(f"arrivals/{self.seed}")
        now = 0.0
        while True:
            now += rng.expovariate(1.0) / self.rate
            yield now

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"kind": "poisson", "rate": self.rate, "seed": self.seed}


@dataclass(frozen=True, slots=True)
class Counted:
    """Independent arrivals of which as many come as the rate says, in each group of them: the luck of a short window is
    when they come, not how many.

    Given their number, the moments of a Poisson process are independent and uniform (Ross, Stochastic Processes,
    theorem 2.3.1).
    """

    rate: float  # requests per second
    group: int  # so many in every group / rate seconds
    seed: int = 1

    def times(self) -> Iterator[float]:
        """Seconds after the start, endless."""
        rng = random.Random(f"arrivals/{self.seed}")
        for number in itertools.count():
            moments = sorted(rng.random() for _ in range(self.group))
            yield from ((number + moment) * self.group / self.rate for moment in moments)

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"kind": "counted", "rate": self.rate, "group": self.group, "seed": self.seed}


@dataclass(frozen=True, slots=True)
class Even:
    """Arrivals at equal distances."""

    rate: float

    def times(self) -> Iterator[float]:
        """Seconds after the start, endless."""
        number = 0
        while True:
            yield number / self.rate
            number += 1

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"kind": "even", "rate": self.rate}


@dataclass(frozen=True, slots=True)
class Bursts:
    """Groups that arrive at the same moment, the groups independent of each other."""

    rate: float  # requests per second on average
    size: int
    seed: int = 1

    def times(self) -> Iterator[float]:
        """Seconds after the start, endless."""
        for moment in Poisson(self.rate / self.size, self.seed).times():
            for _ in range(self.size):
                yield moment

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"kind": "bursts", "rate": self.rate, "size": self.size, "seed": self.seed}


@dataclass(frozen=True, slots=True)
class Recorded:
    """The moments of a trace."""

    at_s: tuple[float, ...] = field(repr=False)
    speed: float = 1.0  # 2: twice as fast

    def times(self) -> Iterator[float]:
        """Seconds after the start; ends with the trace."""
        return (at / self.speed for at in self.at_s)

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"kind": "recorded", "at_s": self.at_s, "speed": self.speed}


_KINDS: dict[str, Any] = {"poisson": Poisson, "counted": Counted, "even": Even, "bursts": Bursts, "recorded": Recorded}


def of(values: Mapping[str, Any]) -> Arrivals:
    """From as_dict(), after a journey that may have made lists of tuples."""
    known = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    kind = str(known.pop("kind"))
    made: Arrivals = _KINDS[kind](**known)
    return made
