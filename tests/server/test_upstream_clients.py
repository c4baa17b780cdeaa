"""What upstream's streaming clients send, tensor by tensor, and what they take for granted in the answers.

The models behind the shared server are decoupled; test_upstream_unary.py has the programs that need them not to be.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.server import wire
from tests.server.launched import ServerAddresses

PROMPT = "My name is"
PERF_METRICS = (
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
    "kv_cache_alloc_new_blocks",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
    "acceptance_rate",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
)


def end_to_end(server: ServerAddresses, prompt: str, streaming: bool = False, **flags: Any) -> list[wire.Reply]:
    """end_to_end_grpc_client.py: these five inputs always, the rest by flag; only the printed outputs are asked for."""
    outputs = ["text_output"]
    if "return_log_probs" in flags:
        outputs += ["cum_log_probs", "output_log_probs"]
    if "return_perf_metrics" in flags:
        outputs += PERF_METRICS
    inputs = wire.text_inputs(prompt, 50, stream=np.array([[streaming]]), beam_width=[[1]], temperature=[[1.0]])
    inputs = [tensor for tensor in inputs if tensor.name() not in flags]
    inputs += [wire.tensor(name, value) for name, value in flags.items()]
    return wire.ask(server, "ensemble", inputs, request_id="1", outputs=tuple(outputs))


def test_end_to_end_client_streams_the_text_that_it_gets_at_once(server: ServerAddresses) -> None:
    whole = end_to_end(server, PROMPT)
    streamed = end_to_end(server, PROMPT, streaming=True)
    assert len(whole) == 1
    assert len(streamed) >= 25
    assert {reply.error for reply in streamed} == {""}
    assert wire.text(streamed) == wire.text(whole)
    assert not wire.text(whole).startswith(PROMPT), "the prompt is left out unless asked for"


def test_end_to_end_client_checks_its_expected_output(server: ServerAddresses) -> None:
    asked = {"max_tokens": [[5]], "exclude_input_in_output": np.array([[False]])}
    (reply,) = end_to_end(server, "1, 2, 3, 4,", **asked)
    assert reply["text_output"][0].decode() == "1, 2, 3, 4, 5, 6"


def test_end_to_end_client_with_stop_and_bad_words(server: ServerAddresses) -> None:
    (stopped,) = end_to_end(server, "1, 2, 3, 4,", stop_words=[["9", "END"]])
    assert stopped["text_output"][0].decode() == " 5, 6, 7, 8, 9"
    (plain,) = end_to_end(server, "The capital of France is", max_tokens=[[8]])
    (other,) = end_to_end(server, "The capital of France is", max_tokens=[[8]], bad_words=[["Paris", ""]])
    assert "Paris" in plain["text_output"][0].decode()
    assert "Paris" not in other["text_output"][0].decode()


def test_end_to_end_client_with_log_probs(server: ServerAddresses) -> None:
    (reply,) = end_to_end(server, PROMPT, max_tokens=[[5]], return_log_probs=np.array([[True]]))
    assert reply["cum_log_probs"].shape == (1, 1)
    assert reply["output_log_probs"].shape == (1, 1, 5)
    assert reply["cum_log_probs"].item() == pytest.approx(reply["output_log_probs"].sum(), rel=1e-4)


def test_end_to_end_client_prints_perf_metrics(server: ServerAddresses) -> None:
    prompt = " ".join(str(number * 7919 % 10007) for number in range(30))  # fresh: nothing of it is cached
    first, again = (end_to_end(server, prompt, return_perf_metrics=np.array([[True]]))[-1] for _ in range(2))
    for reply in (first, again):
        assert all(reply[name].size == 1 for name in PERF_METRICS)
        times = [reply[name].item() for name in PERF_METRICS[3:7]]
        assert times == sorted(times)
        assert times[0] > 0
        assert reply["acceptance_rate"].item() == 0.0
    assert first["kv_cache_reused_blocks"].item() == 0
    assert again["kv_cache_reused_blocks"].item() > 0
    assert again["kv_cache_alloc_new_blocks"].item() < first["kv_cache_alloc_new_blocks"].item()


def test_end_to_end_client_with_batch_inputs(server: ServerAddresses) -> None:
    prompts = ["1, 2, 3, 4,", "The capital of France is"]
    inputs = [
        wire.tensor("text_input", [[prompt] for prompt in prompts]),
        wire.tensor("max_tokens", [[8]] * 2),
        wire.tensor("stream", np.array([[False]] * 2)),
        wire.tensor("beam_width", [[1]] * 2),
        wire.tensor("temperature", [[1.0]] * 2),
    ]
    replies = wire.ask(server, "ensemble", inputs, request_id="1", outputs=("text_output", "batch_index"))
    texts = {reply["batch_index"].item(): reply["text_output"][0].decode() for reply in replies if reply.outputs}
    assert texts[0].startswith(" 5, 6")
    assert "Paris" in texts[1]


def inflight(ids: list[int], output_len: int, streaming: bool = True, **flags: Any) -> list[grpcclient.InferInput]:
    """inflight_batcher_llm_client.py: the inputs it always sends, and the rest by flag."""
    always = {
        "beam_width": [[1]],
        "temperature": [[1.0]],
        "streaming": np.array([[streaming]]),
        "end_id": [[-1]],
        "pad_id": [[0]],
        "runtime_top_k": [[1]],
        "runtime_top_p": [[0.0]],
    }
    return wire.engine_inputs(ids, output_len, **{**always, **flags})


IDS = [28, 111, 2000, 300, 40, 5, 6000, 700, 80, 9]


def test_inflight_batcher_client_streams_as_many_tokens_as_it_asked_for(server: ServerAddresses) -> None:
    """-S -c: the tokens equal those of the run before; all outputs are asked for and may be absent."""
    options = {"request_id": "1", "parameters": {"Streaming": True}}
    streamed = wire.ask(server, "tensorrt_llm", inflight(IDS, 16), **options)
    assert wire.tokens(streamed) == wire.tokens(wire.ask(server, "tensorrt_llm", inflight(IDS, 16), **options))
    assert len(wire.tokens(streamed)) == 16
    assert streamed[0]["sequence_length"].shape == (1, 1)


def test_inflight_batcher_client_with_beams_and_several_sequences(server: ServerAddresses) -> None:
    (beams,) = wire.ask(server, "tensorrt_llm", inflight(IDS, 6, streaming=False, beam_width=[[2]]))
    assert beams["output_ids"].shape[:2] == (1, 2)
    assert beams["sequence_length"].tolist() == [[6, 6]]
    several = inflight(IDS, 6, streaming=False, num_return_sequences=[[2]], runtime_top_k=[[20]])
    samples = [reply for reply in wire.ask(server, "tensorrt_llm", several) if reply.outputs]
    assert {reply["sequence_index"].item() for reply in samples} == {0, 1}


def test_inflight_batcher_client_with_logits(server: ServerAddresses) -> None:
    flags = {"return_context_logits": np.array([[True]]), "return_generation_logits": np.array([[True]])}
    (reply,) = wire.ask(server, "tensorrt_llm", inflight(IDS, 4, streaming=False, **flags))
    vocabulary = reply["context_logits"].shape[-1]
    assert reply["context_logits"].shape == (1, len(IDS), vocabulary)
    assert reply["generation_logits"].shape == (1, 1, 4, vocabulary)
    assert reply["generation_logits"][0, 0].argmax(-1).tolist() == reply["output_ids"][0, 0].tolist()


def test_inflight_batcher_clients_lookahead_is_refused_by_name(server: ServerAddresses) -> None:
    names = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
    (reply,) = wire.ask(server, "tensorrt_llm", inflight(IDS, 4, **{name: [[7]] for name in names}))
    assert "lookahead" in reply.error


def test_inflight_batcher_client_stops_a_request_by_its_id(server: ServerAddresses) -> None:
    """--stop-after-ms 200 --request-id 1: the same inputs again with stop; fewer tokens come than asked for."""
    stream = wire.Stream(server)
    stream.send("tensorrt_llm", inflight(IDS, 2000), request_id="1", parameters={"Streaming": True})
    time.sleep(0.2)
    stop = [wire.tensor(name, [[0]]) for name in ("input_ids", "input_lengths", "request_output_len")]
    stream.send("tensorrt_llm", [*stop, wire.tensor("stop", np.array([[True]]))], request_id="1")
    stream.close()  # returns when both requests have had their last response
    replies = stream.rest()
    assert 0 < sum(reply.outputs["output_ids"].size for reply in replies if "output_ids" in reply.outputs) < 2000
    assert not any(reply.error for reply in replies)


def test_inflight_batcher_client_stops_by_request_cancel(server: ServerAddresses) -> None:
    """--stop-via-request-cancel: the stream is closed; the client tolerates a CANCELLED status."""
    before = wire.cancelled(server)
    stream = wire.Stream(server)
    stream.send("tensorrt_llm", inflight(IDS, 2000), request_id="1")
    assert stream.next()["output_ids"].size
    stream.close(cancel=True)
    wire.wait_until(lambda: wire.cancelled(server) == before + 1, timeout_s=5)


def test_benchmark_core_model_floods_a_decoupled_model(server: ServerAddresses) -> None:
    """--decoupled token-norm-dist: random ids, as many requests as there are, a latency from each."""
    random = np.random.default_rng(0)
    latencies: list[float] = []
    done = threading.Semaphore(0)

    def callback(begun: float, result: Any, error: Any) -> None:
        assert error is None
        if result.get_response().parameters["triton_final_response"].bool_param:
            latencies.append(time.monotonic() - begun)
            done.release()

    clients = []
    for number in range(20):
        ids = random.integers(0, 40000, 20).tolist()
        inputs = wire.engine_inputs(ids, 5, pad_id=[[0]], end_id=[[0]], streaming=np.array([[True]]))
        client = grpcclient.InferenceServerClient(server.grpc)
        begun = time.monotonic()
        client.start_stream(lambda result, error, begun=begun: callback(begun, result, error))
        client.async_stream_infer("tensorrt_llm", inputs, request_id=str(number))
        clients.append(client)
    assert all(done.acquire(timeout=60) for _ in clients)
    for client in clients:
        client.stop_stream()
    assert len(latencies) == 20


def test_litellm_asks_generate_with_nested_parameters(server: ServerAddresses) -> None:
    parameters = {"max_tokens": 12}
    body = {"text_input": "The capital of France is", "parameters": parameters, "stream": False}
    status, answer = wire.post(server, "ensemble/generate", body)
    assert status == 200
    assert "Paris" in answer["text_output"]
    events = list(wire.events(server, "ensemble", {**body, "stream": True}))
    assert "".join(event["text_output"] for event in events) == answer["text_output"]


def test_openai_frontend_always_asks_for_token_counts(server: ServerAddresses) -> None:
    """Its usage: prompt tokens of the first response, completion tokens summed over all responses."""
    inputs = wire.text_inputs(
        PROMPT,
        16,
        stream=np.array([[True]]),
        top_p=[[0.9]],
        temperature=[[0.7]],
        frequency_penalty=[[0.1]],
        presence_penalty=[[0.1]],
        seed=np.array([[42]], np.uint64),
        stop_words=[["\n\n\n"]],
        return_num_input_tokens=np.array([[True]]),
        return_num_output_tokens=np.array([[True]]),
        end_id=[[-1]],
    )
    replies = [reply for reply in wire.ask(server, "ensemble", inputs) if reply.outputs]
    assert all(reply["text_output"].size == 1 for reply in replies)
    assert replies[0]["num_input_tokens"].item() == 3
    assert sum(reply["num_output_tokens"].item() for reply in replies) == 16


CURL: list[dict[str, Any]] = [
    {"text_input": "What is machine learning?", "max_tokens": 20, "bad_words": "", "stop_words": ""},
    {"text_input": "What is ML?", "max_tokens": 20, "bad_words": "", "stop_words": "", "pad_id": 2, "end_id": 2},
    {"text_input": "What is ML?", "max_tokens": 20, "temperature": 1, "top_p": 0, "return_log_probs": True},
]


@pytest.mark.parametrize("body", CURL)
def test_curl_examples_are_answered(server: ServerAddresses, body: dict[str, Any]) -> None:
    status, answer = wire.post(server, "ensemble/generate", body)
    assert status == 200
    assert answer["model_name"] == "ensemble"
    assert answer["text_output"].strip()


def test_curl_generate_stream_example_is_answered(server: ServerAddresses) -> None:
    events = list(wire.events(server, "ensemble", {"text_input": "What is ML?", "max_tokens": 20, "stream": True}))
    assert len(events) >= 10
    assert "".join(event["text_output"] for event in events).strip()
