"""The files of a report: JSON and HTML, requests and stages as CSV, and the run as a trace that can be replayed."""

from __future__ import annotations

import csv
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtests import metrics, traces
from loadtests.errors import UsageFault
from loadtests.outcome import Outcome, as_dict
from loadtests.records import Record
from loadtests.report.page import page
from loadtests.results import StageResult

NAMES = ("report.html", "report.json", "requests.csv", "stages.csv", "trace.jsonl")


def prepare(out: Path) -> None:
    """Make the directory of the reports, before minutes are spent.

    Raises:
        UsageFault: nothing can be written there.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise UsageFault(f"No report can be written to {out} ({error.strerror}); give another --out.") from None


def write(outcome: Outcome) -> Path:
    """Write everything into a new directory under `out`, and return it."""
    options = outcome.options
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(outcome.begun_at))
    directory = options.out / stamp
    directory.mkdir(parents=True, exist_ok=True)
    found = as_dict(outcome)
    other = read(options.compare) if options.compare else None
    (directory / "report.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
    (directory / "report.html").write_text(page(found, other), encoding="utf-8")
    _write_requests(directory / "requests.csv", outcome)
    _write_stages(directory / "stages.csv", outcome.results)
    _write_trace(directory / "trace.jsonl", outcome.records)
    return directory


def read(path: Path) -> dict[str, Any]:
    """A report.json, by its path or that of its directory.

    Raises:
        UsageFault: there is none.
    """
    file = path / "report.json" if path.is_dir() else path
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        found["verdict"], found["stages"]
    except OSError as error:
        raise UsageFault(f"{file} cannot be read ({error.strerror}); give the directory of a report.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UsageFault(f"{file} is no report of a load test ({error!r}).") from None
    return found


def render(path: Path, compare: Path | None) -> Path:
    """Write report.html anew beside a report.json, and return it."""
    found = read(path)
    target = (path if path.is_dir() else path.parent) / "report.html"
    target.write_text(page(found, read(compare) if compare else None), encoding="utf-8")
    return target


_FIELDS = (
    "index",
    "workload",
    "adapter",
    "transport",
    "intended_at",
    "sent_s",
    "end_s",
    "prompt_tokens",
    "output_tokens",
    "max_tokens",
    "shared_tokens",
    "finish_reason",
    "error",
    "message",
)


def _write_requests(path: Path, outcome: Outcome) -> None:
    measured = [metric for metric in metrics.RECORD_METRICS if metric.unit == "s"]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["stage", "counted", *_FIELDS, *(f"{metric.tag}_s" for metric in measured), "responses", "response_s"]
        )
        for record in sorted(outcome.records, key=lambda record: record.intended_at):
            label, counted = _stage_of(record, outcome.results)
            values = [getattr(record, name) for name in _FIELDS]
            times = [metric.of(record) for metric in measured]
            moments = " ".join(f"{moment:.4f}" for moment in record.chunk_s)
            writer.writerow([label, int(counted), *values, *times, len(record.chunk_s), moments])


def _stage_of(record: Record, results: Sequence[StageResult]) -> tuple[str, bool]:
    for result in results:
        stage = result.stage
        if stage.begin <= record.intended_at < stage.end:
            return stage.label, stage.window_begin <= record.intended_at < stage.window_end
    return "", False


def _write_stages(path: Path, results: Sequence[StageResult]) -> None:
    tags = ("ttft", "tpot", "itl", "icl", "latency", "queue")
    statistics = ("mean", "p50", "p90", "p95", "p99", "max")
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        rates = list(results[0].rates) if results else []
        head = [f"{tag}_{name}_s" for tag in tags for name in statistics]
        writer.writerow(["stage", "load", "kind", "window_s", "requests", "met", *rates, *head, "errors"])
        for result in results:
            stage = result.stage
            figures = [result.metrics[tag].get(name) for tag in tags for name in statistics]
            errors = " ".join(f"{name}={count}" for name, count in result.errors.items())
            start = [stage.label, stage.load, stage.kind, stage.window_s, len(result.records), int(result.met)]
            writer.writerow([*start, *result.rates.values(), *figures, errors])


def _write_trace(path: Path, records: Sequence[Record]) -> None:
    """Arrivals and lengths as they were, for --workload replay; the words are not kept."""
    ordered = sorted((record for record in records if record.prompt_tokens), key=lambda record: record.intended_at)
    start = ordered[0].intended_at if ordered else 0.0
    rows = [
        {
            "at_s": round(record.intended_at - start, 4),
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": record.max_tokens,
            **({"adapter": record.adapter} if record.adapter else {}),
        }
        for record in ordered
    ]
    traces.write(path, rows)
