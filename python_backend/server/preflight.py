"""Checks, before anything is started, that this machine can run the server. A fault is one sentence."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from pathlib import Path

from python_backend.errors import BuildError, EnvironmentFault

MIN_SHM_BYTES = 48 * 2**20  # a region of a few MiB per model instance; Docker's default /dev/shm has 64 MiB
MIN_DISK_BYTES = 100 * 2**20  # the log
_PYTHONS = ((3, 10), (3, 13))
_PYTHON_BACKEND = re.compile(r'^\s*backend\s*:\s*"python"', re.MULTILINE)


def check_machine(cpuinfo: Path = Path("/proc/cpuinfo"), machine: str = platform.machine()) -> None:
    """Raises EnvironmentFault unless CPU, Python and numpy can run Triton's Python backend and the engine."""
    if machine != "x86_64" or not sys.platform.startswith("linux"):
        raise EnvironmentFault(f"This is {sys.platform} on {machine}; the server needs Linux on x86_64.")
    if "avx2" not in cpu_flags(cpuinfo):
        raise EnvironmentFault("This CPU has no AVX2, which the engine needs: use a machine from 2013 or later.")
    if not _PYTHONS[0] <= sys.version_info[:2] <= _PYTHONS[1]:
        raise EnvironmentFault(
            f"This is Python {platform.python_version()}; the server needs 3.10 to 3.13: make setup PYTHON=python3.12."
        )
    version = numpy_version()
    if not version.startswith("1."):
        raise EnvironmentFault(
            f"numpy {version or 'is missing'} in {sys.prefix}; Triton's Python stub needs numpy 1.26: run make setup."
        )


def check_shared_memory(folder: Path = Path("/dev/shm"), needed_bytes: int = MIN_SHM_BYTES) -> None:
    """Raises EnvironmentFault unless folder can take the shared memory of the models."""
    if not os.access(folder, os.W_OK):
        raise EnvironmentFault(f"{folder} cannot be written; Triton passes tensors through it: mount a tmpfs there.")
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise EnvironmentFault(
            f"{folder} has {free >> 20} MiB free, {needed_bytes >> 20} MiB are needed:"
            " enlarge it (docker run --shm-size=256m) or remove files from it."
        )


def check_disk(folder: Path, needed_bytes: int = MIN_DISK_BYTES) -> None:
    """Raises EnvironmentFault unless folder's disk has room for the log."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise EnvironmentFault(f"{folder} has {free >> 20} MiB free, {needed_bytes >> 20} MiB are needed: free some.")


def check_repository(folder: Path, model: str) -> None:
    """Raises BuildError unless folder is a model repository with the model that must answer."""
    if not folder.is_dir():
        raise BuildError(f"{folder} is not a directory: build it with make build-engines.")
    if not (folder / model / "config.pbtxt").is_file():
        found = ", ".join(sorted(path.parent.name for path in folder.glob("*/config.pbtxt"))) or "no model"
        raise BuildError(f"{folder} has no model named {model} (found: {found}): build it with make build-engines.")
    for config in sorted(folder.glob("*/config.pbtxt")):
        _check_model_files(config)


def _check_model_files(config: Path) -> None:
    """Triton waits for ever for the stub of a Python model whose model.py is missing."""
    if not _PYTHON_BACKEND.search(config.read_text(encoding="utf-8", errors="replace")):
        return
    versions = [path for path in config.parent.iterdir() if path.is_dir() and path.name.isdigit()]
    if not versions:
        raise BuildError(f"{config.parent} has no version directory (1/): build it with make build-engines.")
    for version in versions:
        if not (version / "model.py").is_file():
            raise BuildError(f"{version / 'model.py'} is missing: build it with make build-engines.")


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Instruction-set flags of the first processor; empty when there are none to read."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def numpy_version() -> str:
    """Version of the numpy that the models will import, without importing it; empty when there is none."""
    from importlib import metadata

    try:
        return metadata.version("numpy")
    except metadata.PackageNotFoundError:
        return ""
