"""Batches through the users of the load tests: `python -m loadtests.bench.locust_side --grpc-url HOST:PORT`.

Reads one batch per line from standard input, {"texts": […], "max_tokens": […]}, starts all its requests at once and
writes one line: wall_s, output_tokens, ttft_s, latency_s. Speaks the language of drivers.LineDriver.
"""

from __future__ import annotations

import loadtests.patched  # noqa: F401  # isort: skip - before everything that opens sockets
import argparse
import json
import logging
import sys
import time
from typing import Any

import gevent
from gevent.fileobject import FileObject
from locust.env import Environment

from loadtests import clock
from loadtests.arrivals import Recorded
from loadtests.crew import Crew, OpenLoop
from loadtests.exchange import Exchange
from loadtests.records import Record
from loadtests.texts import Library, Text
from loadtests.users import LlmUser, report_to
from loadtests.workloads.base import FIXED_LENGTH, Item, Setting, Workload

_TIMEOUT_S = 300.0


class _Batch(Workload):
    """The requests of one line."""

    name = "batch"
    about = "What the benchmark says."

    def __init__(self) -> None:
        none = Text((), (), "")
        super().__init__(Setting(library=Library(none, none)))
        self.texts: list[str] = []
        self.max_tokens: list[int] = []

    def item(self, index: int) -> Item:
        """The request at a position."""
        return Item(index, self.name, {"text_input": self.texts[index], **FIXED_LENGTH}, self.max_tokens[index])


def main() -> int:
    """Serve lines until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench.locust_side", description=__doc__)
    parser.add_argument("--grpc-url", required=True)
    given = parser.parse_args()
    begun = time.monotonic()
    logging.getLogger("locust").setLevel(logging.ERROR)
    environment = Environment(user_classes=[LlmUser])
    runner = environment.create_local_runner()
    tell_locust = report_to(environment)
    records: list[Record] = []

    def finished(record: Record) -> None:
        records.append(record)
        tell_locust(record)

    batch = _Batch()
    exchange = Exchange("grpc-stream", "", given.grpc_url, _TIMEOUT_S)
    exchange.connect()
    environment.crew = Crew(batch, exchange, finished)
    environment.crew.is_idle = True
    environment.think_s = 0.0
    runner.start(1, spawn_rate=1)  # one user makes all arrivals, as in open loop
    _answer({"ready_s": time.monotonic() - begun})
    for line in FileObject(sys.stdin.buffer, "r", encoding="utf-8"):
        asked = json.loads(line)
        batch.texts, batch.max_tokens = asked["texts"], asked["max_tokens"]
        records.clear()
        count = len(batch.texts)
        environment.crew.set_open_loop(OpenLoop(Recorded((0.0,) * count), clock.now() + 0.2, 0))
        while len(records) < count:
            gevent.sleep(0.02)
        _answer(_figures(records))
    runner.quit()
    environment.crew.close()
    return 0


def _figures(records: list[Record]) -> dict[str, Any]:
    failed = [record for record in records if not record.ok]
    if failed:
        return {"error": f"{failed[0].error}: {failed[0].message}"}
    begin = min(record.intended_at for record in records)
    return {
        "wall_s": max(record.end_at for record in records) - begin,
        "output_tokens": sum(record.output_tokens or 0 for record in records),
        "ttft_s": [record.chunk_s[0] for record in records],
        "latency_s": [record.end_s for record in records],
    }


def _answer(values: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
