"""A launcher process under test, and the search for what it leaves behind."""

from __future__ import annotations

import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_READY = re.compile(r"^READY http://([\d.]+:\d+) grpc://([\d.]+:\d+) metrics=http://([\d.]+:\d+)/metrics")
_LOG = re.compile(r"its log is \S*-(\d+)\.log")


@dataclass(frozen=True, slots=True)
class ServerAddresses:
    """host:port of each service, as tritonclient's clients take them."""

    http: str
    grpc: str
    metrics: str


class LaunchedServer:
    """One `python -m python_backend.server` (or a command that ends in one), with its output read as it comes."""

    def __init__(self, *arguments: str, command: list[str] | None = None) -> None:
        ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            command or [sys.executable, "-m", "python_backend.server", *ports, *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self.launcher_pid = self.process.pid
        self._queue: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def wait_ready(self, timeout_s: float = 180) -> ServerAddresses:
        """The addresses of the READY line; fails with the whole output when there is none."""
        deadline = time.monotonic() + timeout_s
        while (line := self._queue.get(timeout=max(0.01, deadline - time.monotonic()))) is not None:
            named = _LOG.search(line)
            if named:
                self.launcher_pid = int(named[1])
            ready = _READY.match(line)
            if ready:
                return ServerAddresses(*ready.groups())
        raise AssertionError(f"ended with {self.process.wait()} before READY: {self.output}")

    def wait(self, timeout_s: float = 60) -> int:
        """The exit code, after all output has been read."""
        code = self.process.wait(timeout_s)
        while self._queue.get(timeout=timeout_s) is not None:
            pass
        return code

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def leftovers(self) -> list[str]:
        """Processes and files of this server that exist now."""
        mark = f".{self.launcher_pid}-"
        found = [str(path) for folder in ("/dev/shm", "/tmp") for path in Path(folder).glob(f"triton-llm-*{mark}*")]
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                arguments = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if "triton-llm-" in arguments and mark in arguments:
                found.append(f"process {path.parent.name}: {arguments}")
        return found

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            self._queue.put(line)
        self._queue.put(None)


def is_open(address: str) -> bool:
    """True when somebody listens at host:port."""
    host, _, port = address.partition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except OSError:
        return False
    return True


def assert_nothing_left(server: LaunchedServer, addresses: ServerAddresses, within_s: float) -> None:
    """Waits until no process, file or port of the server exists; fails with what is left after within_s seconds."""
    deadline = time.monotonic() + within_s
    ports = (addresses.http, addresses.grpc, addresses.metrics)
    while left := server.leftovers() + [port for port in ports if is_open(port)]:
        assert time.monotonic() < deadline, f"left after {within_s} s: {left}"
        time.sleep(0.05)
