"""What came of a stage: every metric over its requests, the checks of the SLO, and what the server did meanwhile.

Knows nothing of how the load was made or how it is shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadtests import metrics, scrape
from loadtests.ledger import Ledger
from loadtests.records import UNFINISHED, Record
from loadtests.samples import ecdf, summary
from loadtests.slo import Check, Slo
from loadtests.stages import Stage

_AIPERF = ("aiperf_requests_per_s", "aiperf_output_tokens_per_s", "aiperf_total_tokens_per_s")
_MESSAGES = 3  # kept of each class of errors


@dataclass(frozen=True, slots=True)
class StageResult:
    """Figures of one stage. `metrics` by tag: count, mean, min, p50, p90, p95, p99, max."""

    stage: Stage
    records: tuple[Record, ...]
    metrics: dict[str, dict[str, float]]
    rates: dict[str, float]
    lengths: dict[str, float]
    errors: dict[str, int]
    messages: dict[str, list[str]]
    checks: tuple[Check, ...]
    groups: dict[str, dict[str, Any]]
    server: dict[str, float]
    tool: dict[str, float]

    @property
    def met(self) -> bool:
        """Whether every limit of the SLO holds."""
        return all(check.met for check in self.checks)

    @property
    def worst(self) -> Check:
        """The check that is nearest to its limit, or furthest over it."""
        return max(self.checks, key=lambda check: check.use)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, with what is needed to draw distributions."""
        return {
            "stage": self.stage.as_dict(),
            "met": self.met,
            "metrics": self.metrics,
            "rates": self.rates,
            "lengths": self.lengths,
            "errors": self.errors,
            "messages": self.messages,
            "checks": [check.as_dict() for check in self.checks],
            "groups": self.groups,
            "server": self.server,
            "tool": self.tool,
            "ecdf": {tag: ecdf(_values(self.records, tag)) for tag in ("ttft", "tpot", "icl", "latency")},
        }


def of_stage(stage: Stage, ledger: Ledger, samples: Sequence[scrape.Sample], slo: Slo) -> StageResult:
    """Judge a stage that is over."""
    begin, end = stage.window_begin, stage.window_end
    counted = [record for record in ledger.started_in(begin, end) if record.error != UNFINISHED]
    counted += [_abandoned(start, stage) for start in stage.abandoned]
    failed = [record for record in counted if not record.ok]
    messages: dict[str, list[str]] = {}
    for record in failed:
        seen = messages.setdefault(record.error or "", [])
        if record.message not in seen and len(seen) < _MESSAGES:
            seen.append(record.message)
    return StageResult(
        stage=stage,
        records=tuple(counted),
        metrics=_metrics(counted),
        rates=_rates(counted, ledger.records, stage, slo),
        lengths=_lengths(counted),
        errors=dict(Counter(record.error or "" for record in failed)),
        messages=messages,
        checks=tuple(slo.checks(counted)),
        groups=_groups(counted, slo),
        server=scrape.summarize(samples, begin, end),
        tool=ledger.tool_use(begin, end),
    )


def _abandoned(start: float, stage: Stage) -> Record:
    waited = stage.end - start
    return Record(
        index=-1,
        workload="",
        transport="",
        intended_at=start,
        sent_s=0.0,
        end_s=waited,
        error=UNFINISHED,
        message="no complete answer when the stage was given up",
    )


def _values(records: Sequence[Record], tag: str) -> list[float]:
    if tag == metrics.InterChunkLatency.tag:
        return [gap for record in records for gap in metrics.InterChunkLatency.of(record)]
    metric = next(found for found in metrics.RECORD_METRICS if found.tag == tag)
    return [value for record in records if (value := metric.of(record)) is not None]


def _metrics(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    found = {metric.tag: summary(_values(records, metric.tag)) for metric in metrics.RECORD_METRICS}
    gaps = metrics.InterChunkLatency.tag
    return {**found, gaps: summary(_values(records, gaps))}


def _rates(counted: Sequence[Record], everything: Sequence[Record], stage: Stage, slo: Slo) -> dict[str, float]:
    """Per second of the window, where the load is steady: tokens that came in it, requests that started in it."""
    window = stage.window_s
    output = metrics.received_tokens(everything, stage.window_begin, stage.window_end) / window
    prompts = sum(record.prompt_tokens or 0 for record in counted if record.ok) / window
    return {
        "requests_per_s": metrics.RequestThroughput.of(counted, window),
        "output_tokens_per_s": output,
        "total_tokens_per_s": output + prompts,
        "goodput_per_s": metrics.Goodput.of(counted, window, slo.is_good),
        "good_fraction": metrics.GoodFraction.of(counted, slo.is_good),
        "error_rate": metrics.ErrorRate.of(counted),
        **_over_the_run(counted),
    }


def _over_the_run(counted: Sequence[Record]) -> dict[str, float]:
    """Throughput as AIPerf has it: from the first request to the last response, ramp-up and end included."""
    duration_s = metrics.BenchmarkDuration.of(counted)
    if duration_s <= 0:
        return dict.fromkeys(_AIPERF, 0.0)
    throughputs = (
        metrics.RequestThroughput.of(counted, duration_s),
        metrics.OutputTokenThroughput.of(counted, duration_s),
        metrics.TotalTokenThroughput.of(counted, duration_s),
    )
    return dict(zip(_AIPERF, throughputs, strict=True))


def _lengths(records: Sequence[Record]) -> dict[str, float]:
    """Whether the answers had the lengths asked for, and how much of the prompts was known to repeat."""
    complete = [record for record in records if record.ok and record.output_tokens is not None]
    if not complete:
        return {}
    found = {
        "asked_mean": sum(record.max_tokens for record in complete) / len(complete),
        "got_mean": sum(record.output_tokens or 0 for record in complete) / len(complete),
        "as_asked": sum(record.output_tokens == record.max_tokens for record in complete) / len(complete),
    }
    prompts = sum(record.prompt_tokens or 0 for record in complete)
    if prompts:
        found["shared_ratio"] = sum(record.shared_tokens for record in complete) / prompts
    return found


def _groups(records: Sequence[Record], slo: Slo) -> dict[str, dict[str, Any]]:
    """The main figures by workload and adapter, when there is more than one."""
    keys = sorted({(record.workload, record.adapter or "") for record in records if record.workload})
    if len(keys) < 2:
        return {}
    groups = {}
    for workload, adapter in keys:
        own = [record for record in records if (record.workload, record.adapter or "") == (workload, adapter)]
        groups[f"{workload} {adapter or 'without adapter'}" if any(a for _, a in keys) else workload] = {
            "requests": len(own),
            "error_rate": metrics.ErrorRate.of(own),
            "good_fraction": metrics.GoodFraction.of(own, slo.is_good),
            **{tag: summary(_values(own, tag)) for tag in ("ttft", "tpot", "latency", "queue")},
        }
    return groups
