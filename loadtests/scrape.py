"""The server's own metrics, read while the test runs, on the clock of the records.

Knows nothing of requests; works with any server that has some of the families.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gevent
import urllib3

from loadtests import clock

INTERVAL_S = 0.5
_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

SERIES: dict[str, tuple[str, dict[str, str]]] = {
    "running": ("nv_trt_llm_request_metrics", {"request_type": "scheduled"}),
    "waiting": ("nv_trt_llm_request_metrics", {"request_type": "waiting"}),
    "max_running": ("nv_trt_llm_request_metrics", {"request_type": "max"}),
    "kv_used": ("nv_trt_llm_kv_cache_block_metrics", {"kv_cache_block_type": "used"}),
    "kv_max": ("nv_trt_llm_kv_cache_block_metrics", {"kv_cache_block_type": "max"}),
    "steps": ("nv_trt_llm_general_metrics", {"general_type": "iteration_counter"}),
    "prompt_tokens": ("llm_prompt_tokens_total", {}),
    "cached_tokens": ("llm_cached_prompt_tokens_total", {}),
    "generated_tokens": ("llm_generated_tokens_total", {}),
    "preemptions": ("llm_preemptions_total", {}),
    "refused": ("llm_requests_refused_total", {}),
    "queue_sum": ("llm_request_queue_time_seconds_sum", {}),
    "queue_count": ("llm_request_queue_time_seconds_count", {}),
}
"""What is kept: our name -> family and labels; series that agree in these labels are added up."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The values at one moment."""

    at: float  # seconds since 1970
    values: Mapping[str, float]


def parse(text: str) -> dict[str, float]:
    """The values of SERIES in Prometheus text; what the server does not export is absent."""
    wanted: dict[str, list[tuple[str, dict[str, str]]]] = {}
    for name, (family, labels) in SERIES.items():
        wanted.setdefault(family, []).append((name, labels))
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None or match[1] not in wanted:
            continue
        labels = dict(_LABEL.findall(match[2] or ""))
        for name, needed in wanted[match[1]]:
            if needed.items() <= labels.items():
                found[name] = found.get(name, 0.0) + float(match[3])
    return found


class Scraper:
    """Reads an endpoint twice a second, from start() to stop()."""

    def __init__(self, url: str | None) -> None:
        self.samples: list[Sample] = []
        self._url = url
        self._pool = urllib3.PoolManager(retries=False, timeout=2.0)
        self._greenlet: Any = None

    def start(self) -> None:
        """Begin, unless there is no endpoint."""
        if self._url is not None:
            self._greenlet = gevent.spawn(self._run)

    def stop(self) -> None:
        """End."""
        if self._greenlet is not None:
            self._greenlet.kill()

    def scrape(self) -> Sample | None:
        """The values now; None when the endpoint does not answer or has none of them."""
        assert self._url is not None
        try:
            reply = self._pool.request("GET", self._url)
        except urllib3.exceptions.HTTPError:
            return None
        values = parse(reply.data.decode("utf-8", "replace")) if reply.status == 200 else {}
        return Sample(clock.now(), values) if values else None

    def _run(self) -> None:
        while True:
            sample = self.scrape()
            if sample is not None:
                self.samples.append(sample)
            gevent.sleep(INTERVAL_S)


def rate(samples: Sequence[Sample], name: str) -> float | None:
    """Increase of a counter per second between the first and the last sample."""
    seen = [(sample.at, sample.values[name]) for sample in samples if name in sample.values]
    if len(seen) < 2 or seen[-1][0] == seen[0][0]:
        return None
    return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])


def increase(samples: Sequence[Sample], name: str) -> float | None:
    """Increase of a counter between the first and the last sample."""
    seen = [sample.values[name] for sample in samples if name in sample.values]
    return seen[-1] - seen[0] if len(seen) > 1 else None


def summarize(samples: Iterable[Sample], begin: float, end: float) -> dict[str, float]:
    """What the server did between two moments; figures it does not export are absent."""
    within = [sample for sample in samples if begin <= sample.at <= end]
    found: dict[str, float | None] = {}
    for name in ("running", "waiting", "kv_used"):
        values = [sample.values[name] for sample in within if name in sample.values]
        found[f"{name}_mean"] = sum(values) / len(values) if values else None
        found[f"{name}_max"] = max(values, default=None)
    for name in ("max_running", "kv_max"):
        found[name] = next((sample.values[name] for sample in within if name in sample.values), None)
    prompt, cached = increase(within, "prompt_tokens"), increase(within, "cached_tokens")
    found["prefix_hit_ratio"] = cached / prompt if prompt and cached is not None else None
    waits, waited = increase(within, "queue_count"), increase(within, "queue_sum")
    found["queue_mean_s"] = waited / waits if waits and waited is not None else None
    found["preemptions"] = increase(within, "preemptions")
    found["refused"] = increase(within, "refused")
    found["steps_per_s"] = rate(within, "steps")
    found["generated_tokens_per_s"] = rate(within, "generated_tokens")
    return {name: value for name, value in found.items() if value is not None}
