"""What log-probs cost the answers of everybody: requests that all ask for them against requests that do not."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from loadtests.bench.compare import Section, in_turns, speeds
from loadtests.bench.drivers import ServerDriver

if TYPE_CHECKING:
    from loadtests.bench.sections import Bench

CONCURRENCY = 32
ALTERNATIVES = 5


def logprobs_5(bench: Bench) -> Section:
    """Streams with the five likeliest tokens at every place over streams without, by turns on one server."""
    server = ServerDriver("without")
    try:
        asking = server.asking("with", top_logprobs=ALTERNATIVES)
        make = partial(bench.workload.same_length_text, CONCURRENCY, bench.prompt_tokens)
        for driver in (server, asking):
            bench.say(f"warming up {driver.name}")
            driver.run(make(math.ceil(bench.max_tokens / 16)))
        found = speeds(in_turns((server, asking), partial(make, bench.max_tokens), bench.rounds, bench.say))
    finally:
        server.close()
    ratio = found["with"]["tokens_per_s"] / found["without"]["tokens_per_s"]
    return Section("logprobs_5", {str(CONCURRENCY): ratio}, {str(CONCURRENCY): found})
