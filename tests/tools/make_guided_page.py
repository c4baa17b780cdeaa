"""Writes the tables of docs/guided.md from runs of the JSON-Schema-Test-Suite.

Run `python -m tests.tools.make_guided_page` after a change, with XGrammar installed (`make setup EXTRA=xgrammar`);
tests/contract/test_guided_page.py fails until then.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from python_backend.guided.keywords import ANNOTATIONS, ASSERTIONS
from python_backend.guided.llguidance_support import SUPPORT
from python_backend.guided.xgrammar_library import is_installed
from python_backend.guided.xgrammar_support import SUPPORT as XGRAMMAR
from tests.tools.guided_suite import record, run_suite, xgrammar_results
from tests.unit.guided_helpers import backend

if TYPE_CHECKING:
    from collections.abc import Iterable

    from python_backend.guided.keywords import Support
    from tests.tools.guided_suite import Counts

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guided.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
_DROPPED = (
    "where one of them can refuse nothing (`uniqueItems: false`, `minContains` without `contains`), it is dropped"
)
# What of a keyword each library does not enforce; everything else in the table is enforced wherever it stands.
PARTLY: dict[str, dict[str, str]] = {
    "oneOf": {"llguidance": "branches that can be told apart", "xgrammar": "branches that can be told apart"},
    "exclusiveMinimum": {"llguidance": "not beside a bound less than one away", "xgrammar": "6 decimals"},
    "exclusiveMaximum": {"llguidance": "not beside a bound less than one away", "xgrammar": "6 decimals"},
    "minimum": {"xgrammar": "6 decimals"},
    "maximum": {"xgrammar": "6 decimals"},
    "multipleOf": {"xgrammar": "whole numbers; no bound or both"},
    "pattern": {
        "llguidance": "no look-around, no \\b",
        "xgrammar": "no look-around, no \\b, no \\p, no length beside it",
    },
    "minLength": {"xgrammar": "not beside pattern or format"},
    "maxLength": {"xgrammar": "not beside pattern or format"},
    "minProperties": {"xgrammar": "at most 1 where other names may come"},
    "patternProperties": {"xgrammar": "one pattern that no property matches; no other names then"},
    "allOf": {"xgrammar": "branches whose keywords can stand together"},
    "$ref": {"llguidance": "inside the schema", "xgrammar": "inside the schema, no $id below the root"},
}


def table(results: dict[str, Counts], xgrammar: dict[str, Counts], version: str) -> str:
    """The generated part of the page."""
    lines = [
        f"llguidance {backend().version}, XGrammar {version}.\n",
        "| keyword | llguidance | XGrammar |",
        "|---|---|---|",
        *(f"| `{name}` | {_cell(name, SUPPORT)} | {_cell(name, XGRAMMAR)} |" for name in _assertions()),
        f"\nRefused means by name and path; {_DROPPED}.\n",
        f"Annotations: {_names(ANNOTATIONS)}.\n",
        "| format | llguidance | XGrammar |",
        "|---|---|---|",
        *(
            f"| `{name}` | {_yes(name in SUPPORT.formats)} | {_yes(name in XGRAMMAR.formats)} |"
            for name in sorted(SUPPORT.formats | XGRAMMAR.formats)
        ),
        "\nOther formats are refused. Counts by file of the suite: schemas enforced and refused; instances of the "
        "enforced ones that are right, over- and under-constrained.\n",
        "| file of the suite | llguidance: enforced | refused | right | over | under "
        "| XGrammar: enforced | refused | right | over | under |",
        "|---|" + "---|" * 10,
    ]
    for name, counts in [*results.items(), ("all", _sum(results))]:
        other = _sum(xgrammar) if name == "all" else xgrammar[name]
        lines.append(f"| {name} | {' | '.join(map(str, [*_figures(counts), *_figures(other)]))} |")
    for library, found in (("llguidance", results), ("XGrammar", xgrammar)):
        over = [f"- {name}: {what}" for name, counts in found.items() for what in counts.over]
        lines += [f"\nOver-constrained in {library}: these valid instances cannot be written.\n", *over]
    return "\n".join(lines) + "\n"


def _assertions() -> list[str]:
    return sorted(ASSERTIONS - {"format"})


def _cell(keyword: str, support: Support) -> str:
    if keyword not in support.keywords:
        return "refused"
    partly = PARTLY.get(keyword, {}).get("llguidance" if support is SUPPORT else "xgrammar")
    return f"enforced: {partly}" if partly else "enforced"


def _yes(enforced: bool) -> str:
    return "enforced" if enforced else "refused"


def _figures(counts: Counts) -> list[int]:
    return [counts.enforced, counts.refused, counts.right, len(counts.over), len(counts.under)]


def render(page: str, results: dict[str, Counts], xgrammar: dict[str, Counts], version: str) -> str:
    """The page with a new table."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table(results, xgrammar, version) + END + rest.split(END)[1]


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


def main() -> None:
    """Bring the page up to date, and what is recorded of XGrammar when it is installed."""
    results, version = xgrammar_results()
    if is_installed():
        record(results, version)
    else:
        print(f"XGrammar is not installed: its columns stay as recorded with {version}.")
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), run_suite(), results, version), encoding="utf-8")


if __name__ == "__main__":
    main()
