"""report.html: one file that needs nothing else, the answer first.

Knows only the plain values of report.json.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from loadtests.report import charts, tables
from loadtests.report.words import answer, limits, load, milliseconds, missed

Report = dict[str, Any]
_STYLE = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")


def page(report: Report, other: Report | None) -> str:
    """The whole page; `other` is the run to compare with."""
    title = f"Load test of {report['date']}: {report['settings']['workload']} against the SLO {report['slo']['name']}"
    parts = [_head(report, title), _tiles(report)]
    if report["stages"]:
        parts += _figures(report, other)
    if other is not None:
        parts.append(_section("Beside the other run", tables.comparison(report, other), _beside(other)))
    parts.append(_section("Errors", tables.errors(report)))
    groups = tables.groups(report)
    if groups:
        parts.append(_section("By workload and adapter", groups, "At the highest load."))
    parts.append(_section("How it was measured", tables.method(report)))
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>{body}</body></html>\n"
    )


def _head(report: Report, title: str) -> str:
    verdict = report["verdict"]
    kind = report["stages"][0]["stage"]["kind"] if report["stages"] else "users"
    chips = ""
    for line in missed(verdict, report["kind"]):
        style = "bad" if "Missed" in line else "good"
        chips += f'<span class="chip {style}">{escape(line)}</span>'
    if not chips:
        word, style = ("SLO met", "good") if verdict["passed"] else ("SLO missed", "bad")
        chips = f'<span class="chip {style}">{word}</span>'
    why = "".join(f"<li>{escape(reason)}</li>" for reason in verdict["reasons"])
    notes = "".join(f"<li>{escape(caution)}</li>" for caution in verdict["cautions"])
    why_html = f'<ul class="why">{why}</ul>' if why else ""
    notes_html = f'<ul class="notes">{notes}</ul>' if notes else ""
    return (
        f'<h1>{escape(title)}</h1><p class="answer">{escape(answer(verdict, report["slo"], kind))}</p>'
        f"<div>{chips}</div>{why_html}{notes_html}"
        f"<p>The SLO: {escape(limits(report['slo']))}.</p>"
    )


def _tiles(report: Report) -> str:
    """Figures of the highest load that holds, or of the lowest where none does."""
    if not report["stages"]:
        return ""
    shown = tables.held(report) or report["stages"][0]
    found, rates = shown["metrics"], shown["rates"]
    tiles = [
        (load(shown["stage"]["load"], shown["stage"]["kind"]), "figures at"),
        (milliseconds(found["ttft"].get("p95")), "TTFT p95"),
        (milliseconds(found["tpot"].get("p95")), "TPOT p95"),
        (milliseconds(found["latency"].get("p95")), "whole answer p95"),
        (f"{rates['output_tokens_per_s']:.0f}", "output tokens/s"),
        (f"{rates['requests_per_s']:.2f}", "requests/s"),
    ]
    return (
        '<div class="tiles">'
        + "".join(f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b></div>' for value, name in tiles)
        + "</div>"
    )


def _figures(report: Report, other: Report | None) -> list[str]:
    parts = []
    if len(report["stages"]) > 1:
        drawn = charts.curves(report, other)
        if report["search"]:
            drawn.insert(0, charts.search(report))
        parts.append(_section("Latency and throughput over the load", f'<div class="grid2">{"".join(drawn)}</div>'))
    parts.append(_section("Stages", tables.stages(report), "Red: over the limit. Bold: the highest load that holds."))
    about = (
        "Between two tokens (ITL) and two responses (gap), to the second response (TTST), and in the server's queue."
    )
    parts.append(_section("Latencies within an answer", tables.latencies(report), about))
    own = tables.server(report)
    if own:
        about = "The server's own figures, means over what counts. Announced: prompt tokens that the workload repeats."
        parts.append(_section("Inside the server", own, about))
    spread = f'<div class="grid2">{"".join(charts.distributions(report))}</div>'
    parts.append(_section("Distributions", spread, "A line per load; the further left and the steeper, the better."))
    lines = f'<div class="wide">{"".join(charts.timelines(report))}</div>'
    parts.append(
        _section("Over time", lines, "Requests as the users saw them and the server's own figures, one clock.")
    )
    return parts


def _section(title: str, body: str, about: str = "") -> str:
    said = f"<p>{escape(about)}</p>" if about else ""
    return f"<h2>{escape(title)}</h2>{said}{body}"


def _beside(other: Report) -> str:
    machine = other["machine"]
    return f"The other: {other['date']}, commit {machine.get('commit') or 'unknown'}, {other['settings']['workload']}."
