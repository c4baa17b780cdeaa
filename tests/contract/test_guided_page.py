"""docs/guided.md says what the JSON-Schema-Test-Suite found, and it never found anything under-constrained."""

from __future__ import annotations

import pytest

from tests.tools.guided_suite import Counts, run_suite, xgrammar_results
from tests.tools.make_guided_page import PAGE, render


@pytest.fixture(scope="module")
def results() -> dict[str, Counts]:
    return run_suite()


@pytest.fixture(scope="module")
def xgrammar() -> tuple[dict[str, Counts], str]:
    """Run now where XGrammar is installed, else as recorded when it was."""
    return xgrammar_results()


def test_no_invalid_instance_can_be_written(results, xgrammar):
    for found in (results, xgrammar[0]):
        assert {name: counts.under for name, counts in found.items() if counts.under} == {}


def test_every_refusal_names_what_it_is_about(results, xgrammar):
    reasons = {reason for counts in [*results.values(), *xgrammar[0].values()] for reason in counts.reasons}
    vague = [r for r in reasons if not any(word in r for word in ("#/", "oneOf", "satisf", ": ", "keyword"))]
    assert vague == []


def test_the_page_is_up_to_date(results, xgrammar):
    page = PAGE.read_text(encoding="utf-8")
    assert page == render(page, results, *xgrammar), "run python -m tests.tools.make_guided_page"
