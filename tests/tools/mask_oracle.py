"""`make mask-oracle`: both constraint backends and independent judges on the same structures; docs/mask-oracle.md.

Exit code 1 when a backend lets through what its structure forbids.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import defaultdict
from pathlib import Path

from tests.tools.oracle_cases import oracle_cases
from tests.tools.oracle_compare import LIBRARIES, Tally, compare
from tests.unit.guided_helpers import backend

PAGE = Path(__file__).resolve().parents[2] / "docs" / "mask-oracle.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"


def run(seed: int, count: int) -> dict[tuple[str, str], Tally]:
    """Tallies by source and kind."""
    found: dict[tuple[str, str], Tally] = defaultdict(Tally)
    for index, case in enumerate(oracle_cases(seed, count)):
        found[case.source, case.kind].add(compare(case, random.Random(f"{seed} {index}")))
    return dict(found)


def table(results: dict[tuple[str, str], Tally], seed: int, count: int) -> str:
    """The generated part of the page."""
    names = ", ".join(f"{backend(library).name} {backend(library).version}" for library in LIBRARIES)
    every = Tally()
    for tally in results.values():
        every.add(tally)
    rows = [*((f"{source} | {kind}", tally) for (source, kind), tally in results.items()), ("all |", every)]
    lines = [f"{names}; seed {seed}, {count} structures of each generator.\n"]
    lines += [
        "| structures | kind | both | llguidance only | xgrammar only | refused by both |",
        "|---|---|---|---|---|---|",
    ]
    for name, tally in rows:
        kept = [tally.structures[key] for key in ("both", *LIBRARIES, "neither")]
        lines.append(f"| {name} | {' | '.join(map(str, kept))} |")
    verdicts = [f"{verdict} {library}" for library in LIBRARIES for verdict in ("right", "over", "under")]
    lines += ["", "| texts | kind | " + " | ".join(_heading(v) for v in verdicts) + " |", "|---|---|" + "---|" * 6]
    for name, tally in rows:
        lines.append(f"| {name} | {' | '.join(str(tally.texts[verdict]) for verdict in verdicts)} |")
    lines += ["", "| masks after the same tokens | steps |", "|---|---|"]
    lines += [f"| {reason} | {steps} |" for reason, steps in sorted(every.masks.items(), key=lambda item: -item[1])]
    return "\n".join(lines) + "\n"


def _heading(verdict: str) -> str:
    kind, library = verdict.split()
    return f"{library} {'right' if kind == 'right' else f'{kind}-constrained'}"


def main() -> int:
    """Run, print and write the table; 1 when something is under-constrained."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--count", type=int, default=600, help="structures of each generator")
    parser.add_argument("--write", action="store_true", help="bring docs/mask-oracle.md up to date")
    arguments = parser.parse_args()
    started = time.monotonic()
    results = run(arguments.seed, arguments.count)
    text = table(results, arguments.seed, arguments.count)
    under = [line for tally in results.values() for line in tally.under]
    print(text)
    print("\n".join(under[:50]), file=sys.stderr)
    print(f"{time.monotonic() - started:.0f} s; {len(under)} texts got through that their structure forbids.")
    if arguments.write:
        before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
        PAGE.write_text(before + BEGIN + text + END + rest.split(END)[1], encoding="utf-8")
    return 1 if under else 0


if __name__ == "__main__":
    raise SystemExit(main())
