"""Two drivers given 32 streams at a time, in turns: most sections are that. Knows nothing of what they differ in."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from loadtests.bench.compare import Section, in_turns, ratio, speeds

if TYPE_CHECKING:
    from loadtests.bench.drivers import Driver
    from loadtests.bench.sections import Bench

CONCURRENCY = 32


def paired(name: str, bench: Bench, side: Driver, other: Driver) -> Section:
    """Output tokens/s of one side over those of the other, both warmed up first.

    They may share a server.
    """
    drivers = (other, side)
    make = partial(bench.workload.same_length_text, CONCURRENCY, bench.prompt_tokens)
    for driver in drivers:
        bench.say(f"warming up {driver.name}")
        driver.run(make(math.ceil(bench.max_tokens / 16)))
    runs = in_turns(drivers, partial(make, bench.max_tokens), bench.rounds, bench.say, on_one_server=True)
    return Section(name, {str(CONCURRENCY): ratio(runs, side.name, other.name)}, {str(CONCURRENCY): speeds(runs)})
