"""Processes that run batches: an engine or a peer behind lines of JSON, and our server behind gRPC.

Knows nothing of what is compared with what.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from clients import AsyncGrpcClient
from loadtests.bench.workload import Batch

ROOT = Path(__file__).resolve().parents[2]
_READY = re.compile(r"^READY \S+ grpc://(\S+) metrics=(\S+)")
START_TIMEOUT_S = 600


class BenchError(Exception):
    """A side of a comparison could not be measured; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Run:
    """One batch, run once. Seconds since the batch was submitted."""

    wall_s: float
    output_tokens: int
    ttft_s: tuple[float, ...]
    latency_s: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over the whole time, prefill included."""
        return self.output_tokens / self.wall_s


class Driver(Protocol):
    """Runs batches."""

    name: str

    def run(self, batch: Batch) -> Run:
        """Run one batch to its end."""
        ...

    def close(self) -> None:
        """End the process."""
        ...


class LineDriver:
    """A process that takes one batch per line of JSON and answers with one line."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.ready_s: float = self._read()["ready_s"]

    def run(self, batch: Batch) -> Run:
        """Run one batch to its end.

        Raises:
            BenchError: the process reported an error or ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(batch.as_json()) + "\n")
        self._process.stdin.flush()
        found = self._read()
        run = Run(found["wall_s"], found["output_tokens"], tuple(found["ttft_s"]), tuple(found["latency_s"]))
        if run.output_tokens != batch.output_tokens:
            raise BenchError(f"{self.name} made {run.output_tokens} tokens instead of {batch.output_tokens}.")
        return run

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries print as well
                found: dict[str, Any] = json.loads(line)
                if "error" in found:
                    raise BenchError(f"{self.name}: {found['error']}")
                return found
        assert self._process.stderr is not None
        last = self._process.stderr.read().strip().splitlines()[-3:]
        raise BenchError(f"{self.name} ended with code {self._process.wait()}: {' '.join(last)}")


_SERVE = ("make", "--silent", "serve", "HTTP_PORT=0", "GRPC_PORT=0", "METRICS_PORT=0")


class ServerDriver:
    """`make serve` in a process of its own; batches are streams over gRPC, through the ensemble."""

    def __init__(self, name: str = "server", command: Sequence[str] = _SERVE) -> None:
        self.name = name
        begun = time.monotonic()
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.grpc_url, self.metrics_url = self._await_ready()
        self.ready_s = time.monotonic() - begun
        self._loop = asyncio.new_event_loop()
        self._client = self._loop.run_until_complete(self._connect())

    @classmethod
    def of_spec(cls, name: str, spec: Path, engines_dir: Path) -> ServerDriver:
        """A server of another spec than `make serve` has, its engine built where nobody else's is."""
        ports = [word for port in ("http", "grpc", "metrics") for word in (f"--{port}-port", "0")]
        command = [sys.executable, "-m", "python_backend.server", "--exit-with-parent", *ports]
        return cls(name, [*command, "--spec", str(spec), "--engines-dir", str(engines_dir)])

    def run(self, batch: Batch) -> Run:
        """Run one batch to its end, every request a stream.

        Raises:
            BenchError: an answer has not the length that was asked for.
        """
        return self.run_with(batch, {})

    def run_with(self, batch: Batch, fields: Mapping[str, Any]) -> Run:
        """The same with more fields in every request."""
        return self._loop.run_until_complete(self._run(batch, fields))

    def asking(self, name: str, **fields: Any) -> AskingDriver:
        """The same server, for requests that ask for more."""
        return AskingDriver(name, self, fields)

    def close(self) -> None:
        """Stop the server."""
        self._loop.run_until_complete(self._client.close())
        self._loop.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait(30)

    def _await_ready(self) -> tuple[str, str]:
        assert self._process.stdout is not None
        lines: list[str] = []
        for line in self._process.stdout:
            lines.append(line)
            ready = _READY.match(line)
            if ready:
                return ready[1], ready[2]
        raise BenchError(f"make serve ended before READY: {''.join(lines[-3:])}")

    async def _connect(self) -> AsyncGrpcClient:
        client = AsyncGrpcClient(self.grpc_url)
        await client.info()
        return client

    async def _run(self, batch: Batch, fields: Mapping[str, Any]) -> Run:
        begun = time.monotonic()

        async def ask(text: str, max_tokens: int, adapter: str) -> tuple[float, float]:
            first = 0.0
            asked = {"max_tokens": max_tokens, "end_id": -1, "lora_name": adapter or None, **fields}
            async with await self._client.stream(text, **asked) as stream:
                async for _ in stream:
                    first = first or time.monotonic()
            if stream.result.finish_reason != "length":
                raise BenchError(f"An answer ended by {stream.result.finish_reason}, not by its length.")
            return first - begun, time.monotonic() - begun

        adapters = batch.adapters or [""] * len(batch.texts)
        asked = zip(batch.texts, batch.max_tokens, adapters, strict=True)
        times = await asyncio.gather(*(ask(*each) for each in asked))
        wall = time.monotonic() - begun
        return Run(wall, batch.output_tokens, tuple(first for first, _ in times), tuple(last for _, last in times))


class AskingDriver:
    """Runs batches on a server that another driver has started, with more fields in every request."""

    def __init__(self, name: str, server: ServerDriver, fields: Mapping[str, Any]) -> None:
        self.name = name
        self._server, self._fields = server, fields

    def run(self, batch: Batch) -> Run:
        """Run one batch to its end."""
        return self._server.run_with(batch, self._fields)

    def close(self) -> None:
        """Nothing: the server ends with its own driver."""


def engine_driver(engine: Path, name: str = "engine", **changes: Any) -> LineDriver:
    """Our engine without Triton; `changes` are fields of its configuration."""
    options = ["--engine", str(engine), "--set", json.dumps(changes)]
    return LineDriver(name, [sys.executable, "-m", "python_backend.engine.drive", *options])
