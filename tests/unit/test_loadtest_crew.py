"""The users of a process: what is kept of a request that is given up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import gevent

from clients.types import Chunk
from loadtests import clock
from loadtests.arrivals import Even
from loadtests.crew import Crew, OpenLoop, pause_s
from loadtests.exchange import Exchange, Pieces
from loadtests.records import UNFINISHED, Record
from loadtests.workloads import Item, Workload


class _Stuck(Exchange):
    """Sends two responses of three tokens, and then nothing."""

    def __init__(self) -> None:
        super().__init__("grpc-stream", "http://127.0.0.1:1", "127.0.0.1:1", 1.0)

    def __call__(self, item: Item, pieces: Pieces) -> Record:
        for _ in range(2):
            pieces.add(Chunk(text="word ", num_output_tokens=3))
        gevent.sleep(60)
        raise AssertionError("nobody ended it")


def test_what_came_of_a_request_that_is_given_up_counts_as_tokens() -> None:
    records: list[Record] = []
    items = cast("Workload", SimpleNamespace(item=lambda index: Item(index, "chat", {}, 64)))
    crew = Crew(items, _Stuck(), records.append)
    crew.set_open_loop(OpenLoop(Even(100.0), clock.now(), 0))
    asking = gevent.spawn(crew.arrive)
    while not crew.open_since():
        gevent.sleep(0.01)
    crew.stop()
    gevent.joinall([asking], timeout=5)
    gevent.sleep(0.05)
    crew.close()
    assert records
    assert {record.error for record in records} == {UNFINISHED}
    assert {(record.chunk_tokens, record.output_tokens) for record in records} == {((3, 3), 6)}
    assert not any(record.ok for record in records)


def test_pauses_are_those_of_the_seed_and_as_long_as_asked_for() -> None:
    pauses = [pause_s(10.0, 1, index) for index in range(2000)]
    assert pauses == [pause_s(10.0, 1, index) for index in range(2000)]
    assert pauses[:9] != [pause_s(10.0, 2, index) for index in range(9)]
    assert 9 < sum(pauses) / 2000 < 11
