"""The launcher on a real Triton: READY means ready, and every kind of end leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from tests.server.faulty import health, tritonserver_pid
from tests.server.launched import LaunchedServer, ServerAddresses, assert_nothing_left
from tests.server.tiny_repository import write_tiny_repository
from tests.server.wire import wait_until


def generate(address: str, text: str, timeout_s: float = 60) -> str:
    body = json.dumps({"text_input": text, "max_tokens": 2}).encode()
    request = urllib.request.Request(f"http://{address}/v2/models/ensemble/generate", body)
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        return str(json.load(response)["text_output"])


def timed(address: str) -> float:
    """Seconds for a request of a few tokens."""
    started = time.monotonic()
    assert generate(address, "Hello").strip()
    return time.monotonic() - started


def start(repository: Path) -> tuple[LaunchedServer, ServerAddresses]:
    launched = LaunchedServer("--model-repository", str(repository))
    return launched, launched.wait_ready()


def test_a_request_succeeds_as_soon_as_the_ready_line_is_there(server: ServerAddresses) -> None:
    assert generate(server.http, "The capital of France is").strip()
    metrics = urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=10).read().decode()
    assert "nv_inference_request_success" in metrics


def test_second_start_is_ready_and_its_time_is_printed(
    server: ServerAddresses, capsys: pytest.CaptureFixture[str]
) -> None:
    launched = LaunchedServer()  # all is built: the fixture has seen to it
    addresses = launched.wait_ready()
    seconds = time.monotonic() - launched.started
    assert health(addresses) == (200, "")  # a probe agrees with READY at once
    with capsys.disabled():
        print(f"\nsecond start: READY after {seconds:.1f} s (another server runs beside it)")
    first_s, *later_s = (timed(addresses.http) for _ in range(10))
    assert first_s < 2 * statistics.median(later_s) + 0.05  # all is warm
    launched.signal(signal.SIGTERM)
    assert launched.wait() == 0, launched.output
    assert_nothing_left(launched, addresses, within_s=1)


def test_screen_shows_the_log_path_and_none_of_the_complaints_about_a_missing_gpu(tiny_repository: Path) -> None:
    launched, _ = start(tiny_repository)
    launched.signal(signal.SIGTERM)
    assert launched.wait() == 0
    assert f"{tiny_repository.parent}/logs/" in launched.output
    for word in ("CUDA", "Cuda", "NVML", "DCGM"):
        assert word not in launched.output
    log = next((tiny_repository.parent / "logs").glob("*.log")).read_text()
    assert "NVML" in log  # the full log has them


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_a_stop_signal_ends_with_code_0_and_nothing_left(tiny_repository: Path, number: signal.Signals) -> None:
    launched, addresses = start(tiny_repository)
    launched.signal(number)
    assert launched.wait() == 0, launched.output
    assert_nothing_left(launched, addresses, within_s=1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_the_folder_that_triton_itself_leaves_is_removed(tiny_repository: Path, number: signal.Signals) -> None:
    before = set(Path("/tmp").glob("python_env_*"))
    launched, addresses = start(tiny_repository)
    assert set(Path("/tmp").glob("python_env_*")) - before, "Triton makes none any more: the removal is not needed"
    launched.signal(number)
    assert_nothing_left(launched, addresses, within_s=10)
    wait_until(lambda: set(Path("/tmp").glob("python_env_*")) <= before)


def test_a_killed_launcher_leaves_nothing(tiny_repository: Path) -> None:
    launched, addresses = start(tiny_repository)
    launched.signal(signal.SIGKILL)
    assert_nothing_left(launched, addresses, within_s=10)


def test_a_killed_process_group_leaves_nothing(tiny_repository: Path) -> None:
    launched, addresses = start(tiny_repository)
    os.killpg(launched.process.pid, signal.SIGKILL)
    assert_nothing_left(launched, addresses, within_s=10)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_an_ended_make_leaves_nothing(server: ServerAddresses, number: signal.Signals) -> None:
    launched = LaunchedServer(command=["make", "serve", "HTTP_PORT=0", "GRPC_PORT=0", "METRICS_PORT=0"])
    addresses = launched.wait_ready()
    assert launched.launcher_pid != launched.process.pid
    launched.signal(number)
    assert_nothing_left(launched, addresses, within_s=20)


def test_a_signal_before_ready_ends_the_start(tiny_repository: Path) -> None:
    launched = LaunchedServer("--model-repository", str(tiny_repository))
    while "starting Triton" not in launched.output:
        time.sleep(0.01)
    launched.signal(signal.SIGTERM)
    assert launched.wait() == 0, launched.output
    assert "READY" not in launched.output
    assert launched.leftovers() == []


def test_sigterm_with_a_request_running_does_not_wait_for_it(tiny_repository: Path) -> None:
    launched, addresses = start(tiny_repository)
    answers: list[str] = []
    running = threading.Thread(target=lambda: answers.append(generate(addresses.http, "sleep 60", timeout_s=90)))
    running.start()
    time.sleep(0.5)
    asked = time.monotonic()
    launched.signal(signal.SIGTERM)
    assert launched.wait() == 0, launched.output
    assert time.monotonic() - asked < 9  # below --exit-timeout: the model was told, and ended the request
    running.join(10)
    assert answers == ["sleep 60"]
    assert_nothing_left(launched, addresses, within_s=1)


def test_one_stop_that_arrives_twice_is_still_a_clean_one(tiny_repository: Path) -> None:
    launched, addresses = start(tiny_repository)
    launched.signal(signal.SIGTERM)
    launched.signal(signal.SIGINT)
    assert launched.wait() == 0, launched.output
    log = next((tiny_repository.parent / "logs").glob("*.log")).read_text()
    assert "successfully unloaded 'echo'" in log
    assert_nothing_left(launched, addresses, within_s=1)


def test_nohup_survives_a_hangup(tiny_repository: Path) -> None:
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    serve = [sys.executable, "-m", "python_backend.server", "--model-repository", str(tiny_repository), *ports]
    launched = LaunchedServer(command=["nohup", *serve])
    addresses = launched.wait_ready()
    launched.signal(signal.SIGHUP)
    time.sleep(0.5)
    assert generate(addresses.http, "still here") == "still here"
    launched.signal(signal.SIGTERM)
    assert launched.wait() == 0


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    repository = write_tiny_repository(tmp_path / "model_repo")
    model = repository / "echo" / "1" / "model.py"
    model.write_text(model.read_text() + "\n    def finalize(self):\n        import time; time.sleep(60)\n")
    launched, addresses = start(repository)
    launched.signal(signal.SIGTERM)
    time.sleep(1.5)
    asked = time.monotonic()
    launched.signal(signal.SIGTERM)
    assert launched.wait() == 0, launched.output
    assert time.monotonic() - asked < 3
    assert_nothing_left(launched, addresses, within_s=1)


def test_a_taken_port_is_one_sentence_and_exit_code_3(tiny_repository: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        launched = LaunchedServer("--model-repository", str(tiny_repository), "--grpc-port", str(port))
        assert launched.wait() == 3
    assert launched.output.startswith("error: ")
    assert launched.output.count("\n") == 1
    assert f"grpc port {port}" in launched.output
    assert "GRPC_PORT=" in launched.output


def test_a_model_that_does_not_load_is_named_with_its_reason_and_exit_code_1(tmp_path: Path) -> None:
    repository = write_tiny_repository(tmp_path / "model_repo", model="raise ValueError('no such weights: /nowhere')\n")
    launched = LaunchedServer("--model-repository", str(repository))
    assert launched.wait() == 1
    last = launched.lines[-1]
    assert last.startswith("error: Model echo did not load: no such weights: /nowhere. Log: ")
    assert "Traceback" not in launched.output
    assert launched.leftovers() == []


def test_a_server_that_dies_by_itself_ends_the_launcher_with_code_1(tiny_repository: Path) -> None:
    launched, addresses = start(tiny_repository)
    os.kill(tritonserver_pid(launched), signal.SIGKILL)
    assert launched.wait() == 1
    assert "Triton ended by itself" in launched.output
    assert_nothing_left(launched, addresses, within_s=1)


def test_a_server_that_somebody_else_stops_ends_the_launcher_with_code_1(tiny_repository: Path) -> None:
    launched, addresses = start(tiny_repository)
    os.kill(tritonserver_pid(launched), signal.SIGTERM)
    assert launched.wait() == 1
    assert "Triton has stopped while it was serving: It got a signal" in launched.lines[-1]
    assert_nothing_left(launched, addresses, within_s=1)


def test_a_repository_that_is_not_there_is_exit_code_1(tmp_path: Path) -> None:
    launched = LaunchedServer("--model-repository", str(tmp_path / "none"))
    assert launched.wait() == 1
    assert launched.output.count("\n") == 1
    assert "is not a directory" in launched.output
