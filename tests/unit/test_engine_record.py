"""What an engine recorded against what lies beside it when it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from build_engines.files import sha256_file
from python_backend import __version__
from python_backend.errors import BuildError
from tests.unit import fake_triton

fake_triton.install()

from python_backend.triton.engine_record import check_record  # noqa: E402


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("engine", "checkpoint"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint" / "tokenizer.json").write_text("{}")
    (tmp_path / "checkpoint" / ".build.json").write_text('{"key": "made-once"}')
    hashes = {"checkpoint": "made-once", "tokenizer": sha256_file(tmp_path / "checkpoint" / "tokenizer.json")}
    write(tmp_path, version=__version__, checkpoint_dir="../checkpoint", hashes=hashes)
    return tmp_path


def write(place: Path, **values: Any) -> None:
    (place / "engine" / "config.json").write_text(json.dumps(values))


def check(place: Path) -> None:
    check_record(place / "engine", place / "checkpoint")


def test_what_is_as_it_was_passes(place: Path) -> None:
    check(place)


def test_what_was_not_recorded_is_not_compared(place: Path) -> None:
    write(place, version=__version__, checkpoint_dir="../checkpoint")
    check(place)


def test_another_version_is_refused(place: Path) -> None:
    write(place, version="0.0.9", checkpoint_dir="../checkpoint")
    with pytest.raises(BuildError, match=rf"config.json was written by version 0.0.9, this is {__version__}"):
        check(place)


def test_another_tokenizer_is_refused(place: Path) -> None:
    (place / "checkpoint" / "tokenizer.json").write_text("[]")
    with pytest.raises(BuildError, match=r"tokenizer.json is not the tokenizer that the engine was built with \(then"):
        check(place)


def test_another_checkpoint_is_refused(place: Path) -> None:
    (place / "checkpoint" / ".build.json").write_text('{"key": "made-again"}')
    with pytest.raises(BuildError, match=r"checkpoint is not the checkpoint .*now made-again\)\. Build"):
        check(place)
