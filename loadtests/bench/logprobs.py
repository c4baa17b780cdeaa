"""What log-probs cost the answers of everybody: requests that all ask for them against requests that do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadtests.bench.drivers import ServerDriver
from loadtests.bench.streams import paired

if TYPE_CHECKING:
    from loadtests.bench.compare import Section
    from loadtests.bench.sections import Bench

ALTERNATIVES = 5


def logprobs_5(bench: Bench) -> Section:
    """Streams with the five likeliest tokens at every place over streams without, by turns on one server."""
    server = ServerDriver("without")
    try:
        return paired("logprobs_5", bench, server.asking("with", top_logprobs=ALTERNATIVES), server)
    finally:
        server.close()
