"""The load tests measured themselves: what locust's users see over a raw client, and the capacity they find."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadtests.bench.compare import Section
from loadtests.bench.drivers import ROOT, BenchError, LineDriver, ServerDriver
from loadtests.bench.streams import paired

if TYPE_CHECKING:
    from loadtests.bench.sections import Bench

_SLO = "chat"


def load_tool_overhead(bench: Bench) -> Section:
    """Output tokens/s of 32 streams as locust's users count them, over those of the raw client, on one server."""
    server = ServerDriver("client")
    try:
        command = [sys.executable, "-m", "loadtests.bench.locust_side", "--grpc-url", server.grpc_url]
        users = LineDriver("locust", command)
        try:
            return paired("load_tool_overhead", bench, users, server)
        finally:
            users.close()
    finally:
        server.close()


def capacity(bench: Bench) -> Section:
    """The highest rate of requests within the SLO chat: a short FIND=max. A figure, no ratio."""
    window_s, warmup_s = (12, 4) if bench.rounds > 1 else (6, 2)
    bench.say(f"searching the highest rate within the SLO {_SLO}, some 11 trials of {window_s + warmup_s} s or more")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "loadtests", "--slo", _SLO, "--find", "max", "--out", folder]
        timing = ["--window-s", str(window_s), "--warmup-s", str(warmup_s)]
        done = subprocess.run([*command, *timing], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        reports = list(Path(folder).glob("*/report.json"))
        if not reports:
            raise BenchError(f"the load test ended with code {done.returncode}: {done.stderr.strip()[-300:]}")
        return Section("capacity", {}, _capacity(json.loads(reports[0].read_text(encoding="utf-8"))))


def _capacity(report: dict[str, Any]) -> dict[str, Any]:
    verdict = report["verdict"]
    held = [stage for stage in report["stages"] if stage["stage"]["load"] == verdict["holds"]]
    return {
        "slo": report["slo"]["name"],
        "requests_per_s": verdict["estimate"] or verdict["holds"],
        "margin": verdict["margin"],
        "misses_at": verdict["misses"],
        "first": verdict["first"]["label"] if verdict["first"] else None,
        "output_tokens_per_s": held[-1]["rates"]["output_tokens_per_s"] if held else None,
        "running_mean": held[-1]["server"].get("running_mean") if held else None,
    }
