"""Runs the official JSON-Schema-Test-Suite through the audit and a constraint backend, and counts who is right.

Results of XGrammar are kept in a file, for where it is not installed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from python_backend.errors import RequestError
from python_backend.guided.guide import check_guide
from python_backend.guided.xgrammar_library import is_installed
from python_backend.request import Guide
from tests.unit.guided_helpers import END_ID, backend, tokenizer

SUITE = Path(__file__).resolve().parents[1] / "data" / "json_schema_test_suite" / "draft2020-12.json"
RECORDED = SUITE.parent / "xgrammar.json"
MAX_FORMS = 200  # ways to write one instance that are tried


@dataclass(slots=True)
class Counts:
    """Of one file of the suite: schemas, then instances of the enforced ones."""

    enforced: int = 0
    refused: int = 0
    right: int = 0
    over: list[str] = field(default_factory=list)  # valid instances that cannot be written
    under: list[str] = field(default_factory=list)  # invalid instances that can
    reasons: set[str] = field(default_factory=set)  # of refusals


def run_suite(library: str = "llguidance") -> dict[str, Counts]:
    """Counts by file, required ones first."""
    suite = json.loads(SUITE.read_text(encoding="utf-8"))
    return {name: _run_file(suite[name], library) for name in sorted(suite, key=lambda name: ("/" in name, name))}


def xgrammar_results() -> tuple[dict[str, Counts], str]:
    """Counts by file and the release: run now where XGrammar is installed, else as they were recorded."""
    if is_installed():
        return run_suite("xgrammar"), backend("xgrammar").version
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    files = {name: Counts(**{**file, "reasons": set(file["reasons"])}) for name, file in recorded["files"].items()}
    return files, recorded["version"]


def record(results: dict[str, Counts], version: str) -> None:
    """Keep results of XGrammar."""
    files = {name: {**asdict(counts), "reasons": sorted(counts.reasons)} for name, counts in results.items()}
    text = json.dumps({"version": version, "files": files}, ensure_ascii=False, indent=1)
    RECORDED.write_text(text + "\n", encoding="utf-8")


def _run_file(groups: list[dict[str, Any]], library: str) -> Counts:
    counts = Counts()
    for group in groups:
        try:
            guide = check_guide(Guide("json_schema", json.dumps(group["schema"])))
            compiled = backend(library).compile(backend(library).grammar(guide))
        except RequestError as error:
            counts.refused += 1
            counts.reasons.add(str(error))
            continue
        counts.enforced += 1
        for test in group["tests"]:
            possible = any(accepts(compiled, text) for text in itertools.islice(forms(test["data"]), MAX_FORMS))
            what = f"{group['description']}: {test['description']}"
            if possible == test["valid"]:
                counts.right += 1
            else:
                (counts.under if possible else counts.over).append(what)
    return counts


def accepts(compiled: Any, text: str) -> bool:
    matcher = compiled.start((END_ID,))
    try:
        for token_id in tokenizer().encode(text, add_special_tokens=False):
            matcher.accept(token_id)
    except RequestError:
        return False
    return bool(matcher.is_accepting)


def forms(value: Any, separators: tuple[str, str] = (", ", ": ")) -> Iterator[str]:
    """The instance as JSON text, its properties in every order."""
    between, colon = separators
    if isinstance(value, dict):
        items = list(value.items())
        for order in itertools.permutations(items) if len(items) <= 4 else [items]:
            for texts in itertools.product(*(list(forms(item, separators)) for _, item in order)):
                pairs = zip(order, texts, strict=True)
                members = [f"{json.dumps(k, ensure_ascii=False)}{colon}{text}" for (k, _), text in pairs]
                yield "{" + between.join(members) + "}"
    elif isinstance(value, list):
        for texts in itertools.product(*(list(forms(item, separators)) for item in value)):
            yield "[" + between.join(texts) + "]"
    else:
        yield json.dumps(value, ensure_ascii=False)
