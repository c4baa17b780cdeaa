"""The server under test: one that is there, or the demo server in a process of its own for as long as the test takes.

Knows of the server only its command line, its READY line and its addresses.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import gevent
import urllib3

from loadtests.errors import EnvironmentFault, UsageFault

ROOT = Path(__file__).resolve().parents[1]
_READY = re.compile(r"^READY (\S+) grpc://(\S+) metrics=(\S+) after")
_STOP_S = 30


@dataclass(frozen=True, slots=True)
class Server:
    """Addresses of one server."""

    http_url: str
    grpc_url: str  # host:port
    metrics_url: str | None
    process: subprocess.Popen[str] | None = field(default=None, compare=False)  # when it was started for the test

    @property
    def started_here(self) -> bool:
        """Whether it was started for the test."""
        return self.process is not None

    def check_running(self) -> None:
        """Raises:
        EnvironmentFault: it was started for the test and has ended.
        """
        code = None if self.process is None else self.process.poll()
        if code is not None:
            raise EnvironmentFault(f"The server ended with code {code} during the test; its log says why.")

    @classmethod
    def at(cls, host: str, grpc_url: str | None = None, metrics_url: str | None = None) -> Server:
        """A server by its HTTP address; gRPC and metrics are on the next two ports unless told otherwise.

        Raises:
            UsageFault: the address cannot be read.
        """
        parts = urlsplit(host if "://" in host else f"http://{host}")
        if not parts.hostname:
            raise UsageFault(f"HOST={host} is no address; give host:port of the server's HTTP endpoint.")
        port = parts.port or 8000
        scheme = parts.scheme or "http"
        return cls(
            f"{scheme}://{parts.hostname}:{port}",
            (grpc_url or f"{parts.hostname}:{port + 1}").removeprefix("grpc://"),
            metrics_url or f"http://{parts.hostname}:{port + 2}/metrics",
        )

    def check(self) -> None:
        """Raises:
        EnvironmentFault: it is not ready.
        """
        try:
            reply = urllib3.request("GET", f"{self.http_url}/v2/health/ready", timeout=5, retries=False)
        except urllib3.exceptions.HTTPError as error:
            raise EnvironmentFault(f"No server answers at {self.http_url} ({_reason(error)}).") from None
        if reply.status == 404:
            raise EnvironmentFault(f"What answers at {self.http_url} is no Triton: it has no /v2/health/ready.")
        if reply.status != 200:
            raise EnvironmentFault(f"The server at {self.http_url} is not ready (HTTP {reply.status}).")


def _reason(error: Exception) -> str:
    if isinstance(error, urllib3.exceptions.ProtocolError):
        return "what listens there does not speak HTTP; HOST is the HTTP port, gRPC's is the next one as a rule"
    return str(error).partition(": ")[2] or str(error)


@contextlib.contextmanager
def demo_server(spec: Path | None, say: Callable[[str], None]) -> Iterator[Server]:
    """The demo deployment, or that of a spec, on free ports; stopped at the end.

    Raises:
        EnvironmentFault: it ended before it was ready; the message holds its last words.
    """
    ports = [word for name in ("http", "grpc", "metrics") for word in (f"--{name}-port", "0")]
    command = [sys.executable, "-m", "python_backend.server", "--exit-with-parent", *ports]
    process = subprocess.Popen(
        [*command, *(["--spec", str(spec)] if spec else [])],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # Ctrl-C is for the test, which then stops the server
    )
    try:
        yield _await_ready(process, say)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _await_ready(process: subprocess.Popen[str], say: Callable[[str], None]) -> Server:
    assert process.stdout is not None
    last: deque[str] = deque(maxlen=5)
    for line in process.stdout:
        ready = _READY.match(line)
        if ready:
            gevent.spawn(process.stdout.read)  # what it says from now on is in its log, and must not fill the pipe
            return Server(ready[1], ready[2], ready[3], process)
        last.append(line.rstrip())
        say(line.rstrip())
    raise EnvironmentFault(f"The server ended with code {process.wait()} before it was ready: {' / '.join(last)}")
