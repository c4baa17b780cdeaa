"""What README.md and the page of log-probs tell a new user to type, typed, block by block, against the real server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from build_engines.spec import load_spec
from tests.server.launched import ServerAddresses

ROOT = Path(__file__).parents[2]
PAGES = [(ROOT / page).read_text() for page in ("README.md", "docs/logprobs.md")]
BLOCKS, BLOCKS_OF_LOGPROBS = (re.findall(r"```(sh|python|yaml)\n(.*?)```", page, flags=re.DOTALL) for page in PAGES)
RUNNABLE = [
    (kind, code) for kind, code in BLOCKS + BLOCKS_OF_LOGPROBS if kind != "yaml" and not code.startswith("make serve")
]


def test_the_first_command_is_make_serve():
    assert BLOCKS[0] == ("sh", "make serve\n")


@pytest.mark.parametrize(("kind", "code"), RUNNABLE, ids=[code.split("\n")[0][:40] for _, code in RUNNABLE])
def test_a_block_of_the_readme_runs_as_it_stands(kind: str, code: str, server: ServerAddresses):
    code = _with_ports(code, server)
    command = ["bash", "-euo", "pipefail", "-c", code] if kind == "sh" else [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"[A-Za-z]{2,}", done.stdout), "an answer has words"
    assert "error" not in done.stdout.lower()


def test_the_capital_of_france_is_paris(server: ServerAddresses):
    code = next(code for _, code in RUNNABLE if "capital of France?" in code)
    command = ["bash", "-c", _with_ports(code, server)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert "Paris" in done.stdout


def test_the_spec_of_the_readme_is_valid_but_for_its_path(tmp_path: Path):
    text = next(code for kind, code in BLOCKS if kind == "yaml")
    source = ROOT / "tests" / "data" / "families" / "qwen2"
    spec = tmp_path / "my-model.yaml"
    spec.write_text(text.replace("/models/Qwen2.5-0.5B-Instruct", str(source)).replace("4096", "512"))
    assert load_spec(spec).deployment.name == yaml.safe_load(text)["name"]


def _with_ports(code: str, server: ServerAddresses) -> str:
    code = code.replace("localhost:8000", server.http).replace("127.0.0.1:8001", server.grpc)
    return code.replace("-m clients", f"-m clients --url {server.grpc}")
