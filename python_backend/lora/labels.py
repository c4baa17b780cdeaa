"""serving.json beside an adapter's files: who owns it and which weights it was trained on. The file is optional."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from python_backend.errors import BuildError

if TYPE_CHECKING:
    from pathlib import Path

LABELS_FILE = "serving.json"
_KEYS = ("owner", "checkpoint_hash")


@dataclass(frozen=True, slots=True)
class Labels:
    """What PEFT's own configuration has no place for; "" where nothing is said."""

    owner: str = ""
    checkpoint_hash: str = ""  # hashes.checkpoint of the engine's config.json

    @classmethod
    def read(cls, directory: Path) -> Labels:
        """The labels of an adapter's directory.

        Raises:
            BuildError: the file is no JSON object of texts, or has another key.
        """
        path = directory / LABELS_FILE
        if not path.is_file():
            return cls()
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BuildError(f"{path}: cannot be read ({error}); write a JSON object.") from error
        if not isinstance(raw, dict) or not all(key in _KEYS and isinstance(text, str) for key, text in raw.items()):
            raise BuildError(f"{path}: {json.dumps(raw)[:100]}; allowed: an object of texts by {', '.join(_KEYS)}.")
        return cls(**raw)
