"""Build steps: each makes one directory, whole or not at all, and is skipped while nothing it depends on changed.

Knows nothing of models.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build_engines.files import digest_of, replace_directory, write_json
from python_backend import __version__
from python_backend.errors import BuildError

STAMP = ".build.json"


@dataclass(frozen=True, slots=True)
class Step:
    """One directory of a build."""

    name: str  # the directory's name
    inputs: dict[str, Any]  # plain data; a change of any of it means that the step must run again
    make: Callable[[Path], None]  # fills an empty directory

    @property
    def key(self) -> str:
        """Digest of everything the directory's content depends on."""
        return digest_of({"version": __version__, "step": self.name, "inputs": self.inputs})


class Workspace:
    """The directory of one deployment, engines/<name>/."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def is_current(self, step: Step) -> bool:
        """Whether the step's directory is there, whole, and made from the same inputs."""
        place = self.root / step.name
        try:
            stamp = json.loads((place / STAMP).read_text())
            sizes = {name: (place / name).stat().st_size for name in stamp["files"]}
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return bool(stamp["key"] == step.key and stamp["files"] == sizes)

    def run(self, step: Step) -> None:
        """Make the step's directory anew; what was there before stays until the new one is whole."""
        part = self.root / f".part-{step.name}"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            step.make(part)
            write_json(part / STAMP, {"key": step.key, "files": _sizes(part)})
            replace_directory(part, self.root / step.name)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep two builds of one deployment apart.

        Raises:
            BuildError: another build holds the directory.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise BuildError(f"{self.root}: another build is running there; wait for it to end.") from error
        try:
            yield
        finally:
            os.close(handle)


def _sizes(directory: Path) -> dict[str, int]:
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}
