"""All records of a test as they come in, and what is still under way where.

Knows nothing of locust and stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtests.records import Record


@dataclass(frozen=True, slots=True)
class Health:
    """How a process of this tool was doing; large figures mean that it, not the server, was measured."""

    at: float  # seconds since 1970
    worker: str
    cpu_s: float  # used since its start
    lag_s: float  # the longest time by which it woke too late since its last report


class Ledger:
    """What the workers reported."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.health: list[Health] = []
        self._open: dict[str, list[float]] = {}
        self._as_of: dict[str, float] = {}

    def add(self, report: Mapping[str, Any]) -> None:
        """Take one report of one worker."""
        worker = report["worker"]
        self.records += [Record.of(values) for values in report["records"]]
        self._open[worker] = list(report["open_since"])
        self._as_of[worker] = report["as_of"]
        self.health.append(Health(report["as_of"], worker, report["cpu_s"], report["lag_s"]))

    def started_in(self, begin: float, end: float) -> list[Record]:
        """Finished requests that were meant to start between two moments."""
        return [record for record in self.records if begin <= record.intended_at < end]

    def is_settled(self, moment: float) -> bool:
        """Whether every worker has reported since, and nothing that was meant to start before is under way."""
        if not self._as_of or min(self._as_of.values()) <= moment:
            return False
        return all(start >= moment for starts in self._open.values() for start in starts)

    def open_between(self, begin: float, end: float) -> list[float]:
        """Starts of the requests under way that were meant to start between two moments."""
        return [start for starts in self._open.values() for start in starts if begin <= start < end]

    @property
    def open_count(self) -> int:
        """How many requests are under way, as of the last reports."""
        return sum(map(len, self._open.values()))

    def tool_use(self, begin: float, end: float) -> dict[str, float]:
        """What this tool's processes with users took between two moments.

        Returns:
            `cores` of all of them, `busiest` of them alone, and `lag_s`, their longest delay in seconds.
        """
        cores = busiest = lag = 0.0
        for worker in {health.worker for health in self.health}:
            seen = [health for health in self.health if health.worker == worker and begin <= health.at <= end]
            if len(seen) > 1:
                used = (seen[-1].cpu_s - seen[0].cpu_s) / (seen[-1].at - seen[0].at)
                cores, busiest = cores + used, max(busiest, used)
            lag = max([lag, *(health.lag_s for health in seen)])
        return {"cores": cores, "busiest": busiest, "lag_s": lag}


def next_index(records: Sequence[Record]) -> int:
    """The first position of a workload that no request has used."""
    return max((record.index for record in records), default=-1) + 1
