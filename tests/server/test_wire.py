"""The wire: every output with its shape, over gRPC streams, KServe calls, generate and generate_stream."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from tests.server.wire import (
    ask,
    ask_one,
    engine_inputs,
    events,
    post,
    tensor,
    text,
    text_inputs,
    tokens,
)

TRUE = [[True]]
PROMPT = [504, 3575, 282, 4649, 314]  # "The capital of France is"
PROMPT_TEXT = "The capital of France is"
VOCABULARY = 49152


@pytest.fixture(scope="module")
def greedy(server):
    """The first twelve greedy tokens, from one response."""
    return tokens([ask_one(server, "tensorrt_llm", engine_inputs(PROMPT, 12))])


def test_a_stream_of_tokens_equals_the_whole_answer(server, greedy):
    replies = ask(server, "tensorrt_llm", engine_inputs(PROMPT, 12, streaming=TRUE))
    assert len(greedy) == 12
    assert tokens(replies) == greedy
    assert [reply.final for reply in replies] == [False] * 11 + [True]
    assert all(reply["sequence_length"].tolist() == [[1]] for reply in replies)
    assert [reply["finish_reason"].tolist() for reply in replies if "finish_reason" in reply.outputs] == [[[b"length"]]]


def test_streamed_text_joins_to_the_whole_text(server):
    whole = text([ask_one(server, "ensemble", text_inputs(PROMPT_TEXT, 24))])
    replies = ask(server, "ensemble", text_inputs(PROMPT_TEXT, 24, stream=TRUE))
    assert len(replies) > 12
    assert text(replies) == whole
    assert "Paris" in whole
    assert not whole.startswith(PROMPT_TEXT)


def test_text_output_is_one_dimensional(server):
    assert ask_one(server, "ensemble", text_inputs(PROMPT_TEXT, 3))["text_output"].shape == (1,)


def test_the_prompt_is_in_the_output_when_a_request_asks_for_it(server, greedy):
    reply = ask_one(server, "tensorrt_llm", engine_inputs(PROMPT, 12, exclude_input_in_output=[[False]]))
    assert tokens([reply]) == PROMPT + greedy
    assert reply["sequence_length"].tolist() == [[17]]
    text_reply = ask_one(server, "ensemble", text_inputs(PROMPT_TEXT, 3, exclude_input_in_output=[[False]]))
    assert text([text_reply]).startswith(PROMPT_TEXT)


def test_only_the_outputs_that_were_asked_for_come_back(server):
    inputs = engine_inputs(PROMPT, 2, return_log_probs=TRUE)
    reply = ask_one(server, "tensorrt_llm", inputs, outputs=("output_ids", "cum_log_probs"))
    assert set(reply.outputs) == {"output_ids", "cum_log_probs"}


def test_log_probs_of_a_stream_are_cumulative_and_add_up(server):
    whole = ask_one(server, "tensorrt_llm", engine_inputs(PROMPT, 6, return_log_probs=TRUE))
    assert whole["output_log_probs"].shape == (1, 1, 6)
    assert whole["cum_log_probs"].shape == (1, 1)
    assert whole["cum_log_probs"].item() == pytest.approx(whole["output_log_probs"].sum(), abs=1e-3)
    assert (whole["output_log_probs"] <= 0).all()
    replies = ask(server, "tensorrt_llm", engine_inputs(PROMPT, 6, return_log_probs=TRUE, streaming=TRUE))
    assert [reply["output_log_probs"].shape for reply in replies] == [(1, 1, n) for n in range(1, 7)]
    np.testing.assert_allclose(replies[-1]["output_log_probs"], whole["output_log_probs"], atol=0.05)


def test_logits_have_the_contracts_shapes_and_their_maximum_is_the_greedy_token(server, greedy):
    asked = {"return_context_logits": TRUE, "return_generation_logits": TRUE}
    whole = ask_one(server, "tensorrt_llm", engine_inputs(PROMPT, 3, **asked))
    assert whole["context_logits"].shape == (1, len(PROMPT), VOCABULARY)
    assert whole["context_logits"][0, -1].argmax() == greedy[0]
    assert whole["generation_logits"].shape == (1, 1, 3, VOCABULARY)
    assert whole["generation_logits"][0, 0].argmax(-1).tolist() == greedy[:3]
    stream = ask(server, "tensorrt_llm", engine_inputs(PROMPT, 3, streaming=TRUE, **asked))
    assert [reply["generation_logits"].shape for reply in stream] == [(1, 1, 1, VOCABULARY)] * 3
    assert ["context_logits" in reply.outputs for reply in stream] == [True, False, False]


def test_token_counts_are_those_of_the_response(server):
    asked = {"return_num_input_tokens": TRUE, "return_num_output_tokens": TRUE}
    whole = ask_one(server, "ensemble", text_inputs(PROMPT_TEXT, 4, **asked))
    assert whole["num_input_tokens"].tolist() == [[len(PROMPT)]]
    assert whole["num_output_tokens"].tolist() == [[4]]
    stream = ask(server, "ensemble", text_inputs(PROMPT_TEXT, 4, stream=TRUE, **asked))
    assert sum(reply["num_output_tokens"].item() for reply in stream) == 4


def test_perf_metrics_are_in_order_and_a_repeated_prompt_reuses_its_blocks(server):
    prompt = list(range(2000, 2110))
    inputs = engine_inputs(prompt, 5, return_perf_metrics=TRUE)
    first, second = (ask_one(server, "tensorrt_llm", inputs) for _ in range(2))
    names = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")
    times = [first[name].item() for name in names]
    assert times == sorted(times)
    assert times[0] > 0
    assert first["kv_cache_alloc_new_blocks"].item() == first["kv_cache_alloc_total_blocks"].item() == 4
    assert first["kv_cache_reused_blocks"].item() == 0
    assert second["kv_cache_reused_blocks"].item() >= 3
    assert second["kv_cache_alloc_total_blocks"].item() <= 1
    assert first["acceptance_rate"].item() == 0.0


def test_samples_come_as_responses_of_their_own_with_their_index(server):
    inputs = engine_inputs(PROMPT, 5, num_return_sequences=[[3]], runtime_top_k=[[40]], seed=np.array([[7]], np.uint64))
    replies = ask(server, "tensorrt_llm", inputs)
    assert sorted(reply["sequence_index"].item() for reply in replies) == [0, 1, 2]
    assert len({tuple(tokens([reply])) for reply in replies}) > 1
    again = ask(server, "tensorrt_llm", inputs)
    assert sorted(tokens([reply]) for reply in replies) == sorted(tokens([reply]) for reply in again)


def test_beams_come_together_best_first(server):
    reply = ask_one(server, "tensorrt_llm", engine_inputs(PROMPT, 6, beam_width=[[3]], return_log_probs=TRUE))
    assert reply["output_ids"].shape == (1, 3, 6)
    assert reply["sequence_length"].shape == (1, 3)
    assert reply["cum_log_probs"].shape == (1, 3)
    assert reply["output_log_probs"].shape[:2] == (1, 3)
    assert reply["cum_log_probs"][0].tolist() == sorted(reply["cum_log_probs"][0].tolist(), reverse=True)


def test_several_prompts_are_answered_each_under_its_index(server, greedy):
    inputs = [
        tensor("input_ids", [PROMPT, [*PROMPT[:2], 0, 0, 0]]),
        tensor("input_lengths", [[5], [2]]),
        tensor("request_output_len", [[4], [3]]),
    ]
    replies = ask(server, "tensorrt_llm", inputs)
    found = {reply["batch_index"].item(): tokens([reply]) for reply in replies}
    assert found[0] == greedy[:4]
    assert found[1] == tokens([ask_one(server, "tensorrt_llm", engine_inputs(PROMPT[:2], 3))])
    assert [reply.final for reply in replies] == [False, True]


def test_an_end_token_is_not_shown_and_its_stream_closes_with_an_empty_response(server, greedy):
    whole = ask_one(server, "tensorrt_llm", engine_inputs(PROMPT, 12, end_id=[[greedy[2]]]))
    expected = greedy[: greedy.index(greedy[2])]
    assert tokens([whole]) == expected
    assert whole["finish_reason"].tolist() == [[b"stop"]]
    replies = ask(server, "tensorrt_llm", engine_inputs(PROMPT, 12, end_id=[[greedy[2]]], streaming=TRUE))
    assert tokens(replies) == expected
    assert replies[-1]["output_ids"].shape == (1, 1, 0)
    assert replies[-1]["sequence_length"].tolist() == [[0]]


def test_a_stop_word_ends_the_text_exactly(server):
    prompt = "One, two, three,"
    for stream in (False, True):
        replies = ask(server, "ensemble", text_inputs(prompt, 40, stop_words=[["seven"]], stream=[[stream]]))
        assert text(replies).endswith("seven")
        assert replies[-1]["finish_reason"].reshape(-1).tolist() == [b"stop"]
        replies = ask(
            server,
            "ensemble",
            text_inputs(prompt, 40, stop_words=[["seven"]], exclude_stop_words_in_output=TRUE, stream=[[stream]]),
        )
        assert text(replies).endswith("six, ")


def test_the_same_seed_gives_the_same_answer_and_no_seed_another_one(server):
    sampled = {"runtime_top_k": [[0]], "runtime_top_p": [[0.95]], "temperature": [[1.5]]}
    seeded = [
        tokens([ask_one(server, "tensorrt_llm", engine_inputs(PROMPT, 16, seed=np.array([[3]], np.uint64), **sampled))])
        for _ in range(2)
    ]
    assert seeded[0] == seeded[1]
    free = {tuple(tokens([ask_one(server, "tensorrt_llm", engine_inputs(PROMPT, 16, **sampled))])) for _ in range(3)}
    assert len(free) > 1


def test_a_lowered_output_length_is_a_warning(server):
    inputs = engine_inputs([5], 10**6, end_id=[[0]], streaming=TRUE)
    replies = ask(server, "tensorrt_llm", [*inputs, tensor("timeout_ms", [[200]])])
    (warning,) = replies[0]["warnings"].reshape(-1)
    assert b"request_output_len was lowered from 1000000 to 4095" in warning


def test_generate_answers_with_one_json_object(server):
    status, answer = post(server, "ensemble/generate", {"text_input": PROMPT_TEXT, "max_tokens": 8, "id": "mine"})
    assert status == 200
    assert "Paris" in answer["text_output"]
    assert answer["finish_reason"] == "length"


def test_generate_says_which_key_had_no_effect(server):
    body = {"text_input": PROMPT_TEXT, "max_tokens": 2, "min_length": 2, "bad_words": "", "stop_words": ""}
    status, answer = post(server, "ensemble/generate", body)
    assert status == 200
    assert (
        answer["warnings"]
        == "Parameter min_length is no input of this model and had no effect. Its name is min_tokens now."
    )


def test_generate_stream_sends_one_event_for_each_piece(server):
    pieces = list(events(server, "ensemble", {"text_input": PROMPT_TEXT, "max_tokens": 8, "stream": True}))
    _, whole = post(server, "ensemble/generate", {"text_input": PROMPT_TEXT, "max_tokens": 8})
    assert "".join(piece["text_output"] for piece in pieces) == whole["text_output"]
    assert len(pieces) == 8
    assert ["finish_reason" in piece for piece in pieces] == [False] * 7 + [True]


def test_a_plain_grpc_call_is_answered_by_the_unary_front(server):
    client = grpcclient.InferenceServerClient(server.grpc)
    result = client.infer("ensemble_unary", text_inputs(PROMPT_TEXT, 8), request_id="plain")
    assert result.get_response().id == "plain"
    whole = ask_one(server, "ensemble", text_inputs(PROMPT_TEXT, 8))
    assert result.as_numpy("text_output")[0] == whole["text_output"][0]
    assert result.as_numpy("finish_reason").reshape(-1).tolist() == [b"length"]


def test_a_plain_http_call_is_answered_by_the_unary_front(server):
    client = httpclient.InferenceServerClient(server.http)
    inputs = [
        httpclient.InferInput("text_input", [1, 1], "BYTES"),
        httpclient.InferInput("max_tokens", [1, 1], "INT32"),
    ]
    inputs[0].set_data_from_numpy(np.array([[PROMPT_TEXT.encode()]], dtype=object))
    inputs[1].set_data_from_numpy(np.array([[4]], np.int32))
    assert client.infer("ensemble_unary", inputs).as_numpy("text_output")[0].decode().strip()


def test_the_unary_front_serves_many_at_once(server):
    client = grpcclient.InferenceServerClient(server.grpc)
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    for i in range(16):
        client.async_infer(
            "ensemble_unary", text_inputs(f"Number {i} is", 6), lambda result, error: answers.put((result, error))
        )
    for _ in range(16):
        result, error = answers.get(timeout=60)
        assert error is None
        assert result.as_numpy("text_output")[0]
