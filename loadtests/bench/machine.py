"""What was measured on: processor, versions, load, and the size of the environment."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

_PACKAGES = ("openvino", "openvino-genai", "nvidia-pytriton", "tritonclient", "numpy")
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8")


def describe(root: Path) -> dict[str, Any]:
    """The machine and the software as plain values."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    have = set(flags[1].split()) if flags else set()
    return {
        "cpu": model[1] if model else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "instructions": [flag for flag in _FLAGS if flag in have],
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "commit": _commit(root),
        "load_average": os.getloadavg()[0],
    }


def environment_bytes(root: Path) -> dict[str, int]:
    """Size of .venv, as it is and without the packages that serving does not need."""
    total = sum(path.lstat().st_size for path in (root / ".venv").rglob("*"))
    locks = {name: _locked(root / "requirements" / f"{name}.txt") for name in ("serve", "bench", "dev", "loadtest")}
    extra = set().union(*locks.values()) - locks["serve"]
    return {"total": total, "serve": total - sum(_size(name) for name in extra)}


def _locked(lock: Path) -> set[str]:
    return set(re.findall(r"^([A-Za-z0-9._-]+)==", lock.read_text(), re.MULTILINE))


def _size(name: str) -> int:
    try:
        files = distribution(name).files or ()
    except PackageNotFoundError:
        return 0
    paths = (Path(str(file.locate())) for file in files)
    return sum(path.stat().st_size for path in paths if path.exists())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit(root: Path) -> str | None:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True)
    return done.stdout.strip() or None
