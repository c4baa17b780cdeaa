"""The results as a table for the terminal and as a page for docs/.

Knows nothing of how they were measured.
"""

from __future__ import annotations

from typing import Any

from rich.table import Table

EXPLAINED = {
    "engine_vs_openvino_genai": "Our engine in process against OpenVINO GenAI's ContinuousBatchingPipeline, output "
    "tokens/s over the whole run, requests submitted at once, greedy, end ignored, every prompt new random tokens. The "
    "peer loads the same GGUF file as it is (gguf) and converted to Q8_0 and F16; the ratio is to its fastest.",
    "server_vs_engine": "Streams through gRPC and the ensemble of `make serve`, against the "
    "engine in process with the same prompts.",
    "inflight_vs_static": "A trace with 90 % of the answers 8 to 32 tokens long and 10 % 256, all submitted at once: "
    "in-flight batching against the same engine with `batching_strategy` V1, which holds a batch until all are done.",
    "prefix_reuse_ttft": "Time to first token of a 528-token prompt, its first 512 tokens new (cold) or already seen "
    "(warm). Cold over warm, medians, engine in process.",
    "guided_vs_free": "Time per output token of answers by a JSON schema over that of free text, 16 of each at once, "
    "sampled, in the same steps. free_alone: 32 free ones without guided ones beside them.",
    "fast_forward": "Wall time of answers by a schema with long names, one at a time, greedy: forced tokens without "
    "steps of their own, over the same server with a step for each.",
    "guide_warm_ttft": "Milliseconds that a guide which is compiled already adds to the time to first token.",
    "lora_mixed": "Streams over 8 adapters of rank 8 on all seven projections, over streams without, on one server.",
    "lora_idle": "Streams without adapters on a server that has 8 of them, over a server that has none.",
    "logprobs_5": "Streams with the five likeliest tokens at every place, over streams without, on one server.",
    "load_tool_overhead": "32 streams as the users of `make loadtest` count them, over the raw client, on one server.",
    "capacity": "The highest rate within the SLO chat and its standard error, by a short `make loadtest FIND=max`.",
    "lora_scale": "Streams over so many adapters (rank 8, q and v), the n-th wanted 1/n as often as the first, over "
    "streams without. 64 fit into the server's cache; adapters come while it runs.",
    "mask_time": "Processor time to find the tokens that a schema allows next, along answers to 40 everyday schemas: "
    "what may be spent (p50 50 µs, p99 1 ms) over what llguidance spends.",
}


def table(results: dict[str, Any]) -> Table:
    """Ratios beside what they have to be."""
    made = Table(title="Ratios; over 1 is in our favour")
    for title in ("comparison", "concurrent", "ratio", "at least"):
        made.add_column(title, justify="left" if title == "comparison" else "right")
    made.add_column("figures")
    for name, concurrent, ratio, limit, held, figures in _rows(results):
        colour = "green" if held else "red"
        made.add_row(name, concurrent, f"[{colour}]{ratio:.2f}[/]", limit, figures)
    return made


def page(results: dict[str, Any]) -> str:
    """docs/benchmarks.md."""
    machine, settings = results["machine"], results["settings"]
    lines = [
        "# Benchmarks",
        "",
        "`make bench` measures all of this in one run (`QUICK=1`: a look) and writes `benchmarks/latest.json`;",
        "`.venv/bin/python -m loadtests.bench --render` makes this page of it. Both sides of a comparison get the same",
        "batches in turns, or batches alike where they share a server, whose prefix cache would know the second; a",
        "ratio is the median of the ratios of the rounds, and a figure the median over the rounds. A loaded machine",
        "makes every figure worthless.",
        "",
        f"Measured {results['date']} on {machine['cpu']}, {machine['cores']} cores"
        f" ({', '.join(machine['instructions'])}), load average at the start {machine['load_average']:.1f},"
        f" commit {machine['commit']}, Python {machine['python']}, {_versions(machine['packages'])}.",
        f"{settings['prompt_tokens']} tokens in, {settings['max_tokens']} out, {settings['rounds']} rounds.",
        "",
        "| comparison | concurrent | ratio | at least | figures |",
        "|---|---:|---:|---:|---|",
    ]
    for name, concurrent, ratio, limit, _, figures in _rows(results):
        lines.append(f"| {name} | {concurrent} | {ratio:.2f} | {limit} | {figures} |")
    lines += ["", *(f"- **{name}**: {EXPLAINED[name]}" for name in results["ratios"]), ""]
    lines += facts(results)
    return "\n".join(lines) + "\n"


def facts(results: dict[str, Any]) -> list[str]:
    """Figures that are no ratios, a sentence each."""
    found = []
    if "server_vs_engine" in results["raw"]:
        ready = results["raw"]["server_vs_engine"]["server_ready_s"]
        found.append(f"From `make serve` to READY with everything built: {ready:.1f} s.")
    if "capacity" in results["raw"]:
        found.append(_capacity(results["raw"]["capacity"]))
    sizes = results["environment_bytes"]
    found += _measured_apart(results)
    found.append(f".venv: {sizes['serve'] / 1e6:.0f} MB for serving, {sizes['total'] / 1e6:.0f} MB with all extras.")
    return found


def _measured_apart(results: dict[str, Any]) -> list[str]:
    """A sentence for each earlier run that sections come from."""
    runs: dict[str, list[str]] = {}
    last = (results["machine"]["commit"], results["settings"]["rounds"])
    for name, raw in results["raw"].items():
        found = raw.get("measured")
        if found and (found["commit"], found["rounds"]) != last:
            run = f"Measured {found['at']}, commit {found['commit']}, {found['rounds']} rounds"
            runs.setdefault(run, []).append(name)
    return [f"{run}: {', '.join(names)}." for run, names in runs.items()]


def _capacity(raw: dict[str, Any]) -> str:
    if raw["requests_per_s"] is None:
        return f"Capacity: no rate within the SLO {raw['slo']} was found."
    first = f"; at {raw['misses_at']:.2f} the first limit missed is {raw['first']}" if raw["misses_at"] else ""
    margin = f" ± {100 * raw['margin']:.1f} %" if raw.get("margin") is not None else ""
    return (
        f"Capacity: {raw['requests_per_s']:.2f} requests/s{margin} arriving at random "
        f"({raw['output_tokens_per_s']:.0f} output tokens/s) within the SLO {raw['slo']}{first}."
    )


def _rows(results: dict[str, Any]) -> list[tuple[str, str, float, str, bool, str]]:
    """Comparison, concurrency, ratio, what is asked of it, whether it holds, and the figures behind it."""
    return [
        (name, concurrent, ratio, *_limit(results, name, concurrent, ratio), _figures(results, name, concurrent))
        for name, ratios in results["ratios"].items()
        for concurrent, ratio in ratios.items()
    ]


def _limit(results: dict[str, Any], name: str, concurrent: str, ratio: float) -> tuple[str, bool]:
    ceiling = results.get("ceilings", {}).get(name, {}).get(concurrent)
    if ceiling is not None:
        return f"at most {ceiling:g}", ratio <= ceiling
    target = results["targets"].get(name, {}).get(concurrent)
    return ("", True) if target is None else (f"{target:g}", ratio >= target)


def _figures(results: dict[str, Any], name: str, concurrent: str) -> str:
    raw = results["raw"][name]
    if "ttft_s" in raw:
        return ", ".join(f"{state} {1000 * value:.0f} ms" for state, value in raw["ttft_s"].items())
    if "limit_us" in raw.get(concurrent, {}):
        return ", ".join(f"{key.removesuffix('_us')} {value:.1f} µs" for key, value in raw[concurrent].items())
    sides = ((side, found) for side, found in raw[concurrent].items() if "tokens_per_s" in found)
    figures = ", ".join(f"{side} {found['tokens_per_s']:.0f}" for side, found in sides) + " tokens/s"
    loads = raw[concurrent].get("loads")
    if loads is None:
        return figures
    return f"{figures}, {loads['loads']:.0f} loads of {loads['load_ms']:.0f} ms: {loads['load_share']:.0%} of the time"


def _versions(packages: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {number}" for name, number in packages.items() if number)
