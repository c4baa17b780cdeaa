"""What one process does for a load test: takes items in turn, sends them, collects the records.

Knows nothing of stages and reports; locust's users call it, a Swarm reads it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import gevent
from gevent.event import Event

from loadtests import clock
from loadtests.arrivals import Arrivals
from loadtests.exchange import Exchange, Pieces
from loadtests.records import Record
from loadtests.workloads import Item, Workload

Finished = Callable[[Record], None]
_LAG_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """An arrival process that all workers know; each takes its share of it."""

    arrivals: Arrivals
    start_at: float  # seconds since 1970
    first_index: int  # the first arrival is this item of the workload


def pause_s(think_s: float, seed: int, index: int) -> float:
    """Closed loop: how long a user thinks over the answer to the item at this position, `think_s` s on average."""
    return random.Random(f"{seed}/{index}").expovariate(1 / think_s)


class Crew:
    """The users of one process.

    Args:
        share: this process is number share[0] of share[1]; they split the items between them.
        finished: called with every record as soon as it is there.
    """

    def __init__(
        self, workload: Workload, exchange: Exchange, finished: Finished, share: tuple[int, int] = (0, 1)
    ) -> None:
        self._workload, self._exchange, self._finished = workload, exchange, finished
        self._number, self._of = share
        self._turn = 0
        self._open: dict[int, tuple[Item, float]] = {}
        self._open_loop: OpenLoop | None = None
        self.is_idle = False
        self._changed = Event()
        self._asking: set[gevent.Greenlet] = set()
        self.lag_s = 0.0  # the longest time by which this process woke too late since take_lag()
        self._watch = gevent.spawn(self._watch_lag)

    @property
    def is_open_loop(self) -> bool:
        """Whether arrivals are set, so that one user makes them all."""
        return self._open_loop is not None

    def ask(self) -> int:
        """Closed loop: the next item of this process, from now to its end; returns its position."""
        index = self._turn * self._of + self._number
        self._turn += 1
        self._send(self._workload.item(index), clock.now())
        return index

    def arrive(self) -> None:
        """Open loop: start every request of this process's share at its time; returns when the arrivals change."""
        process = self._open_loop
        assert process is not None
        self._changed.clear()
        for number, after_s in self._shares(process.arrivals.times()):
            item = self._workload.item(process.first_index + number)  # made before its time, not in it
            intended_at = process.start_at + after_s
            if self._changed.wait(max(0.0, intended_at - clock.now())):
                return
            asking = gevent.spawn(self._send, item, intended_at)
            self._asking.add(asking)
            asking.rawlink(self._asking.discard)
        self._changed.wait()

    def set_open_loop(self, process: OpenLoop | None) -> None:
        """Go over to another arrival process; None: no more requests."""
        self._open_loop = process
        self.is_idle = process is None
        self._changed.set()

    def resume(self) -> None:
        """Closed loop again after a stop; nothing changes while arrivals are set."""
        self.is_idle = False

    def open_since(self) -> list[float]:
        """When each request under way was meant to start."""
        return [intended_at for _, intended_at in self._open.values()]

    def stop(self) -> None:
        """End what is under way; it becomes unfinished records."""
        self.set_open_loop(None)
        gevent.killall(list(self._asking), block=False)

    def close(self) -> None:
        """Stop and close the connections."""
        self.stop()
        self._watch.kill(block=False)
        self._exchange.close()

    def take_lag(self) -> float:
        """The longest delay of this process's own loop since the last call, in seconds."""
        lag, self.lag_s = self.lag_s, 0.0
        return lag

    def facts(self) -> dict[str, Any]:
        """How this process itself is doing."""
        return {"cpu_s": time.process_time(), "lag_s": self.take_lag()}

    def _shares(self, times: Iterator[float]) -> Iterator[tuple[int, float]]:
        return ((number, after_s) for number, after_s in enumerate(times) if number % self._of == self._number)

    def _send(self, item: Item, intended_at: float) -> None:
        key, pieces = id(item), Pieces(intended_at)
        self._open[key] = (item, intended_at)
        record = None
        try:
            record = self._exchange(item, pieces)
        finally:  # also when this greenlet is killed
            del self._open[key]
            self._finished(record or self._exchange.unfinished(item, pieces))

    def _watch_lag(self) -> None:
        while True:
            before = clock.now()
            gevent.sleep(_LAG_EVERY_S)
            self.lag_s = max(self.lag_s, clock.now() - before - _LAG_EVERY_S)
