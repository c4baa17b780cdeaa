"""Service level objectives: read from YAML, checked against the requests of a stage.

Knows nothing of how the requests were made.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from loadtests.errors import UsageFault
from loadtests.metrics import RECORD_METRICS, ErrorRate, GoodFraction, InterChunkLatency
from loadtests.records import Record
from loadtests.samples import statistic

DIRECTORY = Path(__file__).parent / "slos"
Statistic = Literal["mean", "max", "p50", "p90", "p95", "p99"]
_RANK: tuple[Statistic, ...] = ("mean", "p50", "p90", "p95", "p99", "max")
_LATENCIES = {metric.tag: metric for metric in RECORD_METRICS if metric.unit == "s"}


class _File(BaseModel):
    """The keys of an SLO file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    workload: str = "chat"
    users: int = Field(1, ge=1, description="requests in flight at once that have to be held")
    limits_s: dict[str, dict[Statistic, float]] = Field(description="seconds, by metric and statistic")
    error_rate: float = Field(0.001, ge=0, le=1, description="share of requests that may fail")
    good_fraction: float | None = Field(None, ge=0, le=1, description="share of requests within every limit")


@dataclass(frozen=True, slots=True)
class Check:
    """One limit and what was measured; `measured` is None when nothing could be."""

    metric: str
    statistic: str
    limit: float
    measured: float | None

    @property
    def met(self) -> bool:
        """Whether it holds; a figure that is missing does not."""
        if self.measured is None:
            return False
        return self.measured >= self.limit if self.metric == "good_fraction" else self.measured <= self.limit

    @property
    def use(self) -> float:
        """How much of the limit is used: 1 exactly all of it, more than 1 a miss."""
        if self.measured is None:
            return float("inf")
        if self.metric == "good_fraction":
            return self.limit / self.measured if self.measured else float("inf")
        if self.limit == 0:
            return 0.0 if self.measured == 0 else float("inf")
        return self.measured / self.limit

    @property
    def label(self) -> str:
        """As people say it: TTFT p95."""
        if self.metric in ("error_rate", "good_fraction"):
            return {"error_rate": "errors", "good_fraction": "good requests"}[self.metric]
        return f"{self.metric.upper() if len(self.metric) < 6 else self.metric} {self.statistic}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values with the verdict."""
        use = self.use if self.use != float("inf") else None
        return {**asdict(self), "label": self.label, "met": self.met, "use": use}


class Slo(_File):
    """Limits that a stage of a load test has to keep."""

    @cached_property
    def thresholds(self) -> dict[str, float]:
        """What a single request is held against, in seconds by metric: the limit of the highest of its statistics.

        A median may be exceeded by half of the requests; with a p99 beside it, that is what says how long one may take.
        """
        return {
            tag: limits[max(limits, key=_RANK.index)]
            for tag, limits in self.limits_s.items()
            if tag != InterChunkLatency.tag
        }

    def is_good(self, record: Record) -> bool:
        """Whether one request is within every limit; a metric that it does not have is no reason against it."""
        values = ((_LATENCIES[tag].of(record), limit) for tag, limit in self.thresholds.items())
        return record.ok and all(value is None or value <= limit for value, limit in values)

    def checks(self, records: Sequence[Record]) -> list[Check]:
        """Every limit, in the order of the file, errors last."""
        found = [
            Check(tag, name, limit, _measure(records, tag, name))
            for tag, limits in self.limits_s.items()
            for name, limit in limits.items()
        ]
        if self.good_fraction is not None:
            found.append(Check("good_fraction", "", self.good_fraction, GoodFraction.of(records, self.is_good)))
        return [*found, Check("error_rate", "", self.error_rate, ErrorRate.of(records) if records else None)]


def load(name: str) -> Slo:
    """An SLO by the name of a shipped file (chat, code) or by the path of a file.

    Raises:
        UsageFault: no such file, or it asks for what does not exist.
    """
    path = DIRECTORY / f"{name}.yaml"
    if not path.exists():
        path = Path(name)
    if not path.exists():
        shipped = ", ".join(sorted(found.stem for found in DIRECTORY.glob("*.yaml")))
        raise UsageFault(f"There is no SLO {name!r}: give one of {shipped}, or the path of a YAML file.")
    try:
        found = Slo.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (ValidationError, yaml.YAMLError) as error:
        raise UsageFault(f"{path} is no SLO file: {_short(error)}") from None
    known = [*_LATENCIES, InterChunkLatency.tag]
    unknown = sorted(set(found.limits_s) - set(known))
    if unknown:
        raise UsageFault(f"{path}: there is no metric {unknown[0]!r} to limit; there are {', '.join(known)}.")
    return found


def _measure(records: Sequence[Record], tag: str, name: str) -> float | None:
    if tag == InterChunkLatency.tag:
        values: list[float] = [gap for record in records for gap in InterChunkLatency.of(record)]
    else:
        values = [value for record in records if (value := _LATENCIES[tag].of(record)) is not None]
    return statistic(values, name) if values else None


def _short(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(map(_told, error.errors()))
    return " ".join(str(error).split())


def _told(error: Any) -> str:
    place = ".".join(str(part) for part in error["loc"] if part != "[key]") or "the file"
    if error["type"] == "extra_forbidden":
        close = difflib.get_close_matches(place, _File.model_fields, 1)
        advice = f"did you mean {close[0]}?" if close else f"there are {', '.join(_File.model_fields)}"
        return f"{place} is no key of it, {advice}"
    return f"{place}: {error['msg']}"
