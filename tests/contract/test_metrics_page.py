"""docs/metrics.md names every family, label and label value that the server exports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from python_backend.telemetry.catalogue import FAMILIES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
SPECS = [family.spec for family in FAMILIES.values()]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_family_has_its_line_with_its_label_and_values(spec):
    (line,) = re.findall(rf"^\| `{spec.name}` \|.*$", PAGE, re.MULTILINE)
    for word in (spec.label, *spec.values):
        assert not word or f"`{word}`" in line


def test_the_page_names_no_family_that_does_not_exist():
    named = set(re.findall(r"^\| `((?:nv_|llm_)\w+)` \|", PAGE, re.MULTILINE))
    assert named == {spec.name for spec in SPECS}
