"""What is kept of one request: when it was meant to start, when each piece came, how it ended.

Knows nothing of transports, workloads and locust.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

UNFINISHED = "Unfinished"
"""Error class of a request that this test gave up waiting for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One request. Times with `_s` are seconds after `intended_at`; a count that the server did not give is None."""

    index: int  # position in the workload's sequence: the same index is the same request in every run of a seed
    workload: str
    transport: str
    intended_at: float  # seconds since 1970: when the request was meant to be sent, which is what latency counts from
    sent_s: float  # how much later it was sent
    end_s: float  # when the last response came, or the error
    chunk_s: tuple[float, ...] = ()  # when each piece came
    chunk_tokens: tuple[int, ...] = ()  # the server's count for each piece
    streamed: bool = True
    adapter: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    max_tokens: int = 0
    shared_tokens: int = 0  # of the prompt, known to repeat the beginning of an earlier one
    finish_reason: str | None = None
    error: str | None = None  # class of the failure
    message: str = ""
    queue_s: float | None = None  # the server's own figure: from arrival to the first step

    @property
    def ok(self) -> bool:
        """Whether the whole answer came."""
        return self.error is None

    @property
    def sent_at(self) -> float:
        """Seconds since 1970."""
        return self.intended_at + self.sent_s

    @property
    def end_at(self) -> float:
        """Seconds since 1970."""
        return self.intended_at + self.end_s

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for the way from a worker to its master."""
        return {name: getattr(self, name) for name in _NAMES}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Record:
        """From as_dict(), after a journey that may have made lists of tuples."""
        known = {name: values[name] for name in _NAMES if name in values}
        for name in ("chunk_s", "chunk_tokens"):
            known[name] = tuple(known.get(name, ()))
        return cls(**known)


_NAMES = tuple(field.name for field in fields(Record))
