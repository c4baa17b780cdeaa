"""What this machine offers for .venv: platform, disk, a usable Python, system packages.

Standard library only, any Python 3.7 or newer. Knows nothing of pip or of the project's packages.
"""

from __future__ import annotations

import itertools
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Iterator, NamedTuple

SUPPORTED = ("3.10", "3.11", "3.12", "3.13")
WITH_WHEELS = ("3.12", "3.11", "3.10")  # 3.13 has to build numpy from source: taken only when there is no other

PROBE = """
import ctypes, json, os, sys, sysconfig
def has(name):
    try: __import__(name)
    except ImportError: return False
    return True
series = "%d.%d" % sys.version_info[:2]
library = "libpython%s.so.1.0" % series
def loads():
    folders = [sysconfig.get_config_var("LIBDIR") or "", os.path.join(sys.base_prefix, "lib")]
    for name in [os.path.join(folder, library) for folder in folders] + [library]:
        try: ctypes.CDLL(name)
        except OSError: continue
        return True
    return False
print(json.dumps({
    "path": sys.executable, "series": series, "version": "%d.%d.%d" % sys.version_info[:3],
    "has_venv": has("ensurepip") and has("venv"), "has_library": has("ctypes") and loads(),
    "has_headers": os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")),
}))
"""


class Fault(Exception):
    """The machine lacks something; the message is one sentence that says what to do."""


class Python(NamedTuple):
    """An interpreter and what it can do."""

    path: str
    series: str  # 3.11
    version: str  # 3.11.7
    has_venv: bool
    has_library: bool  # libpythonX.Y.so, which Triton's stub links against
    has_headers: bool


def check_platform(folder: Path, needed_bytes: int) -> None:
    """Raises Fault unless this is x86-64 Linux with the disk space in bytes under folder."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise Fault(
            f"this machine is {platform.system()} {platform.machine()}; Triton's wheel runs on Linux x86_64 only:"
            " use such a machine or a container."
        )
    free = shutil.disk_usage(str(folder)).free
    if free < needed_bytes:
        raise Fault(
            f"{free / 1e9:.1f} GB are free under {folder}, {needed_bytes / 1e9:.1f} GB are needed: free some space."
        )


def describe(command: str) -> Python:
    """Asks an interpreter what it can do; Fault when it does not run."""
    import json

    try:
        done = subprocess.run(
            [command, "-I", "-c", PROBE], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        raise Fault(f"{command} is not a Python that runs: choose another with PYTHON=python3.12.") from None
    if done.returncode != 0:
        raise Fault(f"{command} is not a Python that runs: choose another with PYTHON=python3.12.")
    return Python(**json.loads(done.stdout.decode()))


def choose_python(wanted: str | None, venv: Path) -> Python:
    """The interpreter for .venv: the one asked for, else that of .venv, else the first that lacks nothing.

    Looked at are the running one and those on PATH; one that lacks a system package comes after those that do not, and
    Python 3.13 after all others.
    """
    if wanted:
        python = describe(wanted)
        if python.series not in SUPPORTED:
            raise Fault(f"{wanted} is Python {python.version}; supported are 3.10 to 3.13: choose PYTHON=python3.12.")
        return python
    if (venv / "installed.json").exists() and (venv / "bin" / "python").exists():
        return describe(str(Path(os.path.realpath(str(venv / "bin" / "python")))))
    running = describe(sys.executable)
    candidates = []
    for python in itertools.chain([running], _on_path()):
        if python.series in WITH_WHEELS:
            if not missing_packages(python):
                return python
            candidates.append(python)
    if candidates:
        return candidates[0]
    if running.series in SUPPORTED:
        return running
    raise Fault(
        f"python3 is Python {running.version}; supported are 3.10 to 3.13: install one, then PYTHON=python3.12."
    )


def _on_path() -> Iterator[Python]:
    for series in WITH_WHEELS:
        found = shutil.which(f"python{series}")
        if found:
            try:
                yield describe(found)
            except Fault:
                continue  # for example a version manager's shim without a version behind it


def missing_packages(python: Python) -> list[str]:
    """Debian packages that this interpreter still needs."""
    packages = []
    if not python.has_venv:
        packages.append(f"python{python.series}-venv")
    if python.series == "3.13":
        if not python.has_headers:
            packages.append("python3.13-dev")
        if not (shutil.which("cc") and shutil.which("c++")):
            packages.append("build-essential")
    elif not python.has_library:  # Triton's stub for 3.13 brings its own
        packages.append(f"libpython{python.series}")
    return packages


def install_system_packages(python: Python) -> None:
    """Installs what is missing with apt-get when the user may; else Fault with the exact command."""
    packages = missing_packages(python)
    if not packages:
        return
    command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    by_hand = (
        f"Python {python.version} ({python.path}) needs system packages: sudo {' '.join(command)}"
        " (or choose another Python: make setup PYTHON=python3.12)."
    )
    prefix = _become_root()
    if prefix is None or not shutil.which("apt-get"):
        raise Fault(by_hand)
    sys.stderr.write(f"installing system packages: {' '.join(packages)}\n")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for step in (["apt-get", "update", "-qq"], command):
        done = subprocess.run(
            [*prefix, *step],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    if done.returncode != 0:
        sys.stderr.write("\n".join(done.stdout.decode(errors="replace").splitlines()[-5:]) + "\n")
        raise Fault(f"apt-get failed (see above). {by_hand}")
    if missing_packages(describe(python.path)):
        raise Fault(f"after apt-get, still missing: {' '.join(missing_packages(describe(python.path)))}. {by_hand}")


def _become_root() -> list[str] | None:
    if os.geteuid() == 0:
        return []
    sudo = shutil.which("sudo")
    if sudo and subprocess.run([sudo, "-n", "true"], stderr=subprocess.DEVNULL).returncode == 0:
        return [sudo, "-n"]
    return None


def entries(requirements: str) -> list[str]:
    """The requirements of a pip file, each with its hashes as one text; comments left out."""
    found: list[str] = []
    for line in requirements.splitlines():
        if line[:1].isalnum():
            found.append(line)
        elif line.startswith(" ") and found:
            found[-1] += "\n" + line
    return found
