"""Two sides, batches alike, in turns: what each did, and the ratio of neighbours in time.

Knows nothing of engines and servers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from loadtests.bench.drivers import Driver, Run
from loadtests.bench.workload import Batch

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Section:
    """One comparison. `ratios` by concurrency or "all"; over 1 is in our favour."""

    name: str
    ratios: dict[str, float]
    raw: dict[str, Any]


def in_turns(
    drivers: Sequence[Driver],
    make_batch: Callable[[], Batch],
    rounds: int,
    say: Progress,
    *,
    on_one_server: bool = False,
) -> dict[str, list[Run]]:
    """Each round gives one batch to every driver; who begins changes from round to round.

    Args:
        on_one_server: the drivers share a prefix cache, in which the second would find what the first has asked: each
            gets a batch of its own.
    """
    runs: dict[str, list[Run]] = {driver.name: [] for driver in drivers}
    for number in range(rounds):
        batch = None
        order = list(drivers) if number % 2 == 0 else list(reversed(drivers))
        for driver in order:
            if batch is None or on_one_server:
                batch = make_batch()
            say(f"round {number + 1} of {rounds}: {driver.name}, {len(batch.prompts)} requests")
            runs[driver.name].append(driver.run(batch))
    return runs


def ratio(runs: Mapping[str, Sequence[Run]], side: str, other: str) -> float:
    """Output tokens per second of one side over the other's: the median of the rounds' own ratios.

    A shared machine gets faster and slower in minutes, which two runs of one round see alike and two medians do not.
    """
    rounds = zip(runs[side], runs[other], strict=True)
    return median(run.tokens_per_s / beside.tokens_per_s for run, beside in rounds)


def speeds(runs: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, Any]]:
    """Per driver: the median of output tokens per second, and every single figure."""
    return {
        name: {
            "tokens_per_s": median(run.tokens_per_s for run in found),
            "rounds": [round(run.tokens_per_s, 1) for run in found],
            "ttft_s": median(median(run.ttft_s) for run in found),
        }
        for name, found in runs.items()
    }
