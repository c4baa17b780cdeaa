"""What takes a server down, on real ones: nobody waits for ever, the exit code says what happened, nothing is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from build_engines.repository import TEMPLATES
from python_backend.server.stubs import stubs_of
from python_backend.telemetry.health import HEALTHY, PARTS
from tests.server.faulty import (
    bare_triton,
    copy_with,
    health,
    impatient,
    kill_stub,
    long_stream,
    running,
    that_hangs,
    with_switches,
)
from tests.server.launched import LaunchedServer, assert_nothing_left
from tests.server.tiny_deployment import MAX_BATCH, MAX_SEQ_LEN
from tests.server.wire import Stream, active_requests, ask, engine_inputs, metric, post, text_inputs, wait_until

LONG = MAX_SEQ_LEN - 200
DEAD = "Stub process '{}_0_0' is not healthy."


@pytest.fixture(scope="module")
def all_models(tiny_llm, tmp_path_factory):
    """The repository with `adapters` in it, as a spec with a section lora has it."""
    repository = copy_with(tiny_llm, tmp_path_factory.mktemp("all") / "model_repo")
    shutil.copytree(TEMPLATES / "adapters", repository / "adapters")
    return repository


@pytest.mark.parametrize("model", ["tensorrt_llm", "postprocessing"])
def test_a_killed_process_that_every_answer_needs_ends_every_stream_and_the_server_with_code_1(tiny_llm, model):
    with running(tiny_llm) as (launched, server):
        streams = [long_stream(server, LONG) for _ in range(4)]
        killed = time.monotonic()
        kill_stub(launched, model)
        for stream in streams:
            assert stream.rest()[-1].error
        assert time.monotonic() - killed < 1
        assert launched.wait() == 1
        assert f"A model ended while it was serving: {model}." in launched.lines[-1]
        assert_nothing_left(launched, server, within_s=1)
        for stream in streams:
            stream.close()


@pytest.mark.parametrize("model", ["preprocessing", "ensemble_unary", "health", "adapters"])
def test_another_killed_process_lets_running_streams_finish_and_ends_the_server_with_code_1(all_models, model):
    with running(all_models) as (launched, server):
        stream = long_stream(server, 1000)
        kill_stub(launched, model)
        wait_until(lambda: bool(ask(server, "ensemble", text_inputs("Hello", 5))[-1].error), period_s=0.05)
        wait_until(lambda: health(server)[0] >= 500)
        last = stream.rest()[-1]
        assert last["finish_reason"].reshape(-1).tolist() == [b"length"]
        stream.close()
        assert launched.wait() == 1
        assert f"A model ended while it was serving: {model}." in launched.lines[-1]
        assert_nothing_left(launched, server, within_s=1)


def test_without_the_launcher_health_ends_a_server_of_which_a_process_was_killed(tiny_llm):
    with bare_triton(tiny_llm, exit_timeout_s=2) as (process, server):
        (pid,) = (stub.pid for stub in stubs_of(process.pid) if stub.model == "preprocessing")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: health(server) == (503, "Not ready: preprocessing: " + DEAD.format("preprocessing")))
        # Triton waits for the dead model as long as it may, and fails over it or says that its time is over.
        assert process.wait(timeout=15) in (-signal.SIGSEGV, 1)


def test_without_the_launcher_a_killed_health_fails_its_own_probe_and_harms_nobody(tiny_llm):
    with bare_triton(tiny_llm) as (process, server):
        (pid,) = (stub.pid for stub in stubs_of(process.pid) if stub.model == "health")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: health(server) == (500, DEAD.format("health")))
        assert post(server, "ensemble/generate", {"text_input": "Hello", "max_tokens": 5})[0] == 200
        assert process.poll() is None


def test_a_dead_engine_thread_ends_every_stream_and_the_server_with_code_1(tiny_llm, tmp_path):
    flag = str(tmp_path / "engine-")
    repository = with_switches(copy_with(tiny_llm, tmp_path / "repository"), flag)
    with running(repository) as (launched, server):
        streams = [long_stream(server, LONG) for _ in range(3)]
        Path(flag + "dead").touch()
        for stream in streams:
            assert "The engine has failed: killed by a test" in stream.rest()[-1].error
        told = time.monotonic()
        assert launched.wait() == 1  # streams that nobody has closed do not hold it up
        assert time.monotonic() - told < 5
        assert "The engine has failed (killed by a test); the server stops." in launched.lines[-1]
        assert_nothing_left(launched, server, within_s=1)
        for stream in streams:
            stream.close()


def test_a_failed_step_harms_nobody_else_and_three_in_a_row_end_the_server_with_code_1(tiny_llm, tmp_path):
    flag = str(tmp_path / "engine-")
    with running(with_switches(copy_with(tiny_llm, tmp_path / "repository"), flag)) as (launched, server):
        in_the_step = [long_stream(server, LONG) for _ in range(MAX_BATCH)]
        waiting = Stream(server)
        waiting.send("ensemble", text_inputs("There was", 20, stream=[[True]], end_id=[[-1]]))
        wait_until(lambda: active_requests(server) == MAX_BATCH + 1)
        Path(flag + "fails-once").touch()
        for stream in in_the_step:
            assert "The engine failed in a step of this request: failed by a test" in stream.rest()[-1].error
        assert waiting.rest()[-1]["finish_reason"].reshape(-1).tolist() == [b"length"]
        assert health(server)[0] == 200
        Path(flag + "fails").touch()
        errors = [ask(server, "ensemble", text_inputs("Hello", 5))[-1].error for _ in range(3)]
        assert ["The engine failed in a step of this request" in error for error in errors] == [True, True, False]
        assert "The engine has failed: failed by a test" in errors[2]
        assert launched.wait() == 1
        for stream in (*in_the_step, waiting):
            stream.close()


@pytest.fixture(scope="module")
def hanging(tiny_llm, tmp_path_factory):
    """A server that does not wait for long, with how to make it hang. (flag, addresses)"""
    place = tmp_path_factory.mktemp("hanging")
    flag = str(place / "flag-")
    repository = with_switches(copy_with(tiny_llm, place / "repository", health_patience_ms=1000), flag)
    that_hangs(impatient(repository, seconds=1), "preprocessing", flag + "preprocessing")
    with running(repository) as (_, server):
        wait_until(lambda: health(server)[0] == 200)
        yield flag, server


def test_an_engine_that_hangs_is_not_ready_until_it_goes_on(hanging):
    flag, server = hanging
    stream = long_stream(server, 1000)
    Path(flag + "hangs").touch()
    wait_until(lambda: health(server)[0] == 503, timeout_s=20)
    assert "tensorrt_llm: the engine has work and has made no step for" in health(server)[1]
    Path(flag + "hangs").unlink()
    assert stream.rest()[-1].final
    wait_until(lambda: health(server)[0] == 200)
    stream.close()


def test_a_model_that_hangs_is_not_ready_and_shown_so_and_the_others_are_asked_all_the_same(hanging):
    flag, server = hanging
    Path(flag + "preprocessing").touch()
    wait_until(lambda: models_that_serve(server) == set(PARTS) - {"preprocessing"})
    assert health(server)[0] == 503
    assert "preprocessing has not answered for" in health(server)[1]
    Path(flag + "hangs").touch()
    stream = Stream(server)
    stream.send("tensorrt_llm", engine_inputs([70], 5))
    wait_until(lambda: models_that_serve(server) == set(PARTS) - {"preprocessing", "tensorrt_llm"})
    for name in ("preprocessing", "hangs"):
        Path(flag + name).unlink()
    assert stream.rest()[-1].final
    wait_until(lambda: models_that_serve(server) == set(PARTS))
    assert health(server)[0] == 200
    stream.close()


def models_that_serve(server):
    return {part for part in PARTS if metric(server, HEALTHY.name, model="health", part=part)}


def test_no_kv_blocks_for_those_who_wait_is_not_ready_until_some_are_free(tiny_llm, tmp_path):
    # The first request may need all of the cache, and nobody else is let in while it does.
    limits = {"max_tokens_in_paged_kv_cache": MAX_SEQ_LEN, "batch_scheduler_policy": "guaranteed_no_evict"}
    repository = copy_with(tiny_llm, tmp_path / "repository", health_patience_ms=1000, **limits)
    with running(repository) as (_, server):
        wait_until(lambda: health(server)[0] == 200)
        holder = long_stream(server, LONG, request_id="holder")
        waiting = [Stream(server) for _ in range(2)]
        for stream in waiting:
            stream.send("ensemble", text_inputs("There was", 300, stream=[[True]], end_id=[[-1]]))
        wait_until(lambda: health(server)[0] == 503, timeout_s=20)
        assert "tensorrt_llm: no KV cache block has become free for 2 waiting requests in" in health(server)[1]
        ask(server, "tensorrt_llm", engine_inputs([0], 0, stop=[[True]]), request_id="holder")
        assert holder.rest()[-1].final
        for stream in waiting:
            assert stream.rest()[-1]["finish_reason"].reshape(-1).tolist() == [b"length"]
        wait_until(lambda: health(server)[0] == 200)
        for stream in (holder, *waiting):
            stream.close()


@pytest.mark.parametrize("missing", ["checkpoint/tokenizer.json", "engine/config.json", "model_repo/health/1/model.py"])
def test_a_missing_file_is_named_and_nothing_starts(tiny_llm, tmp_path, missing):
    root = tmp_path / "deployment"
    shutil.copytree(tiny_llm.parent, root)
    (root / missing).unlink()
    for path in (root / "model_repo").glob("*/config.pbtxt"):
        path.write_text(path.read_text().replace(str(tiny_llm.parent), str(root)))
    launched = LaunchedServer("--model-repository", str(root / "model_repo"))
    assert launched.wait() == 1
    assert launched.lines[-1].startswith("error: ")
    assert Path(missing).name in launched.lines[-1]
    assert launched.leftovers() == []


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(tiny_llm):
    with running(tiny_llm, "--exit-timeout", "60") as (launched, server):
        streams = [long_stream(server, 1500) for _ in range(3)]
        launched.signal(signal.SIGTERM)
        wait_until(lambda: "stopping" in launched.output)
        wait_until(lambda: health(server) == (503, "Not ready: the server is shutting down."))
        status, answer = post(server, "ensemble/generate", {"text_input": "Hello", "max_tokens": 5})
        assert status >= 400
        assert answer["error"].endswith("The server is shutting down; send the request to another one.")
        for stream in streams:
            assert stream.rest()[-1]["finish_reason"].reshape(-1).tolist() == [b"length"]
            stream.close()
        assert launched.wait() == 0, launched.output
        assert_nothing_left(launched, server, within_s=1)


@pytest.mark.parametrize(
    ("number", "timeout"), [(signal.SIGTERM, "1"), (signal.SIGINT, "60")], ids=["SIGTERM over its time", "SIGINT"]
)
def test_what_does_not_finish_in_time_ends_as_cancelled_with_what_it_has(tiny_llm, number, timeout):
    with running(tiny_llm, "--exit-timeout", timeout) as (launched, server):
        stream = long_stream(server, LONG)
        launched.signal(number)
        last = stream.rest()[-1]
        assert last["finish_reason"].reshape(-1).tolist() == [b"cancelled"]
        stream.close()
        assert launched.wait() == 0, launched.output


def _may_mount() -> bool:
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.skipif(not _may_mount(), reason="this user may not mount a small file system in a namespace of its own")
def test_a_full_disk_of_the_log_harms_no_request(tiny_llm, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    ports = "--http-port 0 --grpc-port 0 --metrics-port 0"
    serve = f"python -m python_backend.server --model-repository {tiny_llm} --log-file {logs}/triton.log {ports}"
    script = f"mount -t tmpfs -o size=120m tmpfs {logs} && exec .venv/bin/{serve}"
    launched = LaunchedServer(command=["unshare", "--mount", "sh", "-c", script])
    try:
        server = launched.wait_ready()
        inside = Path(f"/proc/{launched.process.pid}/root{logs}")
        with pytest.raises(OSError, match="No space left"):
            (inside / "filler").write_bytes(b"\0" * 2**27)
        assert os.statvfs(inside).f_bavail == 0
        before = (inside / "triton.log").stat().st_size
        for _ in range(5):
            status, answer = post(server, "ensemble/generate", {"text_input": "Hello", "max_tokens": 5, "top_k": -1})
            assert (status >= 400, "top_k" in json.dumps(answer)) == (True, True)
            assert post(server, "ensemble/generate", {"text_input": "Hello", "max_tokens": 5})[0] == 200
        assert (inside / "triton.log").stat().st_size - before < 4096
        launched.signal(signal.SIGTERM)
        assert launched.wait() == 0, launched.output
    finally:
        launched.process.kill()
