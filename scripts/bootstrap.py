"""Brings .venv to the state of a lock file: `python3 scripts/bootstrap.py serve|loadtest|dev|bench|xgrammar …`.

Runs before anything is installed: standard library only, any Python 3.7 or newer. Knows nothing of the packages it
installs, except that numpy has no wheel for Python 3.13 and is then built from source.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Iterator

import machine
from machine import Fault

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
LOCKS = {
    "serve": (),
    "loadtest": ("serve",),
    "dev": ("serve", "loadtest", "xgrammar", "tracing"),
    "bench": ("serve",),
    "xgrammar": ("serve",),
    "tracing": ("serve",),
}  # and what each contains
NEEDED_BYTES = 2_500_000_000  # .venv, pip's downloads and the demo engine
NUMPY_OPTIONS = (  # no BLAS: the server's matrix products run in OpenVINO; AVX2 is required anyway
    "-Dblas=none",
    "-Dlapack=none",
    "-Dallow-noblas=true",
    "-Dcpu-baseline=AVX2 FMA3",
    "-Dcpu-dispatch=none",
)


def main(arguments: list[str]) -> int:
    """Installs the named locks; 0 when .venv has them, 2 for a wrong call, 3 when the machine lacks something."""
    unknown = [name for name in arguments if name not in LOCKS]
    if unknown or not arguments:
        say(
            f"usage: bootstrap.py LOCK…, with LOCK one of {', '.join(LOCKS)}"
            + (f"; not {unknown[0]}" if unknown else "")
        )
        return 2
    try:
        for name in arguments:
            ensure(name)
    except Fault as fault:
        say(f"error: {fault}")
        return 3
    except KeyboardInterrupt:
        say("interrupted; the same command goes on where it stopped")
        return 130
    return 0


def ensure(name: str) -> None:
    """Makes .venv hold requirements/<name>.txt; returns at once when it does."""
    wanted = os.environ.get("PYTHON")
    if is_current(name, wanted):
        return
    with one_at_a_time():
        if not is_current(name, wanted):  # another make may have done it meanwhile
            bring_up_to_date(name, wanted)


def is_current(name: str, wanted: str | None) -> bool:
    """True when .venv holds the lock, for the Python that is wanted if one is."""
    done = read_stamp()
    return done.get(name) == digest(name) and (not wanted or done.get("python") == machine.describe(wanted).version)


def bring_up_to_date(name: str, wanted: str | None) -> None:
    """Checks the machine, makes .venv if there is none for this Python, and installs the lock into it."""
    machine.check_platform(ROOT, NEEDED_BYTES if not VENV.exists() else 0)
    python = machine.choose_python(wanted, VENV)
    machine.install_system_packages(python)
    done = read_stamp()
    if done.get("python") != python.version:
        create_venv(python)
        done = {"python": python.version}
        write_stamp(done)
    install(ROOT / "requirements" / f"{name}.txt", python)
    write_stamp({**done, **{held: digest(held) for held in (name, *LOCKS[name])}})


def digest(name: str) -> str:
    """Stands for what a lock puts into .venv, at this place on disk."""
    lock = ROOT / "requirements" / f"{name}.txt"
    return hashlib.sha256(lock.read_bytes() + str(ROOT).encode()).hexdigest()


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Two make commands at once: the second waits for the first."""
    folder = os.open(str(ROOT / "requirements"), os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def read_stamp() -> dict[str, str]:
    """What .venv holds: the Python version and a digest per installed lock; empty when there is no usable .venv."""
    try:
        stamp: dict[str, str] = json.loads((VENV / "installed.json").read_text())
    except (OSError, ValueError):
        return {}
    return stamp if VENV_PYTHON.exists() else {}


def write_stamp(stamp: dict[str, str]) -> None:
    """Records what is installed, in one step, after it is."""
    half = VENV / "installed.json.part"
    half.write_text(json.dumps(stamp))
    half.replace(VENV / "installed.json")


def create_venv(python: machine.Python) -> None:
    """A fresh .venv with the repository's root on its path (Triton's stub ignores PYTHONPATH, but reads .pth files)."""
    say(f"creating .venv with Python {python.version} ({python.path})")
    shutil.rmtree(VENV, ignore_errors=True)
    run([python.path, "-m", "venv", str(VENV)], "python -m venv failed")
    site = VENV / "lib" / f"python{python.series}" / "site-packages"
    (site / "triton_llm_stack.pth").write_text(f"{ROOT}\n")


def install(lock: Path, python: machine.Python) -> None:
    """pip installs exactly the lock, hashes checked, nothing resolved."""
    started = time.monotonic()
    requirements = lock.read_text()
    total = sum(1 for line in requirements.splitlines() if line[:1].isalnum())
    say(f"installing {lock.relative_to(ROOT)} into .venv (about {total} packages)")
    with tempfile.TemporaryDirectory() as folder:
        if python.series == "3.13":
            requirements = build_numpy(requirements, Path(folder))
        plan = Path(folder) / "requirements.txt"
        plan.write_text(requirements)
        options = ["--require-hashes", "--no-deps", "--no-compile", "--only-binary", ":all:", "-r", str(plan)]
        run_pip([str(VENV_PYTHON), "-m", "pip", "install", *options], total)
    say(f"installed in {time.monotonic() - started:.0f} s")


def build_numpy(requirements: str, folder: Path) -> str:
    """Builds and installs the locked numpy from its source archive; returns the requirements without it."""
    entry = [line for line in machine.entries(requirements) if line.startswith("numpy==")]
    rest = "\n".join(line for line in machine.entries(requirements) if line not in entry)
    version = entry[0].split()[0].split("==")[1]
    probe = [str(VENV_PYTHON), "-c", f"import numpy; raise SystemExit(numpy.__version__ != '{version}')"]
    if subprocess.run(probe, stderr=subprocess.DEVNULL).returncode == 0:
        return rest
    say(f"numpy {version} has no wheel for Python 3.13: building it once from source (5 to 15 minutes)")
    tools = folder / "tools"
    run([str(VENV_PYTHON), "-m", "venv", str(tools)], "python -m venv failed")
    pip = [str(tools / "bin" / "python"), "-m", "pip", "--quiet"]
    build_lock = str(ROOT / "requirements" / "numpy-build.txt")
    run([*pip, "install", "--require-hashes", "--no-deps", "-r", build_lock], "pip could not install the build tools")
    first, _, hashes = entry[0].partition("\n")
    settings = [f'--config-settings="setup-args={option}" \\' for option in NUMPY_OPTIONS]
    # pip applies settings of the command line only to requirements of the command line.
    (folder / "numpy.txt").write_text("\n".join([first, *settings, hashes]))
    command = [*pip, "wheel", "--no-build-isolation", "--no-deps", "--require-hashes", "--no-binary", "numpy"]
    environment = {**os.environ, "PATH": f"{tools / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"}
    run([*command, "-r", str(folder / "numpy.txt"), "-w", str(folder)], "numpy did not build", environment)
    wheels = [str(path) for path in folder.glob("numpy-*.whl")]
    run(
        [str(VENV_PYTHON), "-m", "pip", "--quiet", "install", "--no-deps", "--no-index", *wheels],
        "numpy did not install",
    )
    return rest


def run_pip(command: list[str], total: int) -> None:
    """Runs pip install with one moving line on a terminal; its own output is shown only when it fails."""
    lines: list[str] = []
    seen = 0
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_COLOR": "1"}
    pip = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True, env=environment
    )
    assert pip.stdout is not None
    for line in pip.stdout:
        lines.append(line.rstrip())
        if line.startswith("Collecting "):
            seen += 1
            show(f"[{min(seen, total)}/{total}] {line.split()[1]}")
        elif line.startswith("Installing collected"):
            show("unpacking")
    show("")
    if pip.wait() != 0:
        say("\n".join(line for line in lines[-15:] if "is ignored: it is neither" not in line))
        raise Fault("pip could not install the packages (see above); the network may be down: try again.")


def run(command: list[str], problem: str, environment: dict[str, str] | None = None) -> None:
    """Runs a command whose output matters only when it fails; says once a minute that it is still at it."""
    started = time.monotonic()
    job = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True, env=environment
    )
    while True:
        try:
            output, _ = job.communicate(timeout=60)
            break
        except subprocess.TimeoutExpired:
            say(f"  still at it after {(time.monotonic() - started) / 60:.0f} min")
    if job.returncode != 0:
        say("\n".join(output.splitlines()[-15:]))
        raise Fault(f"{problem} (see above).")


def say(text: str) -> None:
    """A line for the user; stdout stays free for the commands that follow."""
    sys.stderr.write(f"{text}\n")


def show(text: str) -> None:
    """Replaces the moving line, on a terminal only."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
