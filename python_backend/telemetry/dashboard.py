"""The Grafana dashboard of a deployment, as the JSON that Grafana imports. Knows nothing of files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from python_backend.telemetry import adapters, gauges, guides, health, refusals, requests
from python_backend.telemetry.queries import quantile, rate, share, value

_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 24
_SOURCE = {"type": "prometheus", "uid": "${source}"}


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph: lines by their legend."""

    title: str
    unit: str  # Grafana's name of it
    lines: dict[str, str]  # legend -> expression


def _quantiles(*percent: int) -> tuple[tuple[str, float], ...]:
    return tuple((f"p{number}", number / 100) for number in percent)


def _times(title: str, spec: Any) -> Panel:
    return Panel(title, "s", {name: quantile(q, spec) for name, q in _quantiles(50, 95, 99)})


ROWS: dict[str, tuple[Panel, ...]] = {
    "Traffic": (
        Panel("Requests that ended", "reqps", {"{{finish_reason}}": rate(requests.FINISHED, by="finish_reason")}),
        Panel("Requests refused", "reqps", {"{{code}}": rate(refusals.REFUSED, by="code")}),
        # Triton's own: the one counter that has what its queue before a model rejected.
        Panel(
            "Errors of the ensemble (Triton counts each twice)",
            "reqps",
            {"{{reason}}": 'sum by (reason) (rate(nv_inference_request_failure{model="ensemble"}[5m]))'},
        ),
        Panel(
            "Tokens",
            "short",
            {
                "generated": rate(gauges.GENERATED_TOKENS),
                "prompt": rate(gauges.PROMPT_TOKENS),
                "prompt, cached": rate(gauges.CACHED_TOKENS),
            },
        ),
    ),
    "Latency": (
        _times("Time to first token", requests.TIME_TO_FIRST_TOKEN),
        _times("Time per output token", requests.TIME_PER_OUTPUT_TOKEN),
        _times("Time in the queue", requests.QUEUE_TIME),
        _times("Whole request", requests.LATENCY),
        Panel("Prompt length", "short", {name: quantile(q, requests.INPUT_LEN) for name, q in _quantiles(50, 95)}),
        Panel("Output length", "short", {name: quantile(q, requests.OUTPUT_LEN) for name, q in _quantiles(50, 95)}),
    ),
    "Engine": (
        Panel(
            "Batch",
            "short",
            {name: value(gauges.REQUESTS, name) for name in ("scheduled", "context", "waiting", "max")},
        ),
        Panel(
            "Work of a step",
            "short",
            {
                "prompt tokens": value(gauges.INFLIGHT, "total_context_tokens"),
                "sequences that decode": value(gauges.INFLIGHT, "generation_requests"),
                "preempted sequences": value(gauges.INFLIGHT, "paused_requests"),
            },
        ),
        Panel("KV blocks", "short", {name: value(gauges.KV_CACHE, name) for name in ("used", "free", "max")}),
        Panel("KV cache in use", "percentunit", {"{{instance}}": value(gauges.KV_CACHE, "fraction")}),
        Panel(
            "Prompt tokens found in the cache",
            "percentunit",
            {"share": share(rate(gauges.CACHED_TOKENS), rate(gauges.PROMPT_TOKENS))},
        ),
        Panel("Preemptions", "ops", {"per second": rate(gauges.PREEMPTIONS)}),
        Panel("Steps", "ops", {"{{instance}}": f"deriv({value(gauges.GENERAL, 'iteration_counter')}[1m])"}),
    ),
    "Health": (
        Panel("Models that serve", "bool", {"{{instance}} {{part}}": value(health.HEALTHY)}),
        Panel("Memory of the engine's process", "bytes", {"{{instance}}": value(gauges.MEMORY, "cpu")}),
    ),
    "Structure": (
        Panel("Requests with a guide", "reqps", {"{{guide_type}}": rate(guides.REQUESTS, by="guide_type")}),
        _times("Time to compile a guide", guides.COMPILE_TIME),
        _times("Time to fill a mask", guides.MASK_TIME),
        Panel("Guides found compiled", "percentunit", {"share": share(rate(guides.CACHE, "hit"), rate(guides.CACHE))}),
    ),
    "Adapters": (
        Panel("Requests by adapter", "reqps", {"{{adapter}}": rate(adapters.REQUESTS, by="adapter")}),
        Panel("Tokens by adapter", "short", {"{{adapter}}": rate(adapters.TOKENS, by="adapter")}),
        Panel("Adapters in memory", "short", {"{{instance}}": value(adapters.ADAPTERS)}),
        Panel("Memory of adapters", "bytes", {"{{instance}}": value(adapters.BYTES)}),
        Panel(
            "Look-ups and evictions",
            "ops",
            {"{{result}}": rate(adapters.CACHE, by="result"), "evicted": rate(adapters.EVICTIONS)},
        ),
        _times("Time to load an adapter", adapters.LOAD_TIME),
    ),
}


def dashboard() -> dict[str, Any]:
    """The whole dashboard; the data source is chosen in Grafana."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1},
            }
        )
        y += 1
        for at, panel in enumerate(row):
            x = at * _WIDTH % _COLUMNS
            y += _HEIGHT if at and not x else 0
            panels.append(_panel(panel, len(panels) + 1, x, y))
        y += _HEIGHT
    source = {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return {
        "uid": "triton-llm-stack",
        "title": "LLM server",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source]},
        "panels": panels,
    }


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + at), "datasource": _SOURCE, "expr": expression, "legendFormat": legend}
        for at, (legend, expression) in enumerate(panel.lines.items())
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": {"x": x, "y": y, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def expressions() -> list[str]:
    """Every query of the dashboard."""
    return [expression for row in ROWS.values() for panel in row for expression in panel.lines.values()]
