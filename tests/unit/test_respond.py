"""From events to output tensors: names, shapes and types of the contract, and nothing that was not asked for."""

from __future__ import annotations

import time

import numpy as np
import pytest

from python_backend.contract import model_contract
from python_backend.engine.log_probs import TokenLogProbs
from python_backend.engine.output import PerfMetrics, RequestOutput, SequenceOutput
from python_backend.logprobs.tokens import TokenTable
from python_backend.request import GenerationRequest, SamplingParams
from python_backend.triton.respond import Responder
from tests.unit.small_tokenizers import small_tokenizer

ALL = frozenset(model_contract("tensorrt_llm").outputs)


def request(streaming=True, sampling=None, prompt=(1, 2, 3), **options):
    return GenerationRequest("0", list(prompt), sampling or SamplingParams(8), streaming=streaming, **options)


def event(req, *sequences, finished=False, **options):
    return RequestOutput(req, list(sequences), finished, **options)


TOKENS = TokenTable(small_tokenizer("byte_level"))


def respond(req, *events, wanted=ALL):
    """The outputs of each event as dictionaries."""
    responder = Responder(req, wanted, lambda ids: ids[-2:], TOKENS)
    arrays = [responder.arrays(e) for e in events]
    return [None if a is None else dict(a) for a in arrays]


def news(tokens, context=(), reason=None, index=0, **options):
    return SequenceOutput(index, list(tokens), list(context), reason, **options)


def test_a_streamed_token_carries_itself_its_length_and_the_context_only():
    req = request()
    first, second = respond(req, event(req, news([7])), event(req, news([8], [4, 5, 7])))
    assert set(first) == set(second) == {"output_ids", "sequence_length", "detokenize_context"}
    assert first["output_ids"].tolist() == [[[7]]]
    assert first["output_ids"].dtype == np.int32
    assert first["sequence_length"].tolist() == [[1]]
    assert first["detokenize_context"].shape == (1, 1, 0)
    assert second["detokenize_context"].tolist() == [[[5, 7]]]


def test_only_wanted_outputs_are_built():
    req = request(return_log_probs=True, warnings=["w"])
    (outputs,) = respond(req, event(req, news([7], reason="length")), wanted={"sequence_length", "finish_reason"})
    assert set(outputs) == {"sequence_length", "finish_reason"}


def test_an_event_without_news_gives_no_response():
    req = request()
    responses = respond(req, event(req, news([])), event(req, news([7])), event(req, news([], [7])))
    assert responses[0] is None
    assert responses[1] is not None
    assert responses[2] is None


def test_an_end_without_new_tokens_closes_with_an_empty_response():
    req = request()
    _, last = respond(req, event(req, news([7])), event(req, news([], [7], "stop"), finished=True))
    assert last["output_ids"].shape == (1, 1, 0)
    assert last["sequence_length"].tolist() == [[0]]
    assert last["finish_reason"].tolist() == [[b"stop"]]
    assert last["text_cut"].tolist() == [[0]]


def test_a_whole_answer_starts_with_the_prompt_when_asked():
    req = request(streaming=False, exclude_input=False, return_num_output_tokens=True, return_num_input_tokens=True)
    (outputs,) = respond(req, event(req, news([7, 8], reason="length"), finished=True))
    assert outputs["output_ids"].tolist() == [[[1, 2, 3, 7, 8]]]
    assert outputs["sequence_length"].tolist() == [[5]]
    assert outputs["num_output_tokens"].tolist() == [[5]]
    assert outputs["num_input_tokens"].tolist() == [[3]]
    assert "detokenize_context" not in outputs


def test_a_stream_never_repeats_the_prompt():
    req = request(exclude_input=False)
    (outputs,) = respond(req, event(req, news([7])))
    assert outputs["output_ids"].tolist() == [[[7]]]


def test_beams_of_different_lengths_are_padded_with_minus_one():
    req = request(
        streaming=False, sampling=SamplingParams(8, beam_width=2, num_return_sequences=2), return_log_probs=True
    )
    beams = [
        news([7, 8, 9], reason="length", cum_log_prob=-1.5, log_probs=[-0.5] * 3),
        news([7], reason="stop", index=1, cum_log_prob=-2.0, log_probs=[-2.0], text_cut=3),
    ]
    (outputs,) = respond(req, event(req, *beams, finished=True))
    assert outputs["output_ids"].tolist() == [[[7, 8, 9], [7, -1, -1]]]
    assert outputs["sequence_length"].tolist() == [[3, 1]]
    assert outputs["cum_log_probs"].tolist() == [[-1.5, -2.0]]
    assert outputs["output_log_probs"].tolist() == [[[-0.5, -0.5, -0.5], [-2.0, -1.0, -1.0]]]
    assert outputs["finish_reason"].tolist() == [[b"length", b"stop"]]
    assert outputs["text_cut"].tolist() == [[0, 3]]


def test_generation_logits_swap_tokens_and_sequences_when_streamed():
    logits = [np.full(5, i, np.float32) for i in range(3)]
    whole, stream = request(streaming=False, return_generation_logits=True), request(return_generation_logits=True)
    (one,) = respond(whole, event(whole, news([1, 2, 3], generation_logits=logits, reason="length"), finished=True))
    (other,) = respond(stream, event(stream, news([1, 2, 3], generation_logits=logits)))
    assert one["generation_logits"].shape == (1, 1, 3, 5)
    assert other["generation_logits"].shape == (1, 3, 1, 5)
    assert other["generation_logits"][0, 2, 0, 0] == 2
    assert one["generation_logits"].dtype == np.float32


def test_context_logits_are_in_the_first_response():
    req = request(return_context_logits=True)
    logits = np.zeros((3, 5), np.float32)
    first, second = respond(req, event(req, news([7]), context_logits=logits), event(req, news([8], [7])))
    assert first["context_logits"].shape == (1, 3, 5)
    assert "context_logits" not in second


def test_indexes_are_sent_for_batches_and_samples_only():
    req = request(batch_index=1, batch_size=2, sampling=SamplingParams(8, num_return_sequences=3, top_k=5))
    (outputs,) = respond(req, event(req, news([7], index=2)))
    assert outputs["batch_index"].tolist() == [[1]]
    assert outputs["sequence_index"].tolist() == [[2]]


def test_perf_metrics_are_sent_when_asked():
    perf = PerfMetrics(1, 2, 3, 4, 5, 6, 7)
    asked, plain = request(return_perf_metrics=True), request()
    (outputs,) = respond(asked, event(asked, news([7], reason="length"), finished=True, perf=perf))
    assert outputs["arrival_time_ns"].tolist() == [[1]]
    assert outputs["arrival_time_ns"].dtype == np.int64
    assert outputs["first_scheduled_time_ns"].tolist() == [[2]]
    assert outputs["first_token_time_ns"].tolist() == [[3]]
    assert outputs["last_token_time_ns"].tolist() == [[4]]
    assert outputs["kv_cache_alloc_new_blocks"].tolist() == [[5]]
    assert outputs["kv_cache_alloc_total_blocks"].tolist() == [[6]]
    assert outputs["kv_cache_reused_blocks"].tolist() == [[7]]
    assert outputs["acceptance_rate"].tolist() == [[0.0]]
    assert outputs["acceptance_rate"].dtype == np.float32
    assert outputs["total_draft_tokens"].tolist() == outputs["total_accepted_draft_tokens"].tolist() == [[0]]
    (outputs,) = respond(plain, event(plain, news([7], reason="length"), finished=True, perf=perf))
    assert "arrival_time_ns" not in outputs


def test_warnings_come_with_the_first_response():
    req = request(warnings=["clipped", "é"])
    first, second = respond(req, event(req, news([7])), event(req, news([8], [7])))
    assert first["warnings"].tolist() == [[b"clipped", "é".encode()]]
    assert "warnings" not in second


def test_types_and_dimensions_are_those_of_the_contract():
    req = request(
        return_log_probs=True,
        return_context_logits=True,
        return_generation_logits=True,
        return_perf_metrics=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
        top_logprobs=1,
        top_prompt_logprobs=0,
        tool_format="hermes",
        batch_size=2,
        warnings=["w"],
        sampling=SamplingParams(8, num_return_sequences=2, top_k=3),
    )
    logits = np.zeros((3, 5), np.float32)
    scores = TokenLogProbs(-1.0, [8], [-0.5])
    sequence = news([7], reason="stop", log_probs=[-1.0], top_log_probs=[scores], generation_logits=[logits[0]])
    prompt = {"context_logits": logits, "prompt_log_probs": [TokenLogProbs(-1.0, [], [])] * 2}
    (outputs,) = respond(req, event(req, sequence, finished=True, perf=PerfMetrics(), **prompt))
    types = {"TYPE_INT32": np.int32, "TYPE_INT64": np.int64, "TYPE_FP32": np.float32, "TYPE_STRING": np.object_}
    contract = model_contract("tensorrt_llm").outputs
    assert set(outputs) == set(contract) - {"context_phase_params"}
    for name, array in outputs.items():
        assert array.dtype == types[contract[name].data_type], name
        assert array.shape[:1] == (1,), name
        assert array.ndim == len(contract[name].dims) + 1, name


@pytest.mark.parametrize("tokens_before", [1, 400])
def test_a_streamed_token_costs_far_less_than_a_send(tokens_before):
    req = request()
    responder = Responder(req, ALL, lambda ids: ids[-4:], TOKENS)
    events = [event(req, news([7], range(tokens_before))) for _ in range(200)]

    def seconds_per_response():
        started = time.perf_counter()
        for e in events:
            responder.arrays(e)
        return (time.perf_counter() - started) / len(events)

    # Measured: 5 µs; a send costs 80.
    assert min(seconds_per_response() for _ in range(10)) < 60e-6
