"""Whoever stops, cancels or hangs up frees the slot and the blocks at once, and nobody else notices."""

from __future__ import annotations

import json
import queue
import socket
import time
from typing import Any

import pytest
import tritonclient.grpc as grpcclient

from tests.server.wire import (
    Stream,
    active_requests,
    ask,
    ask_one,
    cancelled,
    engine_inputs,
    post,
    text_inputs,
    tokens,
    used_blocks,
    wait_until,
)

TRUE = [[True]]
LONG = 3000  # tokens; far more than any test waits for
# Finding out and ending the step under way takes 100 ms; ten times that on a machine that does other things besides,
# which is still far less than the answer would take.
SOON_S = 1.0


def start(server, stream, request_id="", **tensors):
    """A long streamed request of which the first tokens have come."""
    stream.send("tensorrt_llm", engine_inputs([504, 3575], LONG, streaming=TRUE, **tensors), request_id=request_id)
    for _ in range(3):
        assert not stream.next().error


def stop(server, request_id, **options):
    return ask_one(server, "tensorrt_llm", engine_inputs([0], 0, stop=TRUE), request_id=request_id, **options)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(server):
    yield
    wait_until(lambda: used_blocks(server) == 0)
    assert active_requests(server) == 0


def test_a_stop_request_ends_a_stream_and_is_answered_empty(server):
    stream = Stream(server)
    start(server, stream, request_id="to-stop")
    started = time.monotonic()
    answer = stop(server, "to-stop")
    last = stream.rest()[-1]
    assert time.monotonic() - started < SOON_S
    assert answer.outputs == {}
    assert answer.final
    assert last.final
    assert last["finish_reason"].tolist() == [[b"cancelled"]]
    stream.close()


def test_a_stop_of_an_unknown_id_is_answered_empty_as_well(server):
    answer = stop(server, "nobody")
    assert answer.outputs == {}
    assert not answer.error


def test_a_stop_over_http_names_nothing_but_the_model(server):
    body = {"id": "nobody", "input_ids": [0], "input_lengths": 0, "request_output_len": 0, "stop": True}
    status, answer = post(server, "tensorrt_llm/generate", body)
    assert status == 200
    assert set(answer) - {"id"} == {"model_name", "model_version"}


def test_a_stop_without_an_id_is_an_error(server):
    assert "Trying to stop a request but request ID is not provided" in stop(server, "").error


def test_a_stop_reaches_a_request_that_came_through_the_ensemble(server):
    stream = Stream(server)
    stream.send("ensemble", text_inputs("Once upon a time", LONG, stream=TRUE, end_id=[[-1]]), request_id="through")
    stream.next()
    stop(server, "through")
    last = stream.rest()[-1]
    assert last["finish_reason"].reshape(-1).tolist() == [b"cancelled"]
    stream.close()


def test_a_stop_ends_all_requests_with_its_id_and_no_other(server):
    streams = [Stream(server) for _ in range(3)]
    for stream, request_id in zip(streams, ("same", "same", "other"), strict=True):
        start(server, stream, request_id=request_id)
    stop(server, "same")
    for stream in streams[:2]:
        assert stream.rest()[-1]["finish_reason"].tolist() == [[b"cancelled"]]
    assert "finish_reason" not in streams[2].next().outputs
    stop(server, "other")
    assert streams[2].rest()[-1].final
    for stream in streams:
        stream.close()


def test_a_cancelled_grpc_stream_frees_its_place_within_100_ms(server):
    before = cancelled(server)
    stream = Stream(server)
    start(server, stream)
    stream.close(cancel=True)
    assert wait_until(lambda: cancelled(server) > before) < SOON_S


def test_an_http_client_that_hangs_up_frees_its_place_within_100_ms(server):
    before = cancelled(server)
    hang_up(server, {"input_ids": [504, 3575], "input_lengths": 2, "request_output_len": LONG, "streaming": True})
    assert wait_until(lambda: cancelled(server) > before) < SOON_S


def hang_up(server, body, after_events=2):
    host, port = server.http.split(":")
    data = json.dumps(body).encode()
    with socket.create_connection((host, int(port))) as connection:
        head = (
            f"POST /v2/models/tensorrt_llm/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        connection.sendall(head.encode() + data)
        received = b""
        while received.count(b"data:") < after_events:
            received += connection.recv(65536)


def test_many_clients_that_hang_up_at_once_leave_a_server_that_works(server):
    before = cancelled(server)
    streams = [Stream(server) for _ in range(20)]
    for stream in streams:
        stream.send("tensorrt_llm", engine_inputs([504], LONG, streaming=TRUE, return_log_probs=TRUE))
    for stream in streams:
        stream.next()
    for stream in streams:
        stream.close(cancel=True)
    wait_until(lambda: cancelled(server) - before == len(streams), timeout_s=20)
    assert len(tokens(ask(server, "tensorrt_llm", engine_inputs([504], 5, streaming=TRUE)))) == 5


def test_a_cancelled_plain_call_frees_its_place(server):
    before = cancelled(server)
    client = grpcclient.InferenceServerClient(server.grpc)
    call = client.async_infer("ensemble_unary", text_inputs("A story", LONG, end_id=[[-1]]), lambda *_: None)
    wait_until(lambda: active_requests(server) == 1)
    call.cancel()
    wait_until(lambda: cancelled(server) > before, timeout_s=2)


def test_plain_calls_fill_the_batch_and_end_when_all_their_clients_are_gone(server):
    """More of them than Triton's Python backend has threads for by default, and all of those taken."""
    before = cancelled(server)
    client = grpcclient.InferenceServerClient(server.grpc)
    inputs = text_inputs("A story", LONG, end_id=[[-1]])
    calls = [client.async_infer("ensemble_unary", inputs, lambda *_: None) for _ in range(40)]
    wait_until(lambda: active_requests(server) == 40)
    for call in calls:
        call.cancel()
    wait_until(lambda: cancelled(server) == before + 40)


def test_a_plain_call_can_be_stopped_by_its_id_and_returns_what_it_has(server):
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client = grpcclient.InferenceServerClient(server.grpc)
    inputs = text_inputs("A story", LONG, end_id=[[-1]])
    client.async_infer("ensemble_unary", inputs, lambda result, error: answers.put((result, error)), request_id="plain")
    wait_until(lambda: active_requests(server) == 1)
    stop(server, "plain")
    result, error = answers.get(timeout=5)
    assert error is None
    assert result.as_numpy("finish_reason").reshape(-1).tolist() == [b"cancelled"]


def test_a_timeout_ends_a_request_on_time_with_what_it_has(server):
    started = time.monotonic()
    replies = ask(server, "tensorrt_llm", engine_inputs([504], LONG, streaming=TRUE, timeout_ms=[[400]]))
    assert 0.3 < time.monotonic() - started < 0.4 + SOON_S
    assert replies[-1]["finish_reason"].tolist() == [[b"timeout"]]
    assert len(tokens(replies)) > 1


def test_tritons_own_timeout_counts_as_well(server):
    replies = ask(server, "tensorrt_llm", engine_inputs([504], LONG, streaming=TRUE), timeout=300_000)
    assert replies[-1]["finish_reason"].tolist() == [[b"timeout"]]
