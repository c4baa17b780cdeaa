"""What docs/gpu.md says against what the code does: its spec, the shipped ones, cards and flags."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from build_engines.spec import load_spec
from build_engines.spec_gpu import CardName, QuantAlgo
from build_engines.spec_rules import CARDS_OF_QUANT_ALGO

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "gpu.md").read_text()
SPECS = ROOT / "build_engines" / "specs"


def rows_of(header: str) -> list[list[str]]:
    """Cells of the table under a header line."""
    lines = PAGE[PAGE.index(header) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_spec_of_the_page_is_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    path = tmp_path / "my.yaml"
    path.write_text(text.replace("../shapes", str(ROOT / "build_engines" / "shapes")))
    spec = load_spec(path)
    assert spec.deployment.hardware.card == "h100-sxm"
    assert f"engines/{spec.name}/" in PAGE


def test_the_section_of_adapters_is_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    (section,) = re.findall(r"^    (lora:\n(?:      .*\n)+)", PAGE, flags=re.MULTILINE)
    path = tmp_path / "my.yaml"
    path.write_text(text.replace("../shapes", str(ROOT / "build_engines" / "shapes")) + section.replace("\n    ", "\n"))
    lora = load_spec(path).deployment.lora
    assert lora is not None
    assert f"{lora.named['support'].path}" == "../adapters/support"
    assert str(lora.directory) == "more"


def test_every_spec_for_gpus_is_on_the_page_and_there() -> None:
    named = " ".join(names for names, _ in rows_of("| spec | shows |"))
    found = set(re.findall(r"`([a-z0-9][^`]*)`", named.replace("`, `-tp4`", "`, `llama-3.3-70b-h100-tp4`")))
    shipped = {path.stem for path in SPECS.glob("*.yaml") if load_spec(path).deployment.target != "cpu"}
    assert found == shipped


def test_the_cards_of_each_quantisation_are_those_that_the_check_allows() -> None:
    rows = {
        name: cards
        for names, _, cards in rows_of("| quant_algo | weights, activations |")
        for name in names.split(", ")
    }
    assert set(rows) == set(get_args(QuantAlgo))
    gpus = tuple(card for card in get_args(CardName) if card != "cpu")
    for name, cards in rows.items():
        stated = gpus if cards == "all" else tuple(cards.split(", "))
        assert stated == CARDS_OF_QUANT_ALGO.get(name, gpus), name
