"""What one server owns outside its process: a private folder with the Python backend, and names in /dev/shm.

Both carry the launcher's process id, so that the next start can remove what a machine crash left, and the id of its
process namespace: containers may share /dev/shm without seeing each other's processes.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from python_backend.errors import EnvironmentFault

_PREFIX = f"triton-llm-{os.stat('/proc/self/ns/pid').st_ino}."
_SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Workspace:
    """Names for one server."""

    folder: Path  # private; holds backends/python/
    shm_prefix: str  # every file in /dev/shm that starts with it is ours
    tritonserver: Path

    @property
    def backends(self) -> Path:
        """The directory for --backend-directory."""
        return self.folder / "backends"

    @classmethod
    def create(cls) -> Workspace:
        """Makes the private folder: links to the wheel's backend and to the stub of this Python's version.

        Raises:
            EnvironmentFault: the wheel is not installed or has no stub for this Python.
        """
        wheel = _wheel()
        series = f"{sys.version_info.major}.{sys.version_info.minor}"
        parts = [
            wheel / "backends" / "python" / "libtriton_python.so",
            wheel / "backends" / "python" / "triton_python_backend_utils.py",
            wheel / "python_backend_stubs" / series / "triton_python_backend_stub",
        ]
        missing = [str(part) for part in parts if not part.exists()]
        if missing:
            raise EnvironmentFault(f"{missing[0]} is missing: run make setup.")
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        python = folder / "backends" / "python"
        python.mkdir(parents=True)
        for part in parts:
            (python / part.name).symlink_to(part)
        return cls(folder, f"{_PREFIX}{os.getpid()}-", wheel / "bin" / "tritonserver")

    def remove(self) -> None:
        """Removes the folder and the files in /dev/shm; the server must have ended."""
        for file in _SHM.glob(f"{self.shm_prefix}*"):
            file.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def triton_folders() -> frozenset[Path]:
    """The folders that Triton's Python backend makes, one at each start, and leaves.

    For packed environments, which our models do not use: those of ours stay empty. The place is fixed in Triton.
    """
    return frozenset(Path("/tmp").glob("python_env_*"))


def own_triton_folder(before: frozenset[Path]) -> Path | None:
    """The empty one that a start has made; None when another server may have started meanwhile: it may be theirs."""
    try:
        found = [path for path in triton_folders() - before if path.stat().st_uid == os.getuid()]
        return found[0] if len(found) == 1 and not any(found[0].iterdir()) else None
    except FileNotFoundError:  # another launcher has removed its own just now
        return None


def sweep() -> None:
    """Removes what servers left whose launcher does not live any more (after a power cut, or kill -9 on everything)."""
    for place in (_SHM, Path(tempfile.gettempdir())):
        for left in place.glob(f"{_PREFIX}*-*"):
            pid = left.name[len(_PREFIX) :].partition("-")[0]
            if pid.isdigit() and not Path("/proc", pid).exists():
                shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


def _wheel() -> Path:
    found = find_spec("pytriton")  # found, not imported: only its files are used
    if found is None or found.origin is None:
        raise EnvironmentFault(
            f"nvidia-pytriton, which has tritonserver, is not installed in {sys.prefix}: make setup."
        )
    return Path(found.origin).parent / "tritonserver"
