"""`python -m loadtests` as a process, on a fake server whose pace is known: exit codes, figures, workers, web page.

A process, since locust patches the standard library of the one it runs in.
"""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from loadtests import options, traces
from loadtests.errors import EnvironmentFault, UsageFault
from loadtests.server import Server
from tests.unit.paced_server import PacedServer

ROOT = Path(__file__).parents[2]
SHORT = ["--quick", "--warmup-s", "0.5", "--window-s", "1.5"]  # a window ends with 8 answers, else with 20


def command(server: PacedServer | None, out: Path, *options: str) -> list[str]:
    where = [] if server is None else ["--host", server.http_url, "--grpc-url", server.grpc_url]
    return [sys.executable, "-m", "loadtests", *where, "--out", str(out), *options]


def run(server: PacedServer | None, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(server, out, *options), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def own_slo(directory: Path, limits: str) -> str:
    path = directory / "own.yaml"
    path.write_text(f"name: own\nworkload: code\nlimits_s: {limits}\n")
    return str(path)


def report(out: Path) -> dict[str, Any]:
    (found,) = out.glob("*/report.json")
    return dict(json.loads(found.read_text()))


def requests(out: Path) -> list[dict[str, str]]:
    (found,) = out.glob("*/requests.csv")
    with found.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_figures_are_those_of_the_server(tmp_path: Path) -> None:
    with PacedServer(ttft_s=0.1, tpot_s=0.01) as server:
        chosen = [*SHORT, "--window-s", "4", "--ladder", "1,4", "--users", "4", "--transport", "http-stream"]
        done = run(server, tmp_path, *chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "It holds 4 users within the SLO chat, the highest load tried." in done.stdout
    assert "about 1 min" in done.stderr, "how long it takes is said first"
    stage = report(tmp_path)["stages"][1]
    assert 0.1 <= stage["metrics"]["ttft"]["p50"] < 0.2
    assert 0.008 < stage["metrics"]["tpot"]["p50"] < 0.02
    assert stage["lengths"]["as_asked"] == 1
    rate = stage["rates"]["output_tokens_per_s"]
    latency = stage["metrics"]["latency"]["mean"]
    assert rate == pytest.approx(4 * stage["metrics"]["output_tokens"]["mean"] / latency, rel=0.35), "Little's law"
    (directory,) = tmp_path.iterdir()
    assert {path.name for path in directory.iterdir()} == {
        "report.html",
        "report.json",
        "requests.csv",
        "stages.csv",
        "trace.jsonl",
    }
    assert len(traces.load(directory / "trace.jsonl")) == sum(row["error"] == "" for row in requests(tmp_path))


def test_ctrl_c_in_the_middle_ends_with_a_report_of_what_was_over_and_no_process(tmp_path: Path) -> None:
    with PacedServer(ttft_s=0.01, tpot_s=0.001) as server:
        process = subprocess.Popen(
            command(server, tmp_path, "--workload", "code", *SHORT, "--ladder", "1,2,8"),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if " user " in line and "tokens/s" in line:  # the first stage is over
                break
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    text = "".join(lines) + rest
    assert process.returncode == 130, text
    assert "Interrupted: these are the stages that were over by then." in text
    assert "KeyboardInterrupt" not in text
    assert report(tmp_path)["stages"]


def test_a_miss_is_exit_code_1_and_says_what_and_by_how_much(tmp_path: Path) -> None:
    """Every fifth request ends with an error after three tokens: a failure, whatever came before."""
    with PacedServer(ttft_s=0.02, tpot_s=0.1, failing=5) as server:
        done = run(server, tmp_path, *SHORT, "--window-s", "4", "--ladder", "4", "--workload", "code")
    assert done.returncode == 1
    assert re.search(r"Required: 4 users\. Missed: TPOT p95 1\d\d ms, 1\d\d % over 50 ms; ", done.stdout), done.stdout
    assert re.search(r"over 50 ms; errors [\d.]+ %, \d+ % over 0\.1 %\.", done.stdout), done.stdout
    stage = report(tmp_path)["stages"][0]
    assert stage["rates"]["error_rate"] == pytest.approx(0.2, abs=0.12)
    assert stage["errors"].keys() == {"ServerFailure"}
    assert stage["messages"]["ServerFailure"] == ["the engine fell over"]


def test_whole_answers_are_judged_by_their_latency(tmp_path: Path) -> None:
    slo = own_slo(tmp_path, "{latency: {p95: 2.0}}")
    with PacedServer() as server:
        chosen = [*SHORT, "--ladder", "2", "--users", "2", "--transport", "http-generate", "--slo", slo]
        done = run(server, tmp_path / "out", *chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    stage = report(tmp_path / "out")["stages"][0]
    assert stage["metrics"]["ttft"] == {"count": 0}
    assert stage["rates"]["output_tokens_per_s"] > 0


def test_a_frozen_server_is_not_hidden_in_open_loop(tmp_path: Path) -> None:
    """10 requests a second, nothing answered for 2 s: those that should have started then waited, and it shows."""
    with PacedServer() as server:
        process = subprocess.Popen(
            command(server, tmp_path, "--rates", "10", "--warmup-s", "1", "--window-s", "5", "--workload", "code"),
            cwd=ROOT,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        while len(server.seen) < 20:
            time.sleep(0.05)
        threading.Thread(target=server.freeze, args=(2.0,)).start()
        process.communicate(timeout=60)
    stage = report(tmp_path)["stages"][0]
    assert stage["metrics"]["ttft"]["p99"] > 1.5
    assert stage["metrics"]["lag"]["count"] == pytest.approx(50, abs=16), "arrivals went on"
    assert stage["metrics"]["ttft"]["p50"] < 1.0


def test_workers_split_the_requests_and_the_figures_are_merged(tmp_path: Path) -> None:
    with PacedServer(ttft_s=0.05, tpot_s=0.005) as server:
        done = run(server, tmp_path, *SHORT, "--ladder", "6", "--users", "6", "--workers", "2")
        asked = len([seen for seen in server.seen if seen.model == "ensemble"])
    assert done.returncode == 0, done.stdout + done.stderr
    rows = requests(tmp_path)
    indices = [int(row["index"]) for row in rows]
    assert len(indices) == len(set(indices)) == asked, "every request once, none lost"
    assert {index % 2 for index in indices} == {0, 1}
    stage = report(tmp_path)["stages"][0]
    counted = [row for row in rows if row["counted"] == "1" and not row["error"]]
    assert stage["metrics"]["ttft"]["count"] == len(counted)
    latency = stage["metrics"]["latency"]["mean"]
    expected = 6 * stage["metrics"]["output_tokens"]["mean"] / latency
    assert stage["rates"]["output_tokens_per_s"] == pytest.approx(expected, rel=0.35)


def test_workers_share_the_arrivals_of_a_recorded_trace(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    lines = [f"2023-11-16 18:15:{second:02d}.5000000,{20 + second},5" for second in range(4) for _ in range(3)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    with PacedServer() as server:
        chosen = ["--workload", "replay", "--trace", str(trace), "--speed", "2", "--workers", "2"]
        done = run(server, tmp_path / "out", *chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = sorted(requests(tmp_path / "out"), key=lambda row: int(row["index"]))
    first = float(rows[0]["intended_at"])
    assert [round(float(row["intended_at"]) - first, 2) for row in rows] == [n / 2 for n in range(4) for _ in range(3)]
    assert report(tmp_path / "out")["stages"][0]["metrics"]["output_tokens"]["max"] == 5


def test_locusts_page_runs_the_users_and_shows_our_report(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with PacedServer() as server:
        process = subprocess.Popen(
            command(server, tmp_path, "--ui", str(port)), cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        try:
            assert process.stderr is not None
            while "locust's page" not in (line := process.stderr.readline()):
                assert line, "ended before the page was there"
            base = f"http://127.0.0.1:{port}"
            start = urllib.request.Request(f"{base}/swarm", data=b"user_count=3&spawn_rate=3")
            assert json.loads(urllib.request.urlopen(start, timeout=10).read())["success"]
            deadline = time.monotonic() + 20
            while (stats := _stats(base))["user_count"] < 3 or stats["total_rps"] == 0:
                assert time.monotonic() < deadline, stats
                time.sleep(0.2)
            assert stats["stats"][0]["name"] == "chat"
            page = urllib.request.urlopen(f"{base}/report", timeout=10).read().decode()
            assert "It holds 3 users within the SLO chat" in page
            urllib.request.urlopen(f"{base}/stop", data=b"", timeout=10)
            assert "It holds 3 users" in urllib.request.urlopen(f"{base}/report", timeout=10).read().decode()
            asked = len(server.seen)
            again = urllib.request.Request(f"{base}/swarm", data=b"user_count=2&spawn_rate=2")
            assert json.loads(urllib.request.urlopen(again, timeout=10).read())["success"]
            deadline = time.monotonic() + 20
            while len(server.seen) < asked + 10:
                assert time.monotonic() < deadline, "the second start asks as the first one did"
                time.sleep(0.2)
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=30)
    assert report(tmp_path)["stages"][0]["metrics"]["ttft"]["count"] > 5


def _stats(base: str) -> dict[str, Any]:
    return dict(json.loads(urllib.request.urlopen(f"{base}/stats/requests", timeout=10).read()))


def test_a_search_finds_what_a_server_of_known_capacity_holds(tmp_path: Path) -> None:
    """Two at once, some 65 ms each (24 tokens of 2.5 ms and 5 ms): 31 requests/s at most, for a short while some more.

    The limit leaves room for moments in which this machine does something else.
    """
    slo = own_slo(tmp_path, "{ttft: {p95: 0.3}}")
    with PacedServer(ttft_s=0.005, tpot_s=0.0025, slots=2) as server:
        timing = ["--warmup-s", "0.2", "--window-s", "0.5"]
        done = run(server, tmp_path, "--find", "max", "--slo", slo, *timing)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"(The highest rate|It holds [\d.]+ requests/s) within the SLO own", done.stdout), done.stdout
    assert re.search(r"A request by itself takes [\d.]+ ms per token\.", done.stdout), done.stdout
    found = report(tmp_path)
    assert 8 < found["verdict"]["estimate"] < 60
    assert found["search"]["limit"]["rate"] == found["verdict"]["estimate"]
    assert 4 <= len(found["search"]["trials"]) <= 14
    answered = [row for row in requests(tmp_path) if not row["error"]]
    assert all(len(row["response_s"].split()) == int(row["responses"]) for row in answered)


def test_every_rate_that_was_asked_for_has_to_hold(tmp_path: Path) -> None:
    with PacedServer(ttft_s=0.01, tpot_s=0.004, slots=1) as server:
        slo = own_slo(tmp_path, "{ttft: {p95: 0.5}}")
        done = run(server, tmp_path, "--rates", "4,16", "--arrivals", "even", "--slo", slo, *SHORT)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "It holds 4 requests/s within the SLO own" in done.stdout
    assert "Required: 16 requests/s. Missed: TTFT p95" in done.stdout
    slow = [float(row["intended_at"]) for row in requests(tmp_path) if row["stage"] == "4 requests/s"]
    assert all(after - before == pytest.approx(0.25, abs=1e-3) for before, after in pairwise(slow))


def test_a_lost_worker_ends_the_test_with_what_was_over(tmp_path: Path) -> None:
    with PacedServer(ttft_s=0.01, tpot_s=0.001) as server:
        process = subprocess.Popen(
            command(server, tmp_path, "--workload", "code", *SHORT, "--ladder", "2,4,6,8", "--workers", "2"),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if " users " in line and "tokens/s" in line:
                break
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        rest, _ = process.communicate(timeout=90)
    assert process.returncode == 3, "".join(lines) + rest
    assert "Only 1 of 2 workers are left" in rest
    assert report(tmp_path)["stages"]


def test_a_server_that_was_started_for_the_test_and_ends_is_noticed() -> None:
    with subprocess.Popen(["sleep", "60"], text=True) as process:
        server = Server("http://127.0.0.1:1", "127.0.0.1:2", None, process)
        server.check_running()
        process.kill()
        process.wait()
        with pytest.raises(EnvironmentFault, match="ended with code -9 during the test"):
            server.check_running()


def test_a_place_where_no_report_can_be_written_is_noticed_first(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run(None, tmp_path / "file", "--host", "127.0.0.1:1")
    assert done.returncode == 2
    assert re.fullmatch(r"error: No report can be written to \S+ \(.*\); give another --out\.\n", done.stderr)


def test_without_a_server_it_says_so(tmp_path: Path) -> None:
    done = run(None, tmp_path, "--host", "127.0.0.1:1")
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1].startswith("error: No server answers at http://127.0.0.1:1")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--slo", "none"], "There is no SLO 'none'"),
        (["--workload", "gossip"], "There is no workload 'gossip'; there are chat"),
        (["--transport", "http-generate"], "http-generate returns whole answers"),
        (["--ui", "--find", "max"], "--ui does not go with --find"),
        (["--ui", "--workload", "burst"], "--ui does not go with"),
    ],
)
def test_what_cannot_be_asked_for_is_said(given: Sequence[str], text: str) -> None:
    with pytest.raises(UsageFault, match=text) as found:
        options.parse(given)
    assert found.value.exit_code == 2


def test_the_load_that_has_to_hold_is_always_tried() -> None:
    assert options.parse(["--users", "6"]).ladder == (1, 2, 4, 6, 8, 16, 32)
    assert options.parse(["--ladder", "1,8"]).ladder == (1, 4, 8), "the SLO says 4"
    assert options.parse(["--rates", "2,1"]).required == 2
    assert options.parse(["--find", "max"]).required is None
    assert options.parse(["--workload", "burst"]).required is None, "its rates are a ladder"
    assert options.parse(["--workload", "burst"]).rates == (0.5, 1.0, 2.0)
