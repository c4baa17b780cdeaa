"""Writes the table of docs/guided.md from a run of the JSON-Schema-Test-Suite.

Run `python -m tests.tools.make_guided_page` after a change; tests/contract/test_guided_page.py fails until then.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from python_backend.guided.keywords import ANNOTATIONS, ASSERTIONS
from python_backend.guided.llguidance_support import SUPPORT
from tests.tools.guided_suite import run_suite

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.tools.guided_suite import Counts

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guided.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"


def table(results: dict[str, Counts]) -> str:
    """The generated part of the page."""
    lines = [
        f"Enforced: {_names(SUPPORT.keywords)}.\n",
        f"Refused: {_names(ASSERTIONS - SUPPORT.keywords - {'format'})}; where one of them can refuse nothing "
        "(`uniqueItems: false`, `minContains` without `contains`), it is dropped.\n",
        f"Annotations: {_names(ANNOTATIONS)}.\n",
        f"Formats enforced: {_names(SUPPORT.formats)}; others are refused.\n",
        "| file of the suite | schemas enforced | refused | instances right | over-constrained | under-constrained |",
        "|---|---|---|---|---|---|",
    ]
    for name, counts in [*results.items(), ("all", _sum(results))]:
        figures = (counts.enforced, counts.refused, counts.right, len(counts.over), len(counts.under))
        lines.append(f"| {name} | {' | '.join(map(str, figures))} |")
    over = [f"- {name}: {what}" for name, counts in results.items() for what in counts.over]
    return "\n".join([*lines, "\nOver-constrained: these valid instances cannot be written.\n", *over]) + "\n"


def render(page: str, results: dict[str, Counts]) -> str:
    """The page with a new table."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table(results) + END + rest.split(END)[1]


def _sum(results: dict[str, Counts]) -> Counts:
    every = list(results.values())
    return type(every[0])(
        enforced=sum(counts.enforced for counts in every),
        refused=sum(counts.refused for counts in every),
        right=sum(counts.right for counts in every),
        over=[what for counts in every for what in counts.over],
        under=[what for counts in every for what in counts.under],
    )


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), run_suite()), encoding="utf-8")
