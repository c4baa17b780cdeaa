"""Stages: a load, a warm-up that does not count, a window that does, and an end that does not drain the server.

Requests that start in the window count. The load stays as it is until the last of them is over, so that none of them
runs under a lighter or heavier load than it started with. Knows nothing of SLOs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import gevent

from loadtests import clock
from loadtests.arrivals import Arrivals
from loadtests.report.words import load

if TYPE_CHECKING:  # locust patches the standard library when it is imported
    from loadtests.swarm import Swarm

Progress = Callable[["Stage", str, float], None]
"""A stage, what it is at (warm-up, window, end), and the share of it that is over."""

_TICK_S = 0.25


@dataclass(frozen=True, slots=True)
class Timing:
    """How long the parts of a stage take."""

    warmup_s: float = 5.0
    window_s: float = 25.0
    min_requests: int = 20  # the window is extended until so many have been answered …
    max_window_s: float = 45.0  # … or it is so long
    grace_s: float = 60.0  # what started in the window and is not over so long after it has failed

    def for_rate(self, rate: float, group: int) -> Timing:
        """Parts of whole groups of arrivals, the window long enough for `min_requests` as far as `max_window_s` allows.

        Args:
            rate: requests per second.
            group: see arrivals.Counted.
        """
        group_s = group / rate
        window_s = min(self.max_window_s, max(self.window_s, self.min_requests / rate))
        return replace(
            self,
            warmup_s=math.ceil(self.warmup_s / group_s) * group_s,
            window_s=max(1, round(window_s / group_s)) * group_s,
            min_requests=0,
        )

    @property
    def expected_s(self) -> float:
        """About how long a stage takes."""
        return self.warmup_s + self.window_s + 4


@dataclass(frozen=True, slots=True)
class Stage:
    """One load and when it was. Seconds since 1970."""

    load: float
    kind: Literal["users", "rate"]
    begin: float
    window_begin: float = 0.0
    window_end: float = 0.0
    end: float = 0.0
    abandoned: tuple[float, ...] = ()  # starts of requests of the window that never ended

    @property
    def label(self) -> str:
        """As people say it."""
        return load(self.load, self.kind)

    @property
    def window_s(self) -> float:
        """How long it counted."""
        return self.window_end - self.window_begin

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "label": self.label, "window_s": self.window_s}


def closed(swarm: Swarm, users: int, timing: Timing, progress: Progress) -> Stage:
    """A stage with so many users, each with one request at a time."""
    stage = Stage(users, "users", clock.now())
    swarm.users(users)
    return _run(swarm, stage, timing, progress)


def opened(
    swarm: Swarm, rate: float, arrivals: Arrivals, timing: Timing, progress: Progress, *, first_index: int | None = None
) -> Stage:
    """A stage with arrivals that do not care how the server is doing; ends with nothing under way."""
    begin = swarm.arrive(arrivals, first_index)
    stage = _run(swarm, Stage(rate, "rate", begin), timing, progress)
    swarm.idle()
    if not swarm.settle(clock.now(), timing.grace_s):
        swarm.abandon()
    return stage


def _run(swarm: Swarm, stage: Stage, timing: Timing, progress: Progress) -> Stage:
    window_begin = stage.begin + timing.warmup_s
    _wait_until(window_begin, lambda share: progress(stage, "warm-up", share))
    end = window_begin + timing.window_s
    while True:
        _wait_until(end, lambda share: progress(stage, "window", share))
        enough = len(swarm.ledger.started_in(window_begin, end)) >= timing.min_requests
        if enough or end - window_begin >= timing.max_window_s:
            break
        end = min(end + 5, window_begin + timing.max_window_s)
    progress(stage, "end", 0.0)
    settled = swarm.settle(end, timing.grace_s)
    abandoned = () if settled else tuple(swarm.ledger.open_between(window_begin, end))
    return Stage(stage.load, stage.kind, stage.begin, window_begin, end, clock.now(), abandoned)


def _wait_until(moment: float, tell: Callable[[float], None]) -> None:
    begin = clock.now()
    while (left := moment - clock.now()) > 0:
        tell(1 - left / max(1e-9, moment - begin))
        gevent.sleep(min(_TICK_S, left))
