"""docs/loadtest.md says what there is: its SLO file is one, its workloads, variables and options exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loadtests import options, slo
from loadtests.metrics import RECORD_METRICS
from loadtests.workloads import WORKLOADS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "loadtest.md").read_text()


def test_the_slo_file_of_the_page_is_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    path = tmp_path / "own.yaml"
    path.write_text(text)
    found = slo.load(str(path))
    assert (found.name, found.users, found.good_fraction) == ("assistants", 8, 0.95)
    listed = re.search(r"# seconds: (.*?), by", text)
    assert listed is not None
    assert set(listed[1].split(", ")) == {m.tag for m in RECORD_METRICS if m.unit == "s"} - {"lag"} | {"icl"}


def test_every_workload_is_explained() -> None:
    assert re.findall(r"^\| `(\w+)` \|", PAGE, flags=re.MULTILINE) == list(WORKLOADS)


def test_every_variable_of_make_is_passed_on() -> None:
    named = {
        name for line in re.findall(r"make loadtest (.*?)(?:#|`|\n)", PAGE) for name in re.findall(r"([A-Z]+)=", line)
    }
    assert named >= {"SLO", "HOST", "FIND", "COMPARE", "UI"}
    makefile = (ROOT / "Makefile").read_text()
    recipe = makefile[makefile.index("LOADTEST_OPTIONS") : makefile.index("BOOTSTRAP :=")] + "SLO HOST"
    assert all(re.search(rf"\b{name}\b", recipe) for name in named)


def test_every_option_exists(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options.parse(["--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) <= known


def test_its_images_are_there() -> None:
    images = re.findall(r"\]\((images/[^)]+)\)", PAGE)
    assert images
    assert all((ROOT / "docs" / image).exists() for image in images)
