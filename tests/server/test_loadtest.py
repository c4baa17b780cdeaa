"""Load tests of the real server: counts, prefix hits and structures are those that the workloads announce."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clients import HttpClient
from loadtests.texts import Library
from loadtests.token_counts import TokenCounter
from tests.server.launched import ServerAddresses

ROOT = Path(__file__).parents[2]
LOOSE = "name: loose\nlimits_s: {ttft: {p95: 60}, tpot: {p95: 30}}\n"


def load_test(server: ServerAddresses, folder: Path, *options: str) -> dict[str, Any]:
    """report.json of a short run that has to meet an SLO which only a broken server misses."""
    slo = folder / "loose.yaml"
    slo.write_text(LOOSE)
    where = ["--host", server.http, "--grpc-url", server.grpc, "--metrics-url", f"http://{server.metrics}/metrics"]
    command = [sys.executable, "-m", "loadtests", *where, "--slo", str(slo), "--out", str(folder), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = folder.glob("*/report.json")
    return dict(json.loads(found.read_text()))


@pytest.fixture(scope="module")
def library(server: ServerAddresses) -> Library:
    return Library.load(TokenCounter(f"http://{server.http}"))


@pytest.mark.parametrize("kind", ["prose", "code"])
def test_a_prompt_has_the_length_asked_for_by_the_servers_count(
    server: ServerAddresses, library: Library, kind: str
) -> None:
    import random

    text, length = getattr(library, kind).cut(random.Random(5), 300)
    with HttpClient(f"http://{server.http}") as client:
        counted = client.generate(text, max_tokens=1).usage.prompt_tokens
    assert length == 300
    assert counted == pytest.approx(300, abs=12)


def test_the_prefix_cache_gives_what_the_workload_announces(server: ServerAddresses, tmp_path: Path) -> None:
    """Documents of 480 tokens, asked about again and again: the server finds about as many tokens as repeat."""
    options = ["--workload", "rag", "--ladder", "3", "--users", "3", "--warmup-s", "2", "--window-s", "6"]
    stage = load_test(server, tmp_path, *options)["stages"][0]
    assert stage["errors"] == {}
    announced = stage["lengths"]["shared_ratio"]
    assert stage["server"]["prefix_hit_ratio"] == pytest.approx(announced, abs=0.15)
    assert stage["metrics"]["prompt_tokens"]["p50"] > 480
    assert stage["lengths"]["as_asked"] == 1
    assert stage["server"]["running_max"] == 3
    assert stage["metrics"]["queue"]["count"] >= 1, "some requests ask for the server's own queue time"
    generated = stage["server"]["generated_tokens_per_s"]
    assert stage["rates"]["output_tokens_per_s"] == pytest.approx(generated, rel=0.3), "our count and the server's"


def test_structures_are_complete_when_answers_end(server: ServerAddresses, tmp_path: Path) -> None:
    options = ["--quick", "--workload", "extraction", "--transport", "http-stream", "--ladder", "4", "--users", "4"]
    stage = load_test(server, tmp_path, *options, "--warmup-s", "1", "--window-s", "4")["stages"][0]
    assert stage["errors"] == {}
    assert stage["metrics"]["output_tokens"]["count"] >= 2
