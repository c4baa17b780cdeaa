"""A finished test: its settings, its stages, its verdict; and report.json, which everything else is made of."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from loadtests.errors import LoadTestError
from loadtests.metrics import RequestLatency, TimePerOutputToken, TimeToFirstToken
from loadtests.options import Options
from loadtests.records import UNFINISHED, Record
from loadtests.results import StageResult
from loadtests.scrape import Sample
from loadtests.search import Found
from loadtests.server import Server
from loadtests.verdict import Verdict

FORMAT = 1
_MOST_POINTS = 4000  # requests drawn in a time line


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What is known when a test is over."""

    options: Options
    server: Server
    about: str  # the workload in a sentence
    begun_at: float  # seconds since 1970
    results: Sequence[StageResult]
    verdict: Verdict
    records: Sequence[Record]
    samples: Sequence[Sample]
    machine: dict[str, Any]
    salt: str
    search: Found | None = None
    ended_by: KeyboardInterrupt | LoadTestError | None = None  # what ended it early
    command: Sequence[str] = field(default_factory=tuple)


def as_dict(outcome: Outcome) -> dict[str, Any]:
    """report.json."""
    options = outcome.options
    return {
        "format": FORMAT,
        "begun_at": outcome.begun_at,
        "date": time.strftime("%Y-%m-%d %H:%M", time.localtime(outcome.begun_at)),
        "slo": options.slo.model_dump(),
        "kind": "find" if options.find else outcome.results[0].stage.kind if outcome.results else "users",
        "verdict": outcome.verdict.as_dict(),
        "stages": [result.as_dict() for result in outcome.results],
        "search": None if outcome.search is None else _search(outcome.search),
        "settings": {
            "workload": options.workload,
            "about": outcome.about,
            "transport": options.transport,
            "seed": options.seed,
            "salt": outcome.salt,
            "think_s": options.think_s,
            "workers": options.workers,
            "timing": asdict(options.timing),
            "trace": str(options.trace) if options.trace else None,
            "command": list(outcome.command),
        },
        "server": {"http": outcome.server.http_url, "started_here": outcome.server.started_here},
        "machine": outcome.machine,
        "timeline": _requests(outcome),
        "tokens": _tokens(outcome),
        "samples": _samples(outcome),
    }


def _search(found: Found) -> dict[str, Any]:
    """Trials as pairs of rate and use; None for a use that could not be measured, which JSON has no number for."""
    trials = [(rate, use if math.isfinite(use) else None) for rate, use in found.trials]
    limit = None if found.limit is None else {"rate": found.limit.rate, "slope": found.limit.slope}
    return {"limit": limit, "holds": found.holds, "misses": found.misses, "trials": trials}


def _requests(outcome: Outcome) -> list[list[Any]]:
    """Start, TTFT, TPOT, latency (seconds, None where there is none) and whether it succeeded, one per request."""
    records = sorted((r for r in outcome.records if r.error != UNFINISHED), key=lambda record: record.intended_at)
    return [
        [
            round(record.intended_at - outcome.begun_at, 4),
            _rounded(TimeToFirstToken.of(record)),
            _rounded(TimePerOutputToken.of(record)),
            _rounded(RequestLatency.of(record)),
            record.ok,
        ]
        for record in records[:: max(1, len(records) // _MOST_POINTS)]
    ]


def _tokens(outcome: Outcome) -> list[int]:
    """Output tokens that came in each second."""
    seconds: dict[int, int] = {}
    for record in outcome.records:
        pieces = zip(record.chunk_s, record.chunk_tokens, strict=True)
        whole = [(record.end_s, record.output_tokens or 0)] if not record.streamed else pieces
        for when, tokens in whole:
            second = int(record.intended_at + when - outcome.begun_at)
            seconds[second] = seconds.get(second, 0) + tokens
    return [seconds.get(second, 0) for second in range(max(seconds, default=-1) + 1)]


def _samples(outcome: Outcome) -> dict[str, list[float | None]]:
    """The server's figures over time, each a list as long as `t`."""
    names = sorted({name for sample in outcome.samples for name in sample.values})
    found: dict[str, list[float | None]] = {"t": [round(s.at - outcome.begun_at, 3) for s in outcome.samples]}
    for name in names:
        found[name] = [sample.values.get(name) for sample in outcome.samples]
    return found


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
