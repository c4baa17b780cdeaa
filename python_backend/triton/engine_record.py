"""Compares what lies in a deployment with what its engine recorded when it was built; skew is one clear sentence.

Knows nothing of what the files hold.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from python_backend import __version__
from python_backend.errors import BuildError

if TYPE_CHECKING:
    from pathlib import Path

_AGAIN = "Build the engine again: make build-engines."


def check_record(engine_dir: Path, tokenizer_dir: Path) -> None:
    """Refuse an engine that another version wrote, or whose checkpoint or tokenizer was replaced since.

    What the engine did not record is not compared.

    Raises:
        BuildError: the first thing that differs, what it was and is.
    """
    path = engine_dir / "config.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if found["version"] != __version__:
        raise BuildError(f"{path} was written by version {found['version']}, this is {__version__}. {_AGAIN}")
    hashes = found.get("hashes", {})
    stamp = (engine_dir / found["checkpoint_dir"]).resolve() / ".build.json"
    if stamp.is_file():
        key = json.loads(stamp.read_text(encoding="utf-8")).get("key")
        _compare(stamp.parent, "checkpoint", hashes.get("checkpoint"), key)
    tokenizer = tokenizer_dir / "tokenizer.json"
    if "tokenizer" in hashes and tokenizer.is_file():
        digest = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
        _compare(tokenizer, "tokenizer", hashes["tokenizer"], digest)


def _compare(place: Path, what: str, recorded: str | None, now: str) -> None:
    if recorded is not None and recorded != now:
        raise BuildError(
            f"{place} is not the {what} that the engine was built with (then {recorded[:12]}, now {now[:12]}). {_AGAIN}"
        )
