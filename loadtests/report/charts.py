"""The charts of a report: what of report.json goes on which axis.

Knows nothing of how SVG is written.
"""

from __future__ import annotations

import math
from typing import Any

from loadtests.report.svg import Axis, Plot, Point, nice, top
from loadtests.report.words import load, milliseconds

Report = dict[str, Any]
_WIDE = {"width": 920, "height": 200}
_TIMES = (("p50", "c1"), ("p95", "c2"), ("p99", "c3"))


def curves(report: Report, other: Report | None) -> list[str]:
    """Latency and throughput over the load; the other run's p95 dashed."""
    found = [
        _times(report, other, "ttft", "Time to first token"),
        _times(report, other, "tpot", "Time per output token"),
        _times(report, other, "latency", "End to end latency"),
        _throughput(report, other),
    ]
    return [chart for chart in found if chart]


def _loads(report: Report) -> list[float]:
    return [stage["stage"]["load"] for stage in report["stages"]]


def _load_axis(report: Report, other: Report | None) -> tuple[Axis, list[tuple[float, str]], str]:
    loads = _loads(report)
    beside = _loads(other) if other and other["kind"] == report["kind"] else []
    both = sorted({*loads, *beside})
    low, high = both[0] / 1.15, both[-1] * 1.15
    ticks: list[tuple[float, str]] = []
    for value in sorted(set(loads)):
        if not ticks or math.log(value / ticks[-1][0]) > 0.06 * math.log(high / low):
            ticks.append((value, f"{value:.3g}"))
    name = "users: requests in flight at once" if report["kind"] == "users" else "requests per second offered"
    return Axis(low, high, log=True), ticks, name


def _series(report: Report, tag: str, statistic: str) -> list[Point]:
    pairs = ((stage["stage"]["load"], stage["metrics"][tag].get(statistic)) for stage in report["stages"])
    return sorted((load_, value) for load_, value in pairs if value is not None)


def _limit_of(report: Report, tag: str) -> tuple[float, str] | None:
    limits = report["slo"]["limits_s"].get(tag)
    if not limits:
        return None
    name, value = min(limits.items(), key=lambda pair: float(pair[1]))
    return float(value), f"SLO {name} {milliseconds(float(value))}"


def _times(report: Report, other: Report | None, tag: str, title: str) -> str:
    lines = {name: _series(report, tag, name) for name, _ in _TIMES}
    if not lines["p95"]:
        return ""
    beside = _series(other, tag, "p95") if other and other["kind"] == report["kind"] else []
    limit = _limit_of(report, tag)
    x, ticks, name = _load_axis(report, other)
    highest = top([y for points in [*lines.values(), beside] for _, y in points], limit[0] if limit else 0.0)
    plot = Plot(x, Axis(0, highest), title=title)
    plot.axes(ticks, milliseconds, name)
    if limit:
        plot.limit(*limit)
    plot.line(beside, "other", "p95 of the other run" if beside else "")
    for statistic, style in _TIMES:
        shown = [(x_, y) for x_, y in lines[statistic]]
        plot.line(shown, style, statistic, dots=True, tip=f"{statistic} at {{x}}: {{y}} s")
    return plot.figure("")


def _throughput(report: Report, other: Report | None) -> str:
    def series(of: Report, key: str) -> list[Point]:
        return sorted((stage["stage"]["load"], stage["rates"][key]) for stage in of["stages"])

    output, total = series(report, "output_tokens_per_s"), series(report, "total_tokens_per_s")
    beside = series(other, "output_tokens_per_s") if other and other["kind"] == report["kind"] else []
    x, ticks, name = _load_axis(report, other)
    plot = Plot(x, Axis(0, top([y for _, y in [*total, *beside]])), title="Throughput")
    plot.axes(ticks, lambda value: f"{value:g}", name)
    plot.line(beside, "other", "output of the other run" if beside else "")
    plot.line(total, "c4", "input + output", dots=True, tip="{y} tokens/s at {x}")
    plot.line(output, "c1", "output", dots=True, tip="{y} tokens/s at {x}")
    return plot.figure("tokens per second")


def distributions(report: Report) -> list[str]:
    """Which share of the requests was answered within which time, a line per stage."""
    return [chart for tag in ("ttft", "tpot", "icl", "latency") if (chart := _distribution(report, tag))]


def _distribution(report: Report, tag: str) -> str:
    titles = {
        "ttft": "Time to first token",
        "tpot": "Time per output token",
        "icl": "Gaps between responses",
        "latency": "End to end latency",
    }
    chosen = _spread([stage for stage in report["stages"] if stage["ecdf"].get(tag)], 6)
    values = [value for stage in chosen for value, _ in stage["ecdf"][tag] if value > 0]
    if not values:
        return ""
    limit = _limit_of(report, tag)
    low, high = min(values), max([*values, limit[0] if limit else 0.0])
    x = Axis(low / 1.1, high * 1.15, log=True)
    plot = Plot(x, Axis(0, 1), title=titles[tag])
    ticks = x.ticks()
    every = max(1, math.ceil(len(ticks) / 5))
    plot.axes([(value, milliseconds(value)) for value in ticks[::every]], lambda value: f"{100 * value:.0f} %")
    if limit:
        plot.upright(*limit)
    for number, stage in enumerate(chosen):
        points = [(value, share) for value, share in stage["ecdf"][tag] if value > 0]
        plot.steps(points, f"r{number}", f"{stage['stage']['load']:.3g}")
    return plot.figure("share of the gaps shorter than" if tag == "icl" else "share of requests answered within")


def _spread(stages: list[Any], most: int) -> list[Any]:
    if len(stages) <= most:
        return stages
    return [stages[round(i * (len(stages) - 1) / (most - 1))] for i in range(most)]


def timelines(report: Report) -> list[str]:
    """Requests and the server on one clock."""
    length = max([stage["stage"]["end"] for stage in report["stages"]], default=report["begun_at"]) - report["begun_at"]
    length = max(length, 1.0)
    found = [
        _dots(report, length, 1, "ttft", "Time to first token"),
        _dots(report, length, 2, "tpot", "Time per token"),
    ]
    found.append(_tokens(report, length))
    found += _server(report, length)
    return [chart for chart in found if chart]


def _timeline(report: Report, length: float, y: Axis, title: str, labels: bool = False) -> Plot:
    plot = Plot(Axis(0, length), y, title=title, **_WIDE)
    stages = sorted(report["stages"], key=lambda stage: stage["stage"]["begin"])
    for number, found in enumerate(stages):
        stage = found["stage"]
        begin, end = stage["window_begin"] - report["begun_at"], stage["window_end"] - report["begun_at"]
        plot.band(begin, end, load(stage["load"], stage["kind"]) if labels else "", odd=number % 2 == 1)
    return plot


def _seconds(plot: Plot, length: float, name: str = "") -> list[tuple[float, str]]:
    del plot, name
    step = nice(length / 8)
    return [(number * step, f"{number * step:g} s") for number in range(int(length / step) + 1)]


def _dots(report: Report, length: float, column: int, tag: str, title: str) -> str:
    points = [(row[0], row[column]) for row in report["timeline"] if row[column] is not None and row[0] <= length]
    if not points:
        return ""
    limit = _limit_of(report, tag)
    plot = _timeline(report, length, Axis(0, top([y for _, y in points], limit[0] if limit else 0)), title, labels=True)
    plot.axes(_seconds(plot, length), milliseconds, y_ticks=4)
    failed = [(row[0], 0.0) for row in report["timeline"] if not row[4] and row[0] <= length]
    plot.scatter(points, "c1", "a request, at its start")
    if failed:
        plot.scatter(failed, "bad", "a failed request", 3)
    if limit:
        plot.limit(*limit)
    return plot.figure("shaded: what counts")


def _tokens(report: Report, length: float) -> str:
    tokens = report["tokens"]
    if not any(tokens):
        return ""
    width = max(1, round(length / 120))
    points = [
        (float(start), sum(tokens[start : start + width]) / len(tokens[start : start + width]))
        for start in range(0, min(len(tokens), int(length)), width)
    ]
    plot = _timeline(report, length, Axis(0, top([y for _, y in points])), "Output tokens per second")
    plot.axes(_seconds(plot, length), lambda value: f"{value:g}", y_ticks=4)
    plot.steps(points, "c1", "received")
    return plot.figure("")


def _server(report: Report, length: float) -> list[str]:
    samples = report["samples"]
    moments = samples["t"]

    def series(name: str) -> list[Point]:
        pairs = zip(moments, samples.get(name, []), strict=False)
        return [(t, value) for t, value in pairs if value is not None and 0 <= t <= length]

    running, waiting, kv = series("running"), series("waiting"), series("kv_used")
    charts = []
    if running:
        most = max((value for _, value in series("max_running")), default=0.0)
        high = top([y for _, y in [*running, *waiting]])
        plot = _timeline(report, length, Axis(0, high), "Batch and queue")
        plot.axes(_seconds(plot, length), lambda value: f"{value:g}", y_ticks=4)
        if most and most <= high:
            plot.limit(most, f"largest batch {most:g}")
        plot.steps(waiting, "c3", "waiting")
        plot.steps(running, "c1", "running")
        charts.append(plot.figure("requests in the server"))
    if kv:
        most = max((value for _, value in series("kv_max")), default=0.0)
        plot = _timeline(report, length, Axis(0, top([y for _, y in kv])), "KV blocks in use")
        plot.axes(_seconds(plot, length), lambda value: f"{value:g}", y_ticks=4)
        plot.steps(kv, "c4", f"in use, of {most:g}")
        charts.append(plot.figure(""))
    hits = _hit_ratio(series("prompt_tokens"), series("cached_tokens"))
    if hits:
        plot = _timeline(report, length, Axis(0, 1), "Prefix cache")
        plot.axes(_seconds(plot, length), lambda value: f"{100 * value:.0f} %", y_ticks=4)
        plot.steps(hits, "c2", "share of prompt tokens found in it, over 5 s")
        charts.append(plot.figure(""))
    return charts


def _hit_ratio(prompts: list[Point], cached: list[Point], over_s: float = 5.0) -> list[Point]:
    points: list[Point] = []
    start = 0
    for number in range(1, min(len(prompts), len(cached))):
        while prompts[number][0] - prompts[start][0] > over_s:
            start += 1
        tokens = prompts[number][1] - prompts[start][1]
        if tokens > 0:
            points.append((prompts[number][0], min(1.0, (cached[number][1] - cached[start][1]) / tokens)))
    return points


def search(report: Report) -> str:
    """The trials of a search: rate and how much of the limit was used."""
    trials = report["search"]["trials"] if report["search"] else []
    known = [(rate, use) for rate, use in trials if use is not None]
    if len(known) < 2:
        return ""
    rates = [rate for rate, _ in known]
    plot = Plot(
        Axis(min(rates) / 1.1, max(rates) * 1.1), Axis(0, min(3.0, top([use for _, use in known], 1.1))), title="Search"
    )
    plot.axes(
        [(v, f"{v:.3g}") for v in Axis(min(rates), max(rates)).ticks()],
        lambda v: f"{100 * v:.0f} %",
        "requests per second offered",
    )
    plot.limit(1.0, "the limit")
    limit = report["search"].get("limit")
    if limit:
        near = [limit["rate"] * (0.75 + 0.05 * step) for step in range(11)]
        near = [rate for rate in near if min(rates) <= rate <= max(rates)]
        plot.line([(rate, (rate / limit["rate"]) ** limit["slope"]) for rate in near], "c2", "through all trials")
    plot.scatter([(rate, use) for rate, use in known if use <= 1], "c1", "met", 4)
    plot.scatter([(rate, use) for rate, use in known if use > 1], "bad", "missed", 4)
    return plot.figure("share of the tightest limit that was used, one dot per trial")
