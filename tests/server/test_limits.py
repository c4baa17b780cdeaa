"""Requests that are too large, malformed or hostile get their own error, with the numbers, and harm nobody else."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.server.wire import (
    Stream,
    ask,
    ask_one,
    cancelled,
    engine_inputs,
    metric,
    post,
    tensor,
    text_inputs,
    tokens,
    used_blocks,
    wait_until,
)

TRUE = [[True]]
PROMPT = [504, 3575, 282, 4649, 314]
MAX_INPUT = 4095
VOCABULARY = 49152
MAX_QUEUE = 256
MAX_BATCH = 32


def one(name, value, prompt=PROMPT, output_len=5):
    return engine_inputs(prompt, output_len, **{name: value})


REFUSED = {
    "a prompt over the limit": (
        engine_inputs([5] * (MAX_INPUT + 1), 5),
        f"Prompt length ({MAX_INPUT + 1}) exceeds maximum input length ({MAX_INPUT})",
    ),
    "no output": (engine_inputs(PROMPT, 0), "request_output_len is 0; allowed: >= 1"),
    "a negative output": (engine_inputs(PROMPT, -5), "request_output_len is -5; allowed: >= 1"),
    "a negative length": (one("input_lengths", [[-1]]), "input_lengths is -1; allowed: 1 to 5"),
    "a length over the prompt": (one("input_lengths", [[2**31 - 1]]), "input_lengths is 2147483647; allowed: 1 to 5"),
    "a token over the vocabulary": (
        engine_inputs([VOCABULARY], 5),
        f"A token of input_ids is {VOCABULARY}; allowed: 0 to {VOCABULARY - 1}",
    ),
    "a negative token": (engine_inputs([-1], 5), "A token of input_ids is -1"),
    "an end token over the vocabulary": (
        one("end_id", [[VOCABULARY]]),
        f"EndId ({VOCABULARY}) is not within acceptable range [-1, {VOCABULARY}).",
    ),
    "a temperature that is no number": (one("temperature", [[np.nan]]), "temperature is nan; allowed: >= 0"),
    "a negative temperature": (one("temperature", [[-0.5]]), "temperature is -0.5; allowed: >= 0"),
    "a top_p over 1": (one("runtime_top_p", [[1.5]]), "runtime_top_p is 1.5; allowed: <= 1"),
    "an endless penalty": (one("repetition_penalty", [[np.inf]]), "repetition_penalty is inf"),
    "too many beams": (one("beam_width", [[100]]), "beam_width is 100; allowed: 1 to max_beam_width (4)"),
    "too many samples": (
        one("num_return_sequences", [[10**9]]),
        f"num_return_sequences is 1000000000; allowed: 1 to max_batch_size ({MAX_BATCH})",
    ),
    "word offsets out of bounds": (
        one("bad_words_list", [[[5], [9]]]),
        "Sparse list must not have out-of-bound offsets: bad_words_list has 9, N is 1",
    ),
    "word offsets that fall": (
        one("stop_words_list", [[[5, 6], [2, 1]]]),
        "Sparse list must not have non-increasing offsets: stop_words_list",
    ),
    "a bias wider than the vocabulary": (
        one("embedding_bias", np.zeros((1, VOCABULARY + 1), np.float32)),
        f"embedding_bias has shape [{VOCABULARY + 1}]",
    ),
    "a bias that is no number": (
        one("embedding_bias", np.full((1, 4), np.nan, np.float32)),
        "embedding_bias is NaN or +inf",
    ),
    "stop text that is no text": (
        one("stop_words", np.array([[b"\xff\xfe"]], dtype=object)),
        "stop_words is not valid UTF-8: byte 0xff at offset 0",
    ),
    "an adapter that nobody sent": (one("lora_task_id", np.array([[1]], np.uint64)), "LoRA task 1 not found in cache"),
    "a kind of guide that does not exist": (
        one("guided_decoding_guide_type", [["yaml"]]),
        "guided_decoding_guide_type is 'yaml'; allowed: json, json_schema, regex",
    ),
    "draft tokens": (one("draft_input_ids", [[1, 2]]), "Input draft_input_ids is not supported"),
    "a shape Triton refuses": (one("temperature", [[0.5, 0.5]]), "unexpected shape for input 'temperature'"),
    "a missing length": (
        [tensor("input_ids", [PROMPT]), tensor("request_output_len", [[5]])],
        "input_lengths is not present in the request",
    ),
    "no prompt": (
        [tensor("input_lengths", [[1]]), tensor("request_output_len", [[5]])],
        "inputTokens or encoderInputFeatures tensor not provided",
    ),
    "an input of another model": (one("min_length", [[3]]), "unexpected inference input 'min_length'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_the_error_names_what_is_wrong_and_what_is_allowed(server, what):
    inputs, expected = REFUSED[what]
    reply = ask_one(server, "tensorrt_llm", inputs)
    assert expected in reply.error
    assert "Traceback" not in reply.error


def test_hostile_requests_do_not_disturb_a_stream_beside_them(server):
    # The second answer: from then on the prompt is in the prefix cache, so that equal steps give equal tokens.
    alone = [tokens(ask(server, "tensorrt_llm", engine_inputs(PROMPT, 40, streaming=TRUE))) for _ in range(2)][1]
    stream = Stream(server)
    stream.send("tensorrt_llm", engine_inputs(PROMPT, 40, streaming=TRUE))
    first = stream.next()
    hostile = Stream(server)
    for inputs, _ in REFUSED.values():
        hostile.send("tensorrt_llm", inputs)
    assert all(hostile.next().error for _ in REFUSED)
    assert tokens([first, *stream.rest()]) == alone
    hostile.close()
    stream.close()
    wait_until(lambda: used_blocks(server) == 0)


def test_a_full_queue_answers_at_once_and_loses_nobody_else(server):
    refused_before = metric(server, "llm_requests_refused_total", code="UNAVAILABLE")
    cancelled_before = cancelled(server)
    streams = [Stream(server) for _ in range(2)]
    # The first ones fill every slot before the queue is filled.
    for _ in range(MAX_BATCH):
        streams[0].send("tensorrt_llm", engine_inputs([504], 3000), outputs=("output_ids",))
    wait_until(lambda: state(server, "scheduled") == MAX_BATCH)
    for _ in range(MAX_QUEUE + 10):
        streams[1].send("tensorrt_llm", engine_inputs([504], 3000), outputs=("output_ids",))
    started = time.monotonic()
    errors = [streams[1].next(timeout_s=10).error for _ in range(10)]
    assert time.monotonic() - started < 5
    assert errors == [f"Maximum queue size of {MAX_QUEUE} has been reached, please try again later"] * 10
    assert metric(server, "llm_requests_refused_total", code="UNAVAILABLE") - refused_before == 10
    figures = {"active": MAX_BATCH + MAX_QUEUE, "scheduled": MAX_BATCH, "waiting": MAX_QUEUE}
    wait_until(lambda: {name: state(server, name) for name in figures} == figures)
    for stream in streams:
        stream.close(cancel=True)
    wait_until(lambda: cancelled(server) - cancelled_before == MAX_BATCH + MAX_QUEUE, timeout_s=20)
    assert len(tokens(ask(server, "tensorrt_llm", engine_inputs([504], 3)))) == 3


def state(server, name):
    return metric(server, "nv_trt_llm_request_metrics", request_type=name)


def test_the_ensemble_and_its_unary_front_give_the_same_reason(server):
    reply = ask_one(server, "ensemble", text_inputs("Hello", 5, temperature=[[-1.0]]))
    assert reply.error.endswith("temperature is -1.0; allowed: >= 0.")
    status, answer = post(
        server, "ensemble_unary/generate", {"text_input": "Hello", "max_tokens": 5, "temperature": -1}
    )
    assert status >= 400
    assert answer["error"] == "temperature is -1.0; allowed: >= 0."


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"stream": True}, "Streaming is only supported if model is deployed using decoupled mode."),
        ({"num_return_sequences": 2}, "num_return_sequences > 1 requires the tensorrt_llm backend"),
    ],
)
def test_the_unary_front_refuses_what_has_several_responses(server, tensors, expected):
    body = {"text_input": "Hello", "max_tokens": 5, **tensors}
    status, answer = post(server, "ensemble_unary/generate", body)
    assert status >= 400
    assert expected in answer["error"]


def test_a_body_that_is_no_json_is_refused_by_triton(server):
    status, answer = post(server, "ensemble/generate", b"{not json")
    assert status >= 400
    assert "JSON" in answer["error"]
