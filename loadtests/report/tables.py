"""The tables of a report as HTML.

Knows only the plain values of report.json.
"""

from __future__ import annotations

import re
from html import escape
from typing import Any

from loadtests import metrics
from loadtests.report.words import load, milliseconds

Report = dict[str, Any]
_PARITY = (
    "Formulas as in AIPerf; percentiles over requests, linear between neighbours, nothing rounded before. Throughput "
    "is that of the window of a stage, where the load is steady; that from the first request to the last response, as "
    "AIPerf has it, is in report.json and stages.csv (aiperf_…)."
)
_MORE = (("itl", "ITL"), ("icl", "gap"), ("ttst", "TTST"), ("queue", "queue"))


def held(report: Report) -> dict[str, Any] | None:
    """The last stage at the highest load that holds."""
    found = [stage for stage in report["stages"] if stage["stage"]["load"] == report["verdict"]["holds"]]
    return found[-1] if found else None


def stages(report: Report) -> str:
    """A row per stage."""
    head = ["load", "requests", "TTFT p50", "p95", "p99", "TPOT p50", "p95", "p99", "answer p95", "tokens/s"]
    head += ["in + out", "good", "errors"]
    best = held(report)
    rows = []
    for stage in report["stages"]:
        over = {(check["metric"], check["statistic"]) for check in stage["checks"] if not check["met"]}
        cells = [(load(stage["stage"]["load"], stage["stage"]["kind"]), False), (str(_count(stage)), False)]
        for tag in ("ttft", "tpot"):
            cells += [
                (milliseconds(stage["metrics"][tag].get(name)), (tag, name) in over) for name in ("p50", "p95", "p99")
            ]
        cells.append((milliseconds(stage["metrics"]["latency"].get("p95")), ("latency", "p95") in over))
        rates = stage["rates"]
        cells += [(f"{rates['output_tokens_per_s']:.1f}", False), (f"{rates['total_tokens_per_s']:.1f}", False)]
        cells.append((f"{100 * rates['good_fraction']:.0f} %", ("good_fraction", "") in over))
        cells.append((f"{100 * rates['error_rate']:.2g} %", ("error_rate", "") in over))
        row = "".join(f"<td{' class=over' if bad else ''}>{escape(text)}</td>" for text, bad in cells)
        rows.append(f"<tr{' class=held' if stage is best else ''}>{row}</tr>")
    return _table(head, rows)


def _count(stage: dict[str, Any]) -> int:
    return int(stage["metrics"]["lag"]["count"])


def server(report: Report) -> str:
    """What the server says of itself, a row per stage; empty when it exports nothing that is known."""
    rows = []
    for stage in report["stages"]:
        found = stage["server"]
        if not found:
            continue
        shared = stage["lengths"].get("shared_ratio")
        cells = [
            load(stage["stage"]["load"], stage["stage"]["kind"]),
            _figure(found, "running_mean", ".1f"),
            _figure(found, "waiting_mean", ".1f"),
            milliseconds(1 / found["steps_per_s"] if found.get("steps_per_s") else None),
            milliseconds(found.get("queue_mean_s")),
            f"{100 * found['kv_used_max'] / found['kv_max']:.0f} %" if found.get("kv_max") else "–",
            _figure(found, "preemptions", ".0f"),
            f"{100 * found['prefix_hit_ratio']:.0f} %" if "prefix_hit_ratio" in found else "–",
            "–" if shared is None else f"{100 * shared:.0f} %",
            _figure(found, "generated_tokens_per_s", ".1f"),
            _figure(found, "refused", ".0f"),
        ]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    head = ["load", "batch", "waiting", "a step", "in the queue", "KV at most", "preemptions", "prefix hits"]
    return _table([*head, "announced", "tokens/s", "refused"], rows) if rows else ""


def _figure(found: dict[str, float], name: str, form: str) -> str:
    return format(found[name], form) if name in found else "–"


def errors(report: Report) -> str:
    """How many of each class, at which load, and what the server said."""
    rows = []
    for stage in report["stages"]:
        for name, count in sorted(stage["errors"].items(), key=lambda pair: -pair[1]):
            said = "; ".join(stage["messages"].get(name, []))
            where = escape(load(stage["stage"]["load"], stage["stage"]["kind"]))
            rows.append(
                f"<tr><td>{escape(name)}</td><td>{where}</td><td>{count}</td><td class=text>{escape(said)}</td></tr>"
            )
    if not rows:
        total = sum(_count(stage) for stage in report["stages"])
        return f"<p>None of {total} requests failed. An error inside a stream would count as a failure.</p>"
    return _table(["class", "load", "requests", "what was said"], rows)


def latencies(report: Report) -> str:
    """A row per stage with the latencies that the table of stages has no room for."""
    head = ["load"]
    for _, name in _MORE:
        head += [f"{name} p50", "p95", "p99"]
    rows = []
    for stage in report["stages"]:
        cells = [f"<td>{escape(load(stage['stage']['load'], stage['stage']['kind']))}</td>"]
        for tag, _ in _MORE:
            cells += [f"<td>{milliseconds(stage['metrics'][tag].get(name))}</td>" for name in ("p50", "p95", "p99")]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return _table(head, rows)


def groups(report: Report) -> str:
    """By workload and adapter at the highest load; empty when there is only one group."""
    found = report["stages"][-1]["groups"] if report["stages"] else {}
    rows = [
        f"<tr><td>{escape(name)}</td><td>{group['requests']}</td>"
        + "".join(
            f"<td>{milliseconds(group[tag].get(name_))}</td>" for tag in ("ttft", "tpot") for name_ in ("p50", "p95")
        )
        + f"<td>{milliseconds(group['latency'].get('p95'))}</td><td>{100 * group['good_fraction']:.0f} %</td>"
        f"<td>{100 * group['error_rate']:.2f} %</td></tr>"
        for name, group in found.items()
    ]
    head = ["group", "requests", "TTFT p50", "p95", "TPOT p50", "p95", "answer p95", "good", "errors"]
    return _table(head, rows) if rows else ""


def comparison(report: Report, other: Report) -> str:
    """The same loads of two runs, and by how much this one differs."""
    theirs = {stage["stage"]["load"]: stage for stage in other["stages"]}
    shared = [stage for stage in report["stages"] if stage["stage"]["load"] in theirs]
    if not shared or report["kind"] != other["kind"]:
        return "<p>The two runs have no load in common; the answers above and there can be compared.</p>"
    rows = []
    for stage in shared:
        beside = theirs[stage["stage"]["load"]]
        cells = [f"<td>{escape(load(stage['stage']['load'], stage['stage']['kind']))}</td>"]
        for tag in ("ttft", "tpot", "latency"):
            cells += _pair(
                beside["metrics"][tag].get("p95"), stage["metrics"][tag].get("p95"), milliseconds, lower=True
            )
        output = beside["rates"]["output_tokens_per_s"], stage["rates"]["output_tokens_per_s"]
        cells += _pair(*output, lambda value: "–" if value is None else f"{value:.1f}", lower=False)
        rows.append(f"<tr>{''.join(cells)}</tr>")
    head = ["load"]
    for name in ("TTFT p95", "TPOT p95", "answer p95", "output tokens/s"):
        head += [f"{name}, other", "this", "change"]
    return _table(head, rows)


def _pair(before: float | None, after: float | None, show: Any, *, lower: bool) -> list[str]:
    change = ""
    style = ""
    if before and after is not None:
        share = after / before - 1
        worse = share > 0.1 if lower else share < -0.1
        better = share < -0.1 if lower else share > 0.1
        style = ' class="bad"' if worse else ' class="good"' if better else ""
        change = f"{100 * share:+.0f} %"
    return [f"<td>{show(before)}</td><td>{show(after)}</td><td{style}>{change}</td>"]


def method(report: Report) -> str:
    """What was asked of whom on what, and what the words mean."""
    settings, machine, timing = report["settings"], report["machine"], report["settings"]["timing"]
    last = report["stages"][-1] if report["stages"] else None
    facts = [
        ("Workload", f"{settings['workload']}: {settings['about']}"),
        ("Load", _load_text(report)),
        ("Counted", _counted(timing)),
        ("Asked by", f"{settings['transport']}, {_processes(settings['workers'])}, seed {settings['seed']}"),
        (
            "Server",
            f"{report['server']['http']}" + (", started for this test" if report["server"]["started_here"] else ""),
        ),
        ("Machine", f"{machine['cpu']}, {machine['cores']} cores ({', '.join(machine['instructions'])})"),
        ("Load average", f"{machine['load_average']:.1f} when the test began"),
        ("Software", ", ".join(f"{name} {number}" for name, number in machine["packages"].items() if number)),
        ("Commit", machine.get("commit") or "unknown"),
        ("Command", f"python -m loadtests {' '.join(settings['command'])}"),
    ]
    if last and last["lengths"]:
        lengths = last["lengths"]
        facts.insert(
            2,
            (
                "Lengths",
                f"prompts {last['metrics']['prompt_tokens'].get('mean', 0):.0f} tokens on average, answers "
                f"{lengths['got_mean']:.0f} of {lengths['asked_mean']:.0f} asked for, "
                f"{100 * lengths['as_asked']:.0f} % exactly as asked; {100 * lengths.get('shared_ratio', 0):.0f} % of "
                "the prompt tokens are known to repeat an earlier prompt (counts of the server, at the highest load)",
            ),
        )
    tool = max((stage["tool"].get("cores", 0.0) for stage in report["stages"]), default=0.0)
    lag = max((stage["tool"].get("lag_s", 0.0) for stage in report["stages"]), default=0.0)
    facts.append(("This tool", f"used up to {tool:.2f} cores, was held up for at most {milliseconds(lag)}"))
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts)
    return f"<dl>{listed}</dl><h2>What the words mean</h2><p>{_PARITY}</p><dl>{_definitions()}</dl>"


def _processes(count: int) -> str:
    return f"{count} process{'es' if count != 1 else ''}"


def _load_text(report: Report) -> str:
    if report["kind"] == "users":
        think = report["settings"]["think_s"]
        pause = f" a pause of {think:g} s on average" if think else " no pause"
        return f"closed loop: a user has one request in flight and makes{pause} between answer and next request"
    return (
        "open loop: requests come at their times, however the server is doing, and latency counts from the moment a "
        "request was meant to start"
    )


def _counted(timing: dict[str, float]) -> str:
    return (
        f"requests that start within {timing['window_s']:g} s after {timing['warmup_s']:g} s of warm-up (up to "
        f"{timing['max_window_s']:g} s, until there are {timing['min_requests']:.0f}); the load stays until the last "
        "of them is over"
    )


def _definitions() -> str:
    defined: list[Any] = [*metrics.RECORD_METRICS, metrics.InterChunkLatency, metrics.RequestThroughput]
    defined += [metrics.OutputTokenThroughput, metrics.TotalTokenThroughput, metrics.BenchmarkDuration]
    defined += [metrics.Goodput, metrics.GoodFraction, metrics.ErrorRate]
    found = []
    for metric in defined:
        name = getattr(metric, "name", None) or re.sub(r"(?<!^)(?=[A-Z])", " ", metric.__name__).lower()
        tag = getattr(metric, "tag", "")
        label = tag.upper() if tag and len(tag) < 6 else name
        text = " ".join((metric.__doc__ or "").removeprefix("Formula: ").split())
        found.append(f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>")
    return "".join(found)


def _table(head: list[str], rows: list[str]) -> str:
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
