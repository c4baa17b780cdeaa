"""Processor time of one token mask along answers to everyday schemas: what may be spent over what is spent."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from loadtests.bench.compare import Section
from loadtests.bench.drivers import ROOT, BenchError

if TYPE_CHECKING:
    from loadtests.bench.sections import Bench

LIMITS_US = {"p50": 50.0, "p99": 1000.0}
VOCABULARIES = {"49k": (), "128k": ("--vocabulary", "128000")}  # the demo's, and one widened with made-up tokens
STRUCTURES = 40


def mask_time(bench: Bench) -> Section:
    """p50 and p99 for both vocabularies; XGrammar's figures beside them where it is installed."""
    ratios: dict[str, float] = {}
    raw: dict[str, Any] = {}
    for vocabulary, options in VOCABULARIES.items():
        found = _measured(bench, "llguidance", options)
        other = _measured(bench, "xgrammar", options) if find_spec("xgrammar") else None
        for name, limit_us in LIMITS_US.items():
            key = f"{vocabulary} {name}"
            ratios[key] = limit_us / found["mask"][f"{name}_us"]
            beside = {"xgrammar_us": other["mask"][f"{name}_us"]} if other else {}
            raw[key] = {"limit_us": limit_us, "llguidance_us": found["mask"][f"{name}_us"], **beside}
        raw[f"{vocabulary} all"] = {"llguidance": found, **({"xgrammar": other} if other else {})}
    return Section("mask_time", ratios, raw)


def _measured(bench: Bench, backend: str, options: tuple[str, ...]) -> dict[str, Any]:
    bench.say(f"masks of {backend} {' '.join(options)}")
    tokenizer = bench.engine / ".." / "checkpoint" / "tokenizer.json"
    command = [sys.executable, "-m", "tests.tools.bench_masks", str(tokenizer.resolve()), "--backend", backend]
    command += ["--structures", str(STRUCTURES), "--cpu", "--json", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise BenchError(f"the masks of {backend} could not be timed: {done.stderr.strip()[-400:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found
