"""Which Python and which system packages `make setup` takes, decided from what an interpreter says of itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import machine

ROOT = Path(__file__).resolve().parents[2]


def python(series: str, **lacks: bool) -> machine.Python:
    has = {"has_venv": True, "has_library": True, "has_headers": True, **lacks}
    return machine.Python(f"/usr/bin/python{series}", series, f"{series}.0", **has)


@pytest.fixture
def machine_with(monkeypatch: pytest.MonkeyPatch):
    def arrange(running: machine.Python, *on_path: machine.Python) -> None:
        monkeypatch.setattr(machine, "describe", lambda command: running)
        monkeypatch.setattr(machine, "_on_path", lambda: iter(on_path))

    return arrange


def test_the_running_python_is_taken_when_it_has_wheels(machine_with, tmp_path: Path) -> None:
    machine_with(python("3.11"), python("3.12"))
    assert machine.choose_python(None, tmp_path).series == "3.11"


@pytest.mark.parametrize("running", ["3.13", "3.14", "3.9"])
def test_another_python_on_the_path_is_preferred_to_one_without_wheels(
    machine_with, tmp_path: Path, running: str
) -> None:
    machine_with(python(running), python("3.12", has_venv=False), python("3.11"))
    assert machine.choose_python(None, tmp_path).series == "3.11"


def test_a_python_that_lacks_nothing_is_preferred_to_the_running_one(machine_with, tmp_path: Path) -> None:
    machine_with(python("3.11", has_library=False), python("3.12", has_venv=False), python("3.10"))
    assert machine.choose_python(None, tmp_path).series == "3.10"


def test_the_running_python_is_taken_when_every_one_lacks_something(machine_with, tmp_path: Path) -> None:
    machine_with(python("3.11", has_library=False), python("3.12", has_venv=False))
    assert machine.choose_python(None, tmp_path).series == "3.11"


def test_python_3_13_is_taken_when_there_is_no_other(machine_with, tmp_path: Path) -> None:
    machine_with(python("3.13"))
    assert machine.choose_python(None, tmp_path).series == "3.13"


@pytest.mark.parametrize("wanted", [None, "python3.14"])
def test_an_unsupported_python_is_one_sentence(machine_with, tmp_path: Path, wanted: str | None) -> None:
    machine_with(python("3.14"))
    with pytest.raises(machine.Fault, match=r"Python 3\.14\.0; supported are 3\.10 to 3\.13"):
        machine.choose_python(wanted, tmp_path)


def test_this_python_describes_itself() -> None:
    found = machine.describe(sys.executable)
    assert found.version == "{}.{}.{}".format(*sys.version_info[:3])
    assert found.has_venv
    assert found.has_library


def test_a_command_that_is_no_python_is_one_sentence() -> None:
    with pytest.raises(machine.Fault, match="is not a Python that runs"):
        machine.describe("/bin/false")


def test_missing_parts_of_python_are_named_as_debian_packages() -> None:
    lacking = python("3.11", has_venv=False, has_library=False)
    assert machine.missing_packages(lacking) == ["python3.11-venv", "libpython3.11"]
    assert machine.missing_packages(python("3.13", has_library=False, has_headers=False))[0] == "python3.13-dev"


def test_without_the_right_to_install_the_exact_command_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_become_root", lambda: None)
    with pytest.raises(machine.Fault, match=r"sudo apt-get install -y --no-install-recommends libpython3\.12 "):
        machine.install_system_packages(python("3.12", has_library=False))


def test_a_machine_that_lacks_nothing_needs_no_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_become_root", lambda: pytest.fail("asked for root"))
    machine.install_system_packages(python("3.12"))


def test_a_full_disk_is_refused_with_both_figures(tmp_path: Path) -> None:
    with pytest.raises(machine.Fault, match=r"GB are free under .* are needed"):
        machine.check_platform(tmp_path, 2**60)


@pytest.mark.parametrize("name", ["serve", "loadtest", "dev", "bench", "numpy-build"])
def test_every_locked_package_has_a_hash(name: str) -> None:
    entries = machine.entries((ROOT / "requirements" / f"{name}.txt").read_text())
    assert entries
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []


@pytest.mark.parametrize("name", ["loadtest", "dev", "bench"])
def test_the_other_locks_hold_what_serve_holds(name: str) -> None:
    def pins(lock: str) -> set[str]:
        return {entry.split()[0] for entry in machine.entries((ROOT / "requirements" / f"{lock}.txt").read_text())}

    assert pins("serve") <= pins(name)


def test_an_unknown_lock_is_a_usage_error() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bootstrap.py"), "srve"], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 2
    assert "srve" in done.stderr


@pytest.mark.parametrize("works", [True, False])
def test_root_installs_what_is_missing_or_is_told_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, works: bool
) -> None:
    apt = tmp_path / "apt-get"
    apt.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexit {0 if works else 100}\n')
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(machine, "_become_root", list)
    monkeypatch.setattr(machine, "describe", lambda command: python("3.12"))
    if works:
        machine.install_system_packages(python("3.12", has_library=False))
    else:
        with pytest.raises(machine.Fault, match=r"apt-get failed .* sudo apt-get install -y"):
            machine.install_system_packages(python("3.12", has_library=False))
    update, install = (tmp_path / "calls").read_text().splitlines()
    assert update.startswith("update")
    assert install == "install -y --no-install-recommends libpython3.12"
