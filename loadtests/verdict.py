"""The answer: how much load holds within the SLO, what gives first, and why.

Knows nothing of how it is shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from loadtests import search
from loadtests.results import StageResult
from loadtests.search import Found
from loadtests.slo import Check, Slo

ENDS_BY_ITSELF = ("extraction",)  # workloads whose answers have no length that was asked for
FEW_REQUESTS = 20  # with fewer, a p95 is hardly more than the slowest of them
_LAG_S = 0.1
_DISAGREE = (
    "The trials disagree by more than usual: the machine was busy with something else, or the server is not always "
    "equally fast. Search again on a quiet machine, or with longer windows (--window-s)."
)
_UNSTEADY = 1.2  # the slowest over the fastest of several measurements of the same
_BUSY_CORES = 0.7  # a process has one


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a test found.

    `holds` is the highest load up to which every stage met the SLO; `misses` the first one that did not; `estimate`
    the load between them at which the first limit is reached, as far as a straight line can say. A search says how far:
    `margin` is the standard error of its estimate, as a share of it.
    """

    passed: bool
    required: float | None  # the load that had to hold; None: the question was only how much does
    holds: float | None
    misses: float | None
    estimate: float | None
    first: Check | None  # the limit that gives first, as measured at `misses`
    missed: tuple[Check, ...]  # limits missed at the required load
    reasons: tuple[str, ...]
    cautions: tuple[str, ...]
    margin: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "passed": self.passed,
            "required": self.required,
            "holds": self.holds,
            "misses": self.misses,
            "estimate": self.estimate,
            "margin": self.margin,
            "first": self.first.as_dict() if self.first else None,
            "missed": [check.as_dict() for check in self.missed],
            "reasons": list(self.reasons),
            "cautions": list(self.cautions),
        }


def of_ladder(results: Sequence[StageResult], required: float | None, slo: Slo) -> Verdict:
    """From stages of growing load; passed when the required one met the SLO, or without one when any did."""
    ordered = sorted(results, key=lambda result: result.stage.load)
    holds = misses = None
    for result in ordered:
        if not result.met:
            misses = result
            break
        holds = result
    needed = next((result for result in ordered if result.stage.load == required), None)
    missed = tuple(check for check in needed.checks if not check.met) if needed else ()
    return Verdict(
        passed=not missed if needed else required is None and holds is not None,
        required=required if needed else None,
        holds=holds.stage.load if holds else None,
        misses=misses.stage.load if misses else None,
        estimate=_crossing(holds, misses) if holds and misses else None,
        first=misses.worst if misses else None,
        missed=missed,
        reasons=tuple(reasons(misses)) if misses else (),
        cautions=tuple(cautions(ordered)),
    )


def of_search(results: Sequence[StageResult], found: Found, slo: Slo, alone: Sequence[float] = ()) -> Verdict:
    """From the trials of a search; passed when it found a rate that holds.

    Args:
        alone: TPOT of a request by itself before each trial, seconds: how fast server and machine were just then.
    """
    missed = next((result for result in results if result.stage.load == found.misses and not result.met), None)
    verdict = of_ladder(results, None, slo)
    known = found.limit is not None and math.isfinite(found.limit.margin)
    wide = found.limit is not None and found.limit.margin > 2 * search.MARGIN
    return replace(
        verdict,
        passed=found.holds is not None,
        holds=found.holds,
        misses=found.misses,
        estimate=found.limit.rate if found.limit else None,
        margin=found.limit.margin if found.limit and known else None,
        first=missed.worst if missed else None,
        reasons=(*pace(alone), *(reasons(missed) if missed else [])),
        cautions=(*verdict.cautions, *([_DISAGREE] if wide else []), *unsteady(alone)),
    )


def pace(alone: Sequence[float]) -> list[str]:
    """By which two searches can be compared: a slower machine, or server, holds less."""
    return [f"A request by itself takes {1000 * median(alone):.3g} ms per token."] if alone else []


def unsteady(alone: Sequence[float]) -> list[str]:
    """A caution when the same was not equally fast all the time."""
    if len(alone) < 2 or max(alone) < _UNSTEADY * min(alone):
        return []
    return [
        f"A request by itself took {1000 * min(alone):.3g} to {1000 * max(alone):.3g} ms per token before the trials: "
        "the machine or the server was not always equally fast, and another search may find another figure."
    ]


def reasons(result: StageResult) -> list[str]:
    """What the server's own figures say about a stage that missed the SLO."""
    server, found = result.server, []
    running, most = server.get("running_mean"), server.get("max_running")
    waiting = server.get("waiting_mean", 0.0)
    if running is not None and most and running > 0.9 * most and waiting >= 1:
        found.append(f"The batch is full: {running:.0f} of {most:.0f} sequences run and {waiting:.0f} requests wait.")
    elif running is not None and most:
        found.append(
            f"The batch is not full: {running:.1f} of {most:.0f} sequences run on average, {waiting:.1f} wait."
        )
    kv_max = server.get("kv_max")
    if kv_max and (server["kv_used_max"] > 0.95 * kv_max or server.get("preemptions", 0) > 0):
        found.append(
            f"KV blocks run out: up to {server['kv_used_max']:.0f} of {kv_max:.0f} in use, "
            f"{server.get('preemptions', 0):.0f} preemptions."
        )
    elif kv_max:
        found.append(f"KV blocks are not the limit: at most {100 * server['kv_used_max'] / kv_max:.0f} % in use.")
    if server.get("steps_per_s") and running:
        step_s = 1 / server["steps_per_s"]
        found.append(f"A step takes {1000 * step_s:.0f} ms with {running:.1f} sequences in it: no token comes faster.")
    if server.get("queue_mean_s", 0.0) > 0.05:
        found.append(f"Requests wait {1000 * server['queue_mean_s']:.0f} ms on average for their first step.")
    if server.get("refused"):
        found.append(f"The server refused {server['refused']:.0f} requests.")
    return found


def cautions(results: Sequence[StageResult]) -> list[str]:
    """Why the figures may mean less than they seem to."""
    found = []
    few = [result.stage.label for result in results if len(result.records) < FEW_REQUESTS]
    if few:
        found.append(f"Fewer than {FEW_REQUESTS} requests at {', '.join(few)}: the percentiles there are coarse.")
    late = max((result.tool.get("lag_s", 0.0) for result in results), default=0.0)
    if late > _LAG_S:
        found.append(
            f"This tool itself was held up for up to {1000 * late:.0f} ms, which is part of the latencies: give it "
            "processor cores of its own, or WORKERS=2."
        )
    busy = max((result.tool.get("busiest", 0.0) for result in results), default=0.0)
    if busy > _BUSY_CORES:
        found.append(
            f"A process of this tool used {busy:.1f} cores, of which it can use one: with more load it becomes the "
            "bottleneck. Give it more WORKERS."
        )
    unequal = [result for result in results if result.lengths.get("as_asked", 1.0) < 0.95]
    if unequal and not all(record.workload in ENDS_BY_ITSELF for result in results for record in result.records):
        share = min(result.lengths["as_asked"] for result in unequal)
        found.append(f"Only {100 * share:.0f} % of the answers had the length asked for: throughput is not comparable.")
    if any(not result.server for result in results):
        found.append("The server exports no metrics that are known here: nothing can be said about why.")
    return found


def _crossing(below: StageResult, above: StageResult) -> float | None:
    """Where the worst check reaches its limit, on a straight line over the logarithm of the load."""
    check = above.worst
    before = next((c for c in below.checks if (c.metric, c.statistic) == (check.metric, check.statistic)), None)
    if before is None or math.isinf(check.use) or check.use <= before.use or before.use > 1:
        return None
    share = (1 - before.use) / (check.use - before.use)
    low, high = below.stage.load, above.stage.load
    return low * math.pow(high / low, share)
