"""What a process has to know to take part in a load test; travels from the one that leads to its workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from clients import ClientError
from loadtests.crew import Crew, Finished
from loadtests.errors import EnvironmentFault
from loadtests.exchange import Exchange
from loadtests.texts import Library
from loadtests.token_counts import TokenCounter
from loadtests.transports import TransportName
from loadtests.workloads import Setting, Workload, make


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The server, and what to ask of it in which way."""

    http_url: str
    grpc_url: str
    workload: str
    transport: TransportName = "grpc-stream"
    seed: int = 1
    salt: str = ""
    adapters: tuple[str, ...] = ()
    trace: str | None = None
    trace_scale: float = 1.0
    max_seq_len: int = 4096
    timeout_s: float = 120.0
    think_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Job:
        """From as_dict(), after a journey that may have made lists of tuples."""
        return cls(**{**values, "adapters": tuple(values["adapters"])})

    def make_workload(self) -> Workload:
        """The sequence of requests; asks the server how long the texts are.

        Raises:
            LoadTestError: no such workload, it lacks something, or no server answers.
        """
        setting = Setting(
            library=Library.load(TokenCounter(self.http_url)),
            seed=self.seed,
            salt=self.salt,
            adapters=self.adapters,
            trace=None if self.trace is None else Path(self.trace),
            trace_scale=self.trace_scale,
            max_seq_len=self.max_seq_len,
        )
        return make(self.workload, setting)

    def make_crew(self, finished: Finished, share: tuple[int, int] = (0, 1)) -> Crew:
        """The users of one process, connected.

        Raises:
            LoadTestError: as make_workload.
        """
        exchange = Exchange(self.transport, self.http_url, self.grpc_url, self.timeout_s)
        try:
            exchange.connect()
        except ClientError as error:
            raise EnvironmentFault(f"The server cannot be asked by {self.transport}: {error}") from None
        return Crew(self.make_workload(), exchange, finished, share)
