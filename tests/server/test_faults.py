"""Faults that a server survives: whoever caused them gets a clear end, nobody else notices, and nothing is left taken.

FAULTS=full adds a soak of 10,000 requests and prints the figures of docs/operations.md.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from clients import GenerateRequest, GrpcClient
from tests.server.faulty import Beside, copy_with, health, resident_bytes, running, server_pids
from tests.server.tiny_deployment import MAX_BATCH, MAX_QUEUE, build_tiny_deployment
from tests.server.wire import (
    Stream,
    active_requests,
    ask,
    cancelled,
    engine_inputs,
    metric,
    post,
    text_inputs,
    tokens,
    used_blocks,
    wait_until,
)

FULL = os.environ.get("FAULTS") == "full"
FLOOD_S = 60
TRUE = [[True]]
BLOCKS = 64


@pytest.fixture(scope="module")
def tiny(tiny_llm, tmp_path_factory):
    """One server for this module: 8 slots, 16 places in the queue, 64 KV blocks of 32 tokens. (launched, addresses)"""
    repository = copy_with(
        tiny_llm, tmp_path_factory.mktemp("faults") / "repo", max_tokens_in_paged_kv_cache=BLOCKS * 32
    )
    with running(repository) as (launched, server):
        yield launched, server


@pytest.fixture
def server(tiny):
    """Idle before and after each test, with every block free."""
    _, server = tiny
    yield server
    wait_until(lambda: active_requests(server) == 0, timeout_s=60)
    wait_until(lambda: used_blocks(server) == 0)


def test_the_engine_comes_before_the_rest_of_the_server_on_busy_cores(tiny):
    launched, _ = tiny
    others = server_pids(launched)
    engine = others.pop("tensorrt_llm")
    assert len(others) > 4
    for pid in others.values():
        assert {os.sched_getscheduler(thread) for thread in _threads(pid)} == {os.SCHED_BATCH}
    # Those that the stub made before it came to our code take no part in a step.
    computing = [thread for thread in _threads(engine) if os.sched_getscheduler(thread) == os.SCHED_OTHER]
    assert len(computing) >= 2


def generate(server, max_tokens=20, prompt="Once upon a time"):
    status, answer = post(server, "ensemble/generate", {"text_input": prompt, "max_tokens": max_tokens, "end_id": -1})
    assert status == 200, answer
    return answer["text_output"]


def http_stream(server, model, body):
    """A socket on which a stream has been asked for; nothing of the answer is read."""
    host, port = server.http.split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST /v2/models/{model}/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def test_a_hundred_clients_that_hang_up_mid_stream_give_back_every_block_and_disturb_nobody(server):
    expected = generate(server, 40)
    with Beside(lambda: _same(generate(server, 40), expected)) as others:
        for _ in range(25):
            wait_until(lambda: metric(server, "nv_trt_llm_request_metrics", request_type="waiting") == 0, timeout_s=30)
            body = {"input_ids": [70], "input_lengths": 1, "request_output_len": 1500, "streaming": True, "end_id": -1}
            through = {"text_input": "Hello", "max_tokens": 60, "stream": True, "end_id": -1}
            gone = [http_stream(server, "tensorrt_llm", body), http_stream(server, "ensemble", through)]
            stream = Stream(server)
            stream.send("tensorrt_llm", engine_inputs([71], 1500, streaming=TRUE, end_id=[[-1]]))
            for connection in gone:
                assert connection.recv(1)
                connection.close()
            assert not stream.next().error
            stream.close(cancel=True)
            leave_early(server)
    assert others.errors == []
    assert others.calls > 0


MANY = 100


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A server on which so many streams run at once. (launched, addresses)"""
    repository = build_tiny_deployment(tmp_path_factory.mktemp("wide"), max_batch_size=MANY + 4, max_queue_size=256)
    with running(repository) as (launched, server):
        yield launched, server


def test_a_hundred_clients_that_hang_up_at_the_same_time_give_back_every_block_at_once(wide):
    _, server = wide
    expected, before = generate(server, 40), cancelled(server)
    body = {"input_ids": [70], "input_lengths": 1, "request_output_len": 4000, "streaming": True, "end_id": -1}
    sockets = [http_stream(server, "tensorrt_llm", body) for _ in range(MANY // 2)]
    streams = [Stream(server) for _ in range(MANY // 2)]
    for stream in streams:
        stream.send("tensorrt_llm", engine_inputs([71], 4000, streaming=TRUE, end_id=[[-1]]))
    for connection, stream in zip(sockets, streams, strict=True):
        assert connection.recv(1)
        assert not stream.next().error
    assert metric(server, "nv_trt_llm_request_metrics", request_type="scheduled") == MANY
    with Beside(lambda: _same(generate(server, 40), expected)) as others:
        with ThreadPoolExecutor(MANY // 2) as pool:
            for connection in sockets:
                connection.close()
            list(pool.map(lambda stream: stream.close(cancel=True), streams))
        wait_until(lambda: cancelled(server) - before == MANY, timeout_s=5)
        wait_until(lambda: others.calls > 0, timeout_s=30)
    assert others.errors == []
    wait_until(lambda: used_blocks(server) == 0)


@pytest.mark.parametrize("deadline_s", [0.001, 0.02, 0.5])
def test_many_calls_whose_deadline_passes_leave_the_server_as_it_was(wide, deadline_s):
    launched, server = wide
    expected, pids = generate(server, 40), server_pids(launched)
    before = _resident_mib(pids)
    num_calls, num_clients = (10_000 if FULL else 1000, 8) if deadline_s < 0.1 else (200, 100)

    def call(_):
        with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
            client.infer("ensemble_unary", text_inputs("Late", 8000, end_id=[[-1]]), client_timeout=deadline_s)

    with ThreadPoolExecutor(num_clients) as pool, grpcclient.InferenceServerClient(server.grpc) as client:
        list(pool.map(call, range(num_calls)))
    wait_until(lambda: active_requests(server) == 0, timeout_s=30)
    wait_until(lambda: used_blocks(server) == 0)
    assert generate(server, 40) == expected
    assert health(server) == (200, "")
    assert server_pids(launched) == pids
    assert sum(_grown_mib(pids, before).values()) < 64


def leave_early(server):
    """Break out of a stream of our client: a bare gRPC cancel through an ensemble may take Triton 2.51 down."""
    with GrpcClient(server.grpc) as client:
        for _ in client.stream(GenerateRequest(text_input="Hello", max_tokens=1500, end_id=-1)):
            break


def _same(got, expected):
    assert got == expected


def test_more_requests_than_kv_blocks_are_computed_in_turns_and_each_gets_all_its_tokens(server):
    alone = [tokens(ask(server, "tensorrt_llm", engine_inputs([70 + i], 400, end_id=[[-1]]))) for i in range(MAX_BATCH)]
    preemptions = metric(server, "llm_preemptions_total")
    streams = [Stream(server) for _ in range(MAX_BATCH)]
    for i, stream in enumerate(streams):  # 8 x 400 tokens, and 2,048 fit
        stream.send("tensorrt_llm", engine_inputs([70 + i], 400, streaming=TRUE, end_id=[[-1]]))
    assert [tokens(stream.rest()) for stream in streams] == alone
    assert metric(server, "llm_preemptions_total") > preemptions
    for stream in streams:
        stream.close()


def test_a_request_that_all_kv_blocks_could_not_hold_is_refused_with_the_figures(server):
    reply = ask(server, "tensorrt_llm", engine_inputs([70], BLOCKS * 32, end_id=[[-1]]))[-1]
    assert f"needs {BLOCKS + 1} KV cache blocks" in reply.error
    assert f"the engine has {BLOCKS} of 32 tokens" in reply.error


def test_a_slow_reader_holds_up_nobody_and_the_server_keeps_little_for_it(tiny, server):
    launched, _ = tiny
    pids = server_pids(launched).values()
    generate(server)
    before = sum(map(resident_bytes, pids))
    body = {"text_input": "Slow", "max_tokens": 1900, "stream": True, "end_id": -1}
    slow = [http_stream(server, "ensemble", body)]
    started = time.monotonic()
    for _ in range(10):
        generate(server)
    assert time.monotonic() - started < 30
    wait_until(lambda: active_requests(server) == 0, timeout_s=60)
    assert sum(map(resident_bytes, pids)) - before < 64 * 2**20
    received = b""
    slow[0].settimeout(30)
    while not received.endswith(b"0\r\n\r\n"):
        received += slow[0].recv(65536)
    slow[0].close()
    assert received.count(b"data: {") == 1900  # nothing was dropped either
    assert b'"finish_reason":"length"' in received


class Flood:
    """Clients that call as fast as they are answered, until told otherwise."""

    def __init__(self, server, num_clients):
        self._server = server
        self._over = threading.Event()
        self.answers = []
        self._threads = [threading.Thread(target=self._client) for _ in range(num_clients)]

    def run(self, seconds):
        for thread in self._threads:
            thread.start()
        deadline, waiting = time.monotonic() + seconds, []
        while time.monotonic() < deadline:
            waiting.append(metric(self._server, "nv_trt_llm_request_metrics", request_type="waiting"))
            time.sleep(0.25)
        self._over.set()
        for thread in self._threads:
            thread.join()
        return max(waiting)

    def _client(self):
        body = {"text_input": "Once upon a time", "max_tokens": 30, "end_id": -1}
        while not self._over.is_set():
            status, answer = post(self._server, "ensemble/generate", body)
            self.answers.append((status, answer.get("text_output"), answer.get("error", "")))
            if status != 200:
                self._over.wait(0.25)


@pytest.mark.timeout(300)
def test_a_flood_of_ten_times_the_capacity_is_refused_clearly_and_leaves_a_server_as_quick_as_before(
    tiny, server, capsys
):
    pids = server_pids(tiny[0])
    expected, usual_s = generate(server, 30), _median_s(server)
    before = _resident_mib(pids)
    flood = Flood(server, num_clients=10 * (MAX_BATCH + MAX_QUEUE))
    most_waiting = flood.run(FLOOD_S)
    served = [text_output for status, text_output, _ in flood.answers if status == 200]
    refusals = {error for status, _, error in flood.answers if status != 200}
    assert set(served) == {expected}
    assert refusals
    for error in refusals:
        assert f"Maximum queue size of {MAX_QUEUE} has been reached" in error or "Exceeds maximum queue size" in error
    assert most_waiting <= MAX_QUEUE
    wait_until(lambda: active_requests(server) == 0)
    wait_until(lambda: health(server)[0] == 200)
    later_s, grown = _median_s(server), _grown_mib(pids, before)
    if FULL:
        with capsys.disabled():
            print(f"\n{FLOOD_S} s of flood: {len(served)} served, {len(flood.answers) - len(served)} refused, at most")
            print(f"{most_waiting:.0f} waiting; {1e3 * usual_s:.0f} ms before, {1e3 * later_s:.0f} ms after")
            print(f"resident MiB before: {before}, grown by: {grown}")
    assert sum(grown.values()) < 64
    assert later_s < 2 * usual_s + 0.1


def _resident_mib(pids):
    return {name: resident_bytes(pid) >> 20 for name, pid in pids.items()}


def _grown_mib(pids, before):
    return {name: (resident_bytes(pid) >> 20) - before[name] for name, pid in pids.items()}


def _median_s(server):
    times = []
    for _ in range(9):
        started = time.monotonic()
        generate(server, 30)
        times.append(time.monotonic() - started)
    return statistics.median(times)


@pytest.mark.skipif(not FULL, reason="takes minutes: FAULTS=full")
@pytest.mark.timeout(1200)
def test_a_soak_of_ten_thousand_requests_leaves_memory_and_shared_memory_flat(tiny, server, capsys):
    launched, _ = tiny
    pids = server_pids(launched)
    _soak(server, 1000)  # until here caches and pools may grow
    before, shm_before = {name: resident_bytes(pid) for name, pid in pids.items()}, _shm_bytes(launched)
    seconds = _soak(server, 10_000)
    grown = {name: (resident_bytes(pid) - before[name]) / 2**20 for name, pid in pids.items()}
    with capsys.disabled():
        print(f"\n10,000 requests in {seconds:.0f} s; /dev/shm {shm_before >> 20} MiB, grown by", end=" ")
        print(f"{_shm_bytes(launched) - shm_before} bytes; resident MiB before:", end=" ")
        print(
            {name: size >> 20 for name, size in before.items()}, "grown by:", {k: round(v, 1) for k, v in grown.items()}
        )
    assert _shm_bytes(launched) == shm_before
    assert max(grown.values()) < 16


def _soak(server, num_requests, num_clients=8):
    """Short requests of every kind: unary, streams that end, streams that are left, refused ones. Seconds."""
    started = time.monotonic()
    numbers = iter(range(num_requests))
    lock = threading.Lock()
    failures = []

    def client():
        stream = Stream(server)
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                stream.close()
                return
            if number % 10 == 9:
                ok = bool(ask_on(stream, text_inputs("Refused", 4, temperature=[[-1.0]]))[-1].error)
            elif number % 10 == 8:
                ok = post(server, "ensemble_unary/generate", {"text_input": f"No {number}", "max_tokens": 4})[0] == 200
            elif number % 50 == 7:
                leave_early(server)
                ok = True
            else:
                replies = ask_on(stream, text_inputs(f"Number {number}", 4, stream=TRUE, end_id=[[-1]]))
                ok = replies[-1]["finish_reason"].reshape(-1).tolist() == [b"length"]
            if not ok:
                failures.append(number)

    threads = [threading.Thread(target=client) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    return time.monotonic() - started


def ask_on(stream, inputs):
    stream.send("ensemble", inputs)
    return stream.rest()


def _threads(pid):
    return [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]


def _shm_bytes(launched):
    return sum(path.stat().st_size for path in Path("/dev/shm").glob(f"triton-llm-*.{launched.launcher_pid}-*"))
