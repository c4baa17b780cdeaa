"""Each make target calls one command-line program with what the user set; seen with `make -n`, which runs nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("setup", "serve", "demo", "test", "check", "build-engines", "plan", "loadtest", "bench", "clean", "help")


def make(*arguments: str) -> str:
    environment = {"PATH": os.environ["PATH"]}  # nothing of the make that may run these tests
    command = ["make", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment).stdout


def test_help_lists_every_command() -> None:
    listed = {line.split()[1] for line in make("help").splitlines()}
    assert set(COMMANDS) <= listed


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["serve", "SPEC=a.yaml", "HTTP_PORT=1"], "python_backend.server --spec a.yaml --exit-with-parent"),
        (["serve", "HTTP_PORT=1", "GRPC_PORT=2", "METRICS_PORT=3"], "--http-port 1 --grpc-port 2 --metrics-port 3"),
        (["serve"], "--spec build_engines/specs/smollm2-135m.yaml"),
        (["serve"], "--http-port 8000 --grpc-port 8001 --metrics-port 8002"),
        (["build-engines", "SPEC=a.yaml", "TARGET=cpu", "DRY_RUN=1"], "build --spec a.yaml --target cpu --dry-run"),
        (["plan", "SPEC=a.yaml", "FORMAT=json"], "build_engines plan --spec a.yaml --format json"),
        (["loadtest", "SLO=chat", "HOST=h:1"], "loadtests --slo chat --host h:1"),
        (["loadtest", "FIND=max", "USERS=8", "WORKLOAD=rag"], "--slo chat --workload rag --users 8 --find max"),
        (["loadtest", "SPEC=a.yaml", "QUICK=1", "UI=1"], "--spec a.yaml --quick --ui"),
        (["bench", "QUICK=1"], "loadtests.bench --quick"),
        (["setup", "PYTHON=python3.12"], "python3.12 scripts/bootstrap.py serve"),
        (["test", "TESTS=tests/unit"], "pytest -q tests/unit"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_target_passes_on_what_the_user_sets(arguments: list[str], expected: str) -> None:
    commands = " ".join(make("-n", *arguments).replace("\\\n", " ").split())
    assert expected in commands


@pytest.mark.parametrize("target", ["serve", "demo", "build-engines", "plan", "test", "check", "loadtest", "bench"])
def test_every_target_sets_itself_up(target: str) -> None:
    assert "scripts/bootstrap.py" in make("-n", target).splitlines()[0]
