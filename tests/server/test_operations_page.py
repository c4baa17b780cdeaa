"""What docs/operations.md tells an operator to type, typed against the real server."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import yaml

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")


def run(command, server):
    words = [word.replace("localhost:8000", server.http) for word in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=60)


def test_the_question_about_health_is_answered(server):
    (block,) = re.findall(r"```sh\n(.*?)```", PAGE, flags=re.DOTALL)
    done = run(["bash", "-c", block], server)
    assert done.returncode == 0, done.stderr
    assert '"data":[true]' in done.stdout


def test_the_probe_for_kubernetes_succeeds_here_and_fails_where_nobody_listens(server):
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    command = yaml.safe_load(block)["readinessProbe"]["exec"]["command"]
    assert run(command, server).returncode == 0
    assert subprocess.run([word.replace(":8000", ":1") for word in command], capture_output=True).returncode != 0
