"""Locust's web page in place of a fixed test: users are set in the browser, /report shows our report as it stands.

Knows nothing of stages: what counts is all that has been asked since the test was started there.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Callable
from typing import Any

import gevent
from gevent.event import Event

from loadtests import clock, files
from loadtests.bench import machine
from loadtests.errors import EnvironmentFault
from loadtests.options import WEB_PORT, Options
from loadtests.outcome import Outcome, as_dict
from loadtests.report.page import page
from loadtests.results import of_stage
from loadtests.run import job_for, server_for, swarm_for
from loadtests.scrape import Scraper
from loadtests.server import ROOT, Server
from loadtests.stages import Stage
from loadtests.swarm import Swarm
from loadtests.verdict import of_ladder
from loadtests.workloads import WORKLOADS

_START_S = 15.0


class _Session:
    """From one start in the browser to the next."""

    def __init__(self, options: Options, server: Server, swarm: Swarm, scraper: Scraper, salt: str) -> None:
        self._options, self._server, self._swarm, self._scraper = options, server, swarm, scraper
        self._salt = salt
        self._begun_at = clock.now()
        self._ended_at: float | None = None
        self._users = 0

    def start(self, **_: Any) -> None:
        """A test was started in the browser."""
        self._begun_at, self._ended_at = clock.now(), None
        self._swarm.ledger.records.clear()

    def spawned(self, user_count: int, **_: Any) -> None:
        """As many users as were asked for are there."""
        self._users = user_count

    def stop(self, **_: Any) -> None:
        """It was stopped there: what follows is no part of it."""
        self._ended_at = clock.now()

    def outcome(self) -> Outcome:
        """What there is so far, as one stage."""
        end = self._ended_at or clock.now()
        stage = Stage(self._users, "users", self._begun_at, self._begun_at, end, end)
        result = of_stage(stage, self._swarm.ledger, self._scraper.samples, self._options.slo)
        return Outcome(
            options=self._options,
            server=self._server,
            about=WORKLOADS[self._options.workload].about,
            begun_at=self._begun_at,
            results=[result],
            verdict=of_ladder([result], None, self._options.slo),
            records=list(self._swarm.ledger.records),
            samples=[sample for sample in self._scraper.samples if sample.at >= self._begun_at],
            machine=machine.describe(ROOT),
            salt=self._salt,
        )


def _await_page(port: int) -> None:
    deadline = clock.now() + _START_S
    while clock.now() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        gevent.sleep(0.05)
    raise EnvironmentFault(f"locust's page did not come up on port {port}; is it in use? Give --ui PORT.")


def serve(options: Options, say: Callable[[str], None]) -> None:
    """Show the page until Ctrl-C.

    Raises:
        LoadTestError: no server, or the users cannot reach it.
    """
    port = options.ui or WEB_PORT
    with server_for(options, say) as server, swarm_for(options) as users:
        job = job_for(options, server)
        users.configure(job)
        scraper = Scraper(server.metrics_url)
        scraper.start()
        session = _Session(options, server, users, scraper, job.salt)
        environment = users.environment
        environment.events.test_start.add_listener(session.start)
        environment.events.spawning_complete.add_listener(session.spawned)
        environment.events.test_stop.add_listener(session.stop)
        sys.argv[1:] = []  # locust's page reads them, and ours are not locust's
        web_ui = environment.create_web_ui("127.0.0.1", port, delayed_start=True)
        web_ui.app.add_url_rule("/report", "report", lambda: page(as_dict(session.outcome()), None))
        web_ui.start()
        _await_page(port)
        say(f"locust's page: http://127.0.0.1:{port}  our report of it: http://127.0.0.1:{port}/report")
        say("Ctrl-C ends it and writes the report")
        try:
            with contextlib.suppress(KeyboardInterrupt):
                Event().wait()
            if users.ledger.records:
                say(f"report: {files.write(session.outcome()) / 'report.html'}")
        finally:
            scraper.stop()
            web_ui.stop()
