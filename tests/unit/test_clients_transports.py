"""All four clients against one scripted server: they agree, and they notice every way an answer can break."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

import clients
from tests.unit.client_fakes import FakeServer, Step, send
from tests.unit.client_runs import EVERY_CLIENT, generate, make_client, stream


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


@EVERY_CLIENT
def test_a_stream_gives_its_chunks_and_their_sum(kind: str, server: FakeServer) -> None:
    server.scripts["hi"] = [send("Grüße "), send("🦙, "), send("世界", "stop")]
    chunks, result = stream(kind, server, "hi", max_tokens=7)
    assert [chunk.text for chunk in chunks] == ["Grüße ", "🦙, ", "世界"]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, "stop"]
    assert (result.text, result.finish_reason) == ("Grüße 🦙, 世界", "stop")
    assert server.seen[0].request_id == result.request_id
    assert server.stops == []


@EVERY_CLIENT
def test_generate_sends_stream_false_and_counts_tokens(kind: str, server: FakeServer) -> None:
    counts = {"num_input_tokens": np.array([[3]], np.int32), "num_output_tokens": np.array([[2]], np.int32)}
    server.scripts["hi"] = [send("ho", "length", **counts)]
    result = generate(kind, server, "hi")
    assert (result.text, result.finish_reason, result.usage) == ("ho", "length", clients.Usage(3, 2))
    assert not np.any(server.seen[0].tensors["stream"])


@EVERY_CLIENT
def test_messages_travel_as_json(kind: str, server: FakeServer) -> None:
    text = '[{"role": "user", "content": "¿qué?"}]'
    server.scripts[text] = [send("sí", "stop")]
    assert generate(kind, server, [{"role": "user", "content": "¿qué?"}]).text == "sí"


@EVERY_CLIENT
def test_a_final_response_without_tensors_ends_the_stream(kind: str, server: FakeServer) -> None:
    server.outputs.remove("finish_reason")  # a server with upstream's own templates
    server.scripts["hi"] = [send("a"), send("b"), Step("send", {}, final=True)]
    _, result = stream(kind, server, "hi")
    assert (result.text, result.finish_reason) == ("ab", None)


@EVERY_CLIENT
def test_an_answer_whose_last_response_is_missing_is_broken(kind: str, server: FakeServer) -> None:
    server.scripts["hi"] = [send("a"), send("b")]
    with pytest.raises(clients.StreamBroken, match="last response never came") as caught:
        stream(kind, server, "hi")
    assert caught.value.text == "ab"


@EVERY_CLIENT
def test_a_connection_cut_in_the_middle_is_broken(kind: str, server: FakeServer) -> None:
    server.scripts["hi"] = [send("a"), Step("cut")]
    with pytest.raises(clients.StreamBroken) as caught:
        stream(kind, server, "hi")
    assert caught.value.text == "a"


@EVERY_CLIENT
def test_rubbish_in_the_stream_is_broken_and_the_request_is_stopped(kind: str, server: FakeServer) -> None:
    server.scripts["hi"] = [send("a"), Step("garbage"), Step("wait_for_stop")]
    with pytest.raises(clients.StreamBroken) as caught:
        stream(kind, server, "hi")
    assert caught.value.text == "a"
    assert server.stops == [server.seen[0].request_id]


@EVERY_CLIENT
def test_a_refusal_keeps_the_servers_words(kind: str, server: FakeServer) -> None:
    words = "in ensemble 'ensemble', temperature is -1; allowed: >= 0."
    server.scripts["hi"] = [Step("error", message=words, code=grpc.StatusCode.INVALID_ARGUMENT)]
    for ask in (stream, generate):
        with pytest.raises(clients.RequestRefused) as caught:
            ask(kind, server, "hi")
        assert str(caught.value) == words


@EVERY_CLIENT
def test_a_full_queue_is_its_own_error(kind: str, server: FakeServer) -> None:
    words = "Maximum queue size of 4 has been reached, please try again later"
    server.scripts["hi"] = [Step("error", message=words, code=grpc.StatusCode.UNAVAILABLE, http_status=503)]
    with pytest.raises(clients.QueueFull, match="queue size of 4"):
        generate(kind, server, "hi")


@EVERY_CLIENT
def test_an_error_after_text_is_a_failure_and_keeps_the_text(kind: str, server: FakeServer) -> None:
    server.scripts["hi"] = [send("half"), Step("error", message="the engine fell over")]
    with pytest.raises(clients.ServerFailure, match="fell over") as caught:
        stream(kind, server, "hi")
    assert caught.value.text == "half"


@EVERY_CLIENT
def test_leaving_a_stream_stops_the_request_on_the_server(kind: str, server: FakeServer) -> None:
    server.scripts["hi"] = [send("a"), Step("wait_for_stop"), send("b", "cancelled")]
    chunks, result = stream(kind, server, "hi", leave_after=1, request_id="mine")
    assert [chunk.text for chunk in chunks] == ["a"]
    assert result.text == "a"
    assert server.stops == ["mine"]


@EVERY_CLIENT
def test_somebody_elses_stop_request_raises_cancelled(kind: str, server: FakeServer) -> None:
    server.scripts["hi"] = [send("a"), send("b", "cancelled")]
    with pytest.raises(clients.Cancelled) as caught:
        stream(kind, server, "hi")
    assert caught.value.text == "ab"


@EVERY_CLIENT
def test_a_timeout_is_told_to_the_server_whose_partial_answer_comes_with_the_error(
    kind: str, server: FakeServer
) -> None:
    server.scripts["hi"] = [send("a"), send("b", "timeout")]
    with pytest.raises(clients.DeadlineExceeded, match=r"within 2\.5 s") as caught:
        stream(kind, server, "hi", timeout=2.5)
    assert caught.value.text == "ab"
    assert int(np.ravel(server.seen[0].tensors["timeout_ms"])[0]) == 2500


@EVERY_CLIENT
def test_a_server_that_keeps_no_time_is_given_up_and_stopped(kind: str, server: FakeServer) -> None:
    server.inputs.remove("timeout_ms")
    server.scripts["hi"] = [send("a"), Step("wait_for_stop"), send("b", "cancelled")]
    begun = time.monotonic()
    with pytest.raises(clients.DeadlineExceeded) as caught:
        stream(kind, server, "hi", timeout=0.3)
    assert 0.3 <= time.monotonic() - begun < 2
    assert caught.value.text == "a"
    assert "timeout_ms" not in server.seen[0].tensors
    assert server.stops == [server.seen[0].request_id]


@EVERY_CLIENT
def test_several_samples_are_kept_apart(kind: str, server: FakeServer) -> None:
    def sample(index: int) -> dict[str, Any]:
        return {"sequence_index": np.array([[index]], np.int32)}

    server.scripts["hi"] = [
        send("a", **sample(0)),
        send("x", **sample(1)),
        send("y", "length", **sample(1)),
        send("b", "stop", **sample(0)),
    ]
    server.scripts["hi"][2].final = False
    _, result = stream(kind, server, "hi", num_return_sequences=2)
    assert [(s.text, s.finish_reason) for s in result.sequences] == [("ab", "stop"), ("xy", "length")]


@EVERY_CLIENT
def test_beams_come_whole_in_every_response(kind: str, server: FakeServer) -> None:
    server.scripts["hi"] = [
        Step("send", {"text_output": ["a", "b"]}),
        Step("send", {"text_output": ["ac", "bd"], "finish_reason": ["length", "stop"]}, final=True),
    ]
    _, result = stream(kind, server, "hi", beam_width=2)
    assert [(s.text, s.finish_reason) for s in result.sequences] == [("ac", "length"), ("bd", "stop")]


@EVERY_CLIENT
def test_beams_may_become_fewer(kind: str, server: FakeServer) -> None:
    server.scripts["hi"] = [
        Step("send", {"text_output": ["a", "b", "c"]}),
        Step("send", {"text_output": ["ad"], "finish_reason": ["stop"]}, final=True),
    ]
    _, result = stream(kind, server, "hi", beam_width=3)
    assert [(s.text, s.finish_reason) for s in result.sequences] == [("ad", "stop")]


@EVERY_CLIENT
def test_log_probs_are_typed(kind: str, server: FakeServer) -> None:
    entry = {
        "token": " a",
        "logprob": -0.5,
        "bytes": [32, 97],
        "id": 5,
        "text_offset": 3,
        "masked_probability": 0.25,
        "top_logprobs": [{"token": " b", "logprob": -1.5, "bytes": [32, 98], "id": 6}],
    }
    first = {"token": "<s>", "logprob": None, "bytes": None, "top_logprobs": []}
    server.scripts["hi"] = [
        send(
            " a",
            logprobs=[json.dumps([entry])],
            logprobs_distribution=["raw"],
            prompt_logprobs=[json.dumps([first, entry])],
        ),
        send(" a", "stop", logprobs=[json.dumps([entry])]),
    ]
    _, result = stream(kind, server, "hi", top_logprobs=1, top_prompt_logprobs=1)
    other = clients.LogProb(" b", -1.5, (32, 98), id=6)
    expected = clients.LogProb(" a", -0.5, (32, 97), (other,), 5, 3, 0.25)
    assert result.logprobs == (expected, expected)
    assert result.prompt_logprobs == (clients.LogProb("<s>", None), expected)
    assert result.logprobs_distribution == "raw"
    assert "prompt_logprobs" not in result.outputs


@EVERY_CLIENT
def test_warnings_are_collected_once_each(kind: str, server: FakeServer) -> None:
    server.scripts["hi"] = [send("a", warnings=["clipped"]), send("b", "stop", warnings=["clipped", "weakened"])]
    assert stream(kind, server, "hi")[1].warnings == ("clipped", "weakened")


@EVERY_CLIENT
def test_an_unknown_model_is_refused_by_name(kind: str, server: FakeServer) -> None:
    with pytest.raises(clients.RequestRefused, match="unknown model: 'nope'"):
        generate(kind, server, "hi", model="nope")


@EVERY_CLIENT
def test_no_server_says_what_to_do(kind: str) -> None:
    with FakeServer() as gone:
        pass
    with pytest.raises(clients.ServerUnavailable, match="make serve"):
        generate(kind, gone, "hi")


def test_only_wanted_outputs_are_asked_for(server: FakeServer) -> None:
    server.scripts["hi"] = [send("a", "stop")]
    stream("grpc", server, "hi")
    stream("grpc", server, "hi", top_logprobs=0, return_log_probs=True)
    basic = ["text_output", "finish_reason", "warnings"]
    assert server.seen[0].outputs == basic
    assert server.seen[1].outputs == [*basic, "logprobs", "logprobs_distribution", "cum_log_probs", "output_log_probs"]
    assert server.seen[0].parameters["triton_enable_empty_final_response"] is True


def test_an_array_over_http_is_refused_before_it_is_sent(server: FakeServer) -> None:
    with pytest.raises(clients.RequestRefused, match="use gRPC"):
        generate("http", server, "hi", lora_weights=np.zeros((2, 3), np.float16))
    server.scripts["hi"] = [send("a", "stop")]
    generate("grpc", server, "hi", lora_weights=np.zeros((2, 3), np.float16))
    assert server.seen[0].tensors["lora_weights"].shape == (1, 2, 3)


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_a_dropped_iterator_stops_the_request(kind: str, server: FakeServer) -> None:
    server.scripts["hi"] = [send("a"), Step("wait_for_stop"), send("b", "cancelled")]
    with make_client(kind, server) as client:
        for _ in client.stream("hi", request_id="dropped"):
            break
        assert server.stop_event("dropped").wait(5)


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_another_thread_may_cancel(kind: str, server: FakeServer) -> None:
    server.scripts["hi"] = [send("a"), Step("wait_for_stop"), send("b", "cancelled")]
    with make_client(kind, server) as client, client.stream("hi", request_id="mine") as answer:
        threading.Timer(0.1, answer.cancel).start()
        assert "".join(chunk.text for chunk in answer) == "a"
        assert server.stop_event("mine").wait(5)


@pytest.mark.parametrize("kind", ["grpc_aio", "http_aio"])
def test_cancelling_the_task_stops_the_request(kind: str, server: FakeServer) -> None:
    server.scripts["hi"] = [Step("wait_for_stop"), send("b", "cancelled")]

    async def run() -> None:
        async with make_client(kind, server) as client:
            task = asyncio.create_task(client.generate("hi", request_id="mine", num_return_sequences=1))
            while not server.seen:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())
    assert server.stops == ["mine"]


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_many_threads_share_a_client(kind: str, server: FakeServer) -> None:
    for number in range(8):
        server.scripts[f"p{number}"] = [send(f"{number}"), send("!", "stop")]
    texts: dict[int, str] = {}
    with make_client(kind, server) as client:

        def ask(number: int) -> None:
            with client.stream(f"p{number}") as answer:
                texts[number] = "".join(chunk.text for chunk in answer)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert texts == {number: f"{number}!" for number in range(8)}


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_waiting_for_a_server_that_never_comes_ends(kind: str) -> None:
    with FakeServer() as gone:
        pass
    with make_client(kind, gone) as client, pytest.raises(clients.ServerUnavailable, match="not ready after"):
        client.wait_until_ready(0.2)


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_readiness_is_the_models(kind: str, server: FakeServer) -> None:
    with make_client(kind, server) as client:
        assert client.ready()
