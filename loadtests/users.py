"""Locust's users: they do what the crew of their process says, in closed or in open loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gevent
from locust import User, constant, task

from loadtests.crew import Crew, pause_s
from loadtests.records import UNFINISHED, Record


class LlmUser(User):  # type: ignore[misc]  # locust has no types
    """Closed loop: one request after the other. Open loop: one user of each process makes all arrivals."""

    wait_time = constant(0)

    @task  # type: ignore[untyped-decorator]
    def work(self) -> None:
        """One request, or the arrivals until they change."""
        crew: Crew | None = self.environment.crew
        if crew is None or crew.is_idle:
            gevent.sleep(0.1)
        elif crew.is_open_loop:
            crew.arrive()
        else:
            index = crew.ask()
            if self.environment.think_s:
                gevent.sleep(pause_s(self.environment.think_s, self.environment.seed, index))


def report_to(environment: Any) -> Callable[[Record], None]:
    """A function that tells locust of a record, for its statistics and its web page."""

    def fire(record: Record) -> None:
        if record.error == UNFINISHED:  # nobody's failure: the test is over
            return
        environment.events.request.fire(
            request_type=record.transport,
            name=record.workload if record.adapter is None else f"{record.workload} ({record.adapter})",
            response_time=1000 * record.end_s,
            response_length=record.output_tokens or 0,
            exception=None if record.ok else RuntimeError(f"{record.error}: {record.message}"),
            context={},
        )

    return fire
