"""The part of a load test that each process with users has, be it the only one or one of many.

Knows nothing of stages: it does what messages tell it and reports what came of it.
"""

from __future__ import annotations

import logging
import socket
import time
from typing import Any

import gevent
from locust.env import Environment

from loadtests import arrivals, clock
from loadtests.crew import OpenLoop
from loadtests.errors import EnvironmentFault, LoadTestError
from loadtests.job import Job
from loadtests.records import Record
from loadtests.users import LlmUser, report_to

REPORT_EVERY_S = 0.2
MASTER_S = 60.0  # so long may the test that leads take to listen


class Worker:
    """Connects a crew to a locust runner. Messages in: configure, arrivals, abandon. Out: configured, requests."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._runner = environment.runner
        self._tell_locust = report_to(environment)
        self._finished: list[Record] = []
        environment.crew = None
        environment.think_s, environment.seed = 0.0, 0
        self._runner.register_message("configure", self._configure, concurrent=True)
        self._runner.register_message("arrivals", self._arrivals)
        self._runner.register_message("abandon", self._stop)
        environment.events.test_start.add_listener(self._resume)
        environment.events.test_stop.add_listener(self._stop)
        environment.events.quitting.add_listener(self._quitting)

    def _configure(self, environment: Any, msg: Any, **_: Any) -> None:
        problem = None
        job = Job.of(msg.data["job"])
        try:
            environment.crew = job.make_crew(self._note, tuple(msg.data["share"]))
        except LoadTestError as error:
            problem = [error.exit_code, str(error)]
        environment.think_s, environment.seed = job.think_s, job.seed
        self._runner.send_message("configured", {"problem": problem})
        if problem is None:
            gevent.spawn(self._report)

    def _arrivals(self, environment: Any, msg: Any, **_: Any) -> None:
        if environment.crew is None:
            return
        if msg.data is None:
            environment.crew.set_open_loop(None)
            return
        process = OpenLoop(arrivals.of(msg.data["arrivals"]), msg.data["start_at"], msg.data["first_index"])
        environment.crew.set_open_loop(process)

    def _note(self, record: Record) -> None:
        self._finished.append(record)
        self._tell_locust(record)

    def _report(self) -> None:
        while True:
            gevent.sleep(REPORT_EVERY_S)
            self._send()

    def _send(self) -> None:
        crew = self._environment.crew
        done, self._finished = self._finished, []
        report = {
            "worker": self._runner.client_id,
            "as_of": clock.now(),
            "records": [record.as_dict() for record in done],
            "open_since": crew.open_since(),
            **crew.facts(),
        }
        self._runner.send_message("requests", report)

    def _resume(self, environment: Any, **_: Any) -> None:
        if environment.crew is not None:
            environment.crew.resume()

    def _stop(self, environment: Any, **_: Any) -> None:
        if environment.crew is not None:
            environment.crew.stop()

    def _quitting(self, environment: Any, **_: Any) -> None:
        if environment.crew is not None:
            environment.crew.close()


def run(master_host: str, master_port: int) -> int:
    """Work for a master until it says that it is over; returns the exit code.

    Raises:
        EnvironmentFault: nothing listens at its address for a minute.
    """
    logging.getLogger("locust").setLevel(logging.ERROR)
    _await_master(master_host, master_port)
    environment = Environment(user_classes=[LlmUser])
    runner = environment.create_worker_runner(master_host, master_port)
    Worker(environment)
    runner.greenlet.join()
    environment.events.quitting.fire(environment=environment, reverse=True)
    return 0


def _await_master(host: str, port: int) -> None:
    """Whichever of the two was started first: locust alone would wait for ever and say nothing."""
    deadline = time.monotonic() + MASTER_S
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise EnvironmentFault(
                    f"No load test listens at {host}:{port} ({error.strerror or error}). Start the one that leads with "
                    "--workers N --bind HOST:PORT, and open that port and the network between."
                ) from None
            time.sleep(0.5)
        else:
            return
