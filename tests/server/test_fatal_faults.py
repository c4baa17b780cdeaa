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

from tests.server.faulty import (
    copy_with,
    health,
    kill_stub,
    long_stream,
    running,
    with_switches,
)
from tests.server.launched import LaunchedServer, assert_nothing_left
from tests.server.tiny_deployment import MAX_SEQ_LEN
from tests.server.wire import Stream, ask, engine_inputs, post, text_inputs, wait_until

LONG = MAX_SEQ_LEN - 200


def test_a_killed_engine_process_ends_every_stream_and_the_server_with_code_1(tiny_llm):
    with running(tiny_llm) as (launched, server):
        streams = [long_stream(server, LONG) for _ in range(4)]
        killed = time.monotonic()
        kill_stub(launched, "tensorrt_llm")
        for stream in streams:
            assert stream.rest()[-1].error
        assert time.monotonic() - killed < 10
        assert launched.wait() == 1
        assert "A model ended while it was serving: tensorrt_llm." in launched.lines[-1]
        assert_nothing_left(launched, server, within_s=1)
        for stream in streams:
            stream.close()


def test_a_killed_preprocessing_lets_running_streams_finish_refuses_new_ones_and_ends_with_code_1(tiny_llm):
    with running(tiny_llm) as (launched, server):
        stream = long_stream(server, 2500)
        kill_stub(launched, "preprocessing")
        refused = ask(server, "ensemble", text_inputs("Hello", 5))[-1]
        assert refused.error
        wait_until(lambda: health(server)[0] == 503)
        last = stream.rest()[-1]
        assert last["finish_reason"].reshape(-1).tolist() == [b"length"]
        stream.close()
        assert launched.wait() == 1
        assert "A model ended while it was serving: preprocessing." in launched.lines[-1]
        assert_nothing_left(launched, server, within_s=1)


def test_a_dead_engine_thread_ends_every_stream_and_the_server_with_code_1(tiny_llm, tmp_path):
    flag = str(tmp_path / "engine-")
    repository = with_switches(copy_with(tiny_llm, tmp_path / "repository"), flag)
    with running(repository) as (launched, server):
        streams = [long_stream(server, LONG) for _ in range(3)]
        Path(flag + "dead").touch()
        for stream in streams:
            assert "The engine has failed: killed by a test" in stream.rest()[-1].error
            stream.close()
        assert launched.wait() == 1
        assert "The engine has failed (killed by a test); the server stops." in launched.output
        assert_nothing_left(launched, server, within_s=1)


def test_an_engine_that_hangs_is_not_ready_until_it_goes_on(tiny_llm, tmp_path):
    flag = str(tmp_path / "engine-")
    repository = copy_with(tiny_llm, tmp_path / "repository", health_patience_ms=1000)
    with running(with_switches(repository, flag)) as (_, server):
        wait_until(lambda: health(server)[0] == 200)
        stream = long_stream(server, 1000)
        Path(flag + "hangs").touch()
        wait_until(lambda: health(server)[0] == 503, timeout_s=20)
        assert "tensorrt_llm: the engine has work and has made no step for" in health(server)[1]
        Path(flag + "hangs").unlink()
        assert stream.rest()[-1].final
        wait_until(lambda: health(server)[0] == 200)
        stream.close()


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


def test_a_missing_tokenizer_is_named_and_nothing_starts(tiny_llm, tmp_path):
    root = tmp_path / "deployment"
    shutil.copytree(tiny_llm.parent, root)
    (root / "checkpoint" / "tokenizer.json").unlink()
    for path in (root / "model_repo").glob("*/config.pbtxt"):
        path.write_text(path.read_text().replace(str(tiny_llm.parent), str(root)))
    launched = LaunchedServer("--model-repository", str(root / "model_repo"))
    assert launched.wait() == 1
    assert launched.lines[-1].startswith("error: Model ")
    assert "tokenizer.json" in launched.lines[-1]
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
