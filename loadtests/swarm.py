"""All users of a test, in this process or in workers, seen from the one that leads.

Knows nothing of stages, SLOs and reports.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import gevent
from locust.env import Environment
from locust.runners import STATE_MISSING

from loadtests import clock
from loadtests.arrivals import Arrivals
from loadtests.errors import EnvironmentFault, LoadTestError, UsageFault
from loadtests.job import Job
from loadtests.ledger import Ledger, next_index
from loadtests.users import LlmUser
from loadtests.worker import Worker

CONNECT_TIMEOUT_S = 60.0
_SPAWN_RATE = 100.0  # users per second; locust warns above
_LEAD_S = 0.3  # between telling the workers of arrivals and the first


class Swarm:
    """Start and stop users, set arrivals. Made by local() or led()."""

    def __init__(self, environment: Any, ledger: Ledger, workers: int) -> None:
        self.environment, self.ledger = environment, ledger
        self._runner = environment.runner
        self._workers = workers
        self._answers: list[Any] = []
        self._runner.register_message("requests", self._take)
        self._runner.register_message("configured", self._configured)

    def configure(self, job: Job) -> None:
        """Tell every process what to do and wait until all are connected to the server.

        Raises:
            LoadTestError: one of them cannot.
        """
        self.environment.host = job.http_url
        nodes = list(self._runner.clients) if hasattr(self._runner, "clients") else [None]
        for number, node in enumerate(nodes):
            self._runner.send_message(
                "configure", {"job": job.as_dict(), "share": [number, len(nodes)]}, *([node] if node else [])
            )
        _wait(lambda: len(self._answers) == len(nodes), f"only {len(self._answers)} of {len(nodes)} workers answer")
        for answer in self._answers:
            if answer["problem"] is not None:
                code, text = answer["problem"]
                raise {2: UsageFault, 3: EnvironmentFault}.get(code, LoadTestError)(text)

    def users(self, count: int) -> None:
        """Closed loop: so many users from now on."""
        self._runner.start(count, spawn_rate=_SPAWN_RATE)

    def arrive(self, arrivals: Arrivals, first_index: int | None = None) -> float:
        """Open loop: arrivals from now on; returns when they begin.

        Args:
            first_index: the item of the first one; None: the first that was not used yet.
        """
        start_at = clock.now() + _LEAD_S
        message = {
            "arrivals": arrivals.as_dict(),
            "start_at": start_at,
            "first_index": next_index(self.ledger.records) if first_index is None else first_index,
        }
        self._runner.send_message("arrivals", message)
        self.users(self._workers)  # one user of each process makes its share of the arrivals
        return start_at

    def idle(self) -> None:
        """No more requests; those under way go on."""
        self._runner.send_message("arrivals", None)

    def abandon(self) -> None:
        """No more requests, and an end of those under way."""
        self._runner.send_message("abandon", None)

    def settle(self, moment: float, within_s: float) -> bool:
        """Wait until everything that was meant to start before a moment is over; False when time runs out.

        Raises:
            EnvironmentFault: as check().
        """
        deadline = clock.now() + within_s
        while not self.ledger.is_settled(moment):
            self.check()
            if clock.now() > deadline:
                return False
            gevent.sleep(0.1)
        return True

    def check(self) -> None:
        """Raises:
        EnvironmentFault: a worker is lost, and with it its share of the requests.
        """
        if not hasattr(self._runner, "clients"):
            return
        there = sum(client.state != STATE_MISSING for client in self._runner.clients.values())
        if there < self._workers:
            raise EnvironmentFault(
                f"Only {there} of {self._workers} workers are left; without the share of the others nothing that is "
                "measured now means anything."
            )

    def stop(self) -> None:
        """End all users, and what they have under way."""
        self._runner.stop()

    def _take(self, msg: Any, **_: Any) -> None:
        self.ledger.add(msg.data)

    def _configured(self, msg: Any, **_: Any) -> None:
        self._answers.append(msg.data)


@contextlib.contextmanager
def local() -> Iterator[Swarm]:
    """Users in this process."""
    environment = _environment()
    environment.create_local_runner()
    Worker(environment)
    with _quitting(environment):
        yield Swarm(environment, Ledger(), 1)


@contextlib.contextmanager
def led(bind_host: str, bind_port: int, expected: int, spawn: bool) -> Iterator[Swarm]:
    """Users in worker processes.

    Args:
        bind_host: where the workers connect to.
        bind_port: likewise.
        expected: how many workers to wait for.
        spawn: start them here; otherwise they are started elsewhere with --worker.

    Raises:
        EnvironmentFault: they do not connect.
    """
    environment = _environment()
    runner = environment.create_master_runner(bind_host, bind_port)
    command = [sys.executable, "-m", "loadtests", "--worker", f"127.0.0.1:{bind_port}"]
    processes = [
        # A session of its own: Ctrl-C is for the one that leads, which then ends them.
        subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        for _ in range(expected if spawn else 0)
    ]
    try:
        with _quitting(environment):
            timeout_s = CONNECT_TIMEOUT_S if spawn else 10 * CONNECT_TIMEOUT_S
            _wait(lambda: len(runner.clients) >= expected, f"{expected} workers did not connect", timeout_s)
            yield Swarm(environment, Ledger(), expected)
    finally:
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


def _environment() -> Any:
    # Failures of requests are counted and shown by us; locust's own log would repeat each of them.
    logging.getLogger("locust").setLevel(logging.ERROR)
    return Environment(user_classes=[LlmUser])


@contextlib.contextmanager
def _quitting(environment: Any) -> Iterator[None]:
    try:
        yield
    finally:
        environment.runner.quit()
        environment.events.quitting.fire(environment=environment, reverse=True)


def _wait(is_done: Any, problem: str, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
    deadline = clock.now() + timeout_s
    while not is_done():
        if clock.now() > deadline:
            raise EnvironmentFault(f"{problem} within {timeout_s:g} s.")
        gevent.sleep(0.05)


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
