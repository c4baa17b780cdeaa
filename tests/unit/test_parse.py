"""From input tensors to requests: every input of the contract is honoured or refused by name."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest

from tests.unit import fake_pb_utils

fake_pb_utils.install()

from python_backend.contract import model_contract  # noqa: E402
from python_backend.errors import InvalidRequest, LimitExceeded, RequestError, Unsupported  # noqa: E402
from python_backend.triton.inputs import HONOURED, REFUSED  # noqa: E402
from python_backend.triton.limits import ServingLimits  # noqa: E402
from python_backend.triton.parse import is_stop, parse_requests  # noqa: E402

LIMITS = ServingLimits(
    vocab_size=100,
    max_seq_len=32,
    max_input_len=20,
    max_beam_width=4,
    max_batch_size=8,
    decoupled=True,
    exclude_input_in_output=True,
)

TYPES = {
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_UINT64": np.uint64,
    "TYPE_UINT8": np.uint8,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
    "TYPE_BOOL": np.bool_,
}


def ints(*rows):
    return np.array(rows, np.int32)


def prompt(*rows, output_len=5, **tensors):
    """Tensors of a request with these prompts."""
    rows = rows or ([1, 2, 3],)
    width = max(map(len, rows))
    return {
        "input_ids": ints(*[row + [0] * (width - len(row)) for row in rows]),
        "input_lengths": ints(*[[len(row)] for row in rows]),
        "request_output_len": ints(*[[output_len] for _ in rows]),
        **tensors,
    }


def parse(tensors, limits=LIMITS, **options):
    return parse_requests(tensors, limits, map(str, itertools.count()).__next__, **options)


def parse_one(limits=LIMITS, **tensors):
    (request,) = parse(prompt(**tensors), limits)
    return request


def test_every_input_of_the_contract_is_honoured_or_refused_and_none_is_both():
    contract = set(model_contract("tensorrt_llm").inputs)
    assert set(HONOURED) | set(REFUSED) == contract
    assert not set(HONOURED) & set(REFUSED)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_input_is_named_with_a_reason(name):
    spec = model_contract("tensorrt_llm").inputs[name]
    shape = [1, *(1 if size == -1 else size for size in spec.dims)]
    if spec.data_type == "TYPE_STRING":
        value = np.full(shape, b"x", dtype=object)
    else:
        value = np.ones(shape, TYPES[spec.data_type])
    with pytest.raises(RequestError, match=name):
        parse(prompt(**{name: value}))


def test_a_plain_request_gets_the_defaults():
    request = parse_one()
    assert request.prompt_ids == [1, 2, 3]
    assert request.sampling.max_tokens == 5
    assert request.sampling.greedy
    assert request.end_ids == ()
    assert request.sampling.seed is None
    assert request.exclude_input
    assert not request.streaming
    assert request.warnings == []
    assert request.deadline_s is None


def test_scalars_come_with_and_without_their_second_dimension():
    one = parse_one(temperature=np.array([[0.5]], np.float32), runtime_top_k=ints([7]).reshape(1))
    assert one.sampling.temperature == pytest.approx(0.5)
    assert one.sampling.top_k == 7


def test_all_beams_are_returned_unless_fewer_are_asked_for():
    assert parse_one(beam_width=ints([3])).sampling.num_return_sequences == 3
    assert parse_one(beam_width=ints([3]), num_return_sequences=ints([2])).sampling.num_return_sequences == 2
    with pytest.raises(InvalidRequest, match="num_return_sequences is 3; allowed: 1 to beam_width"):
        parse_one(beam_width=ints([2]), num_return_sequences=ints([3]))


def test_every_sampling_input_reaches_its_parameter():
    tensors = {
        "beam_width": ints([2]),
        "num_return_sequences": ints([2]),
        "runtime_top_p": np.array([[0.5]], np.float32),
        "runtime_top_p_min": np.array([[0.25]], np.float32),
        "runtime_top_p_decay": np.array([[0.75]], np.float32),
        "runtime_top_p_reset_ids": ints([9]),
        "repetition_penalty": np.array([[1.5]], np.float32),
        "presence_penalty": np.array([[0.5]], np.float32),
        "frequency_penalty": np.array([[-0.5]], np.float32),
        "no_repeat_ngram_size": ints([3]),
        "min_tokens": ints([2]),
        "seed": np.array([[2**64 - 1]], np.uint64),
        "len_penalty": np.array([[2.0]], np.float32),
        "early_stopping": np.array([[False]]),
        "beam_search_diversity_rate": np.array([[0.25]], np.float32),
    }
    sampling = parse_one(**tensors).sampling
    assert sampling == replace(
        sampling,
        beam_width=2,
        num_return_sequences=2,
        top_p=0.5,
        top_p_min=0.25,
        top_p_decay=0.75,
        top_p_reset_id=9,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        no_repeat_ngram_size=3,
        min_tokens=2,
        seed=2**64 - 1,
        length_penalty=2.0,
        early_stopping=False,
        beam_search_diversity_rate=0.25,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", np.nan),
        ("temperature", -1.0),
        ("temperature", np.inf),
        ("runtime_top_p", 1.5),
        ("runtime_top_p_decay", 0.0),
        ("repetition_penalty", 0.0),
        ("presence_penalty", np.nan),
        ("len_penalty", -1.0),
    ],
)
def test_a_float_out_of_range_is_named_with_its_value(name, value):
    with pytest.raises(InvalidRequest, match=f"{name} is {value}"):
        parse_one(**{name: np.array([[value]], np.float32)})


@pytest.mark.parametrize(
    ("name", "value"), [("beam_width", 0), ("num_return_sequences", -1), ("min_tokens", -1), ("runtime_top_k", -3)]
)
def test_an_integer_out_of_range_is_named_with_its_value(name, value):
    with pytest.raises(InvalidRequest, match=f"{name} is {value}"):
        parse_one(**{name: ints([value])})


def test_a_prompt_over_the_limit_is_refused_with_upstreams_text():
    with pytest.raises(
        LimitExceeded, match=r"^Prompt length \(21\) exceeds maximum input length \(20\)\. Set log level"
    ):
        parse(prompt([1] * 21))


def test_the_output_is_lowered_to_what_fits_and_a_warning_says_so():
    (request,) = parse(prompt([1] * 20, output_len=50))
    assert request.sampling.max_tokens == 12
    assert request.warnings == [
        "request_output_len was lowered from 50 to 12: the prompt has 20 tokens and prompt and output share "
        "max_seq_len (32)."
    ]


@pytest.mark.parametrize("missing", ["input_ids", "input_lengths", "request_output_len"])
def test_a_missing_mandatory_input_is_named(missing):
    tensors = prompt()
    del tensors[missing]
    expected = {
        "input_ids": "inputTokens or encoderInputFeatures tensor not provided",
        "input_lengths": "input_lengths is not present in the request",
        "request_output_len": "request_output_len is not present in the request",
    }
    with pytest.raises(InvalidRequest, match=expected[missing]):
        parse(tensors)


@pytest.mark.parametrize("length", [-1, 0, 4, 2**31 - 1])
def test_input_lengths_outside_the_prompt_are_refused(length):
    with pytest.raises(InvalidRequest, match=f"input_lengths is {length}"):
        parse(prompt(input_lengths=ints([length])))


@pytest.mark.parametrize("token", [-1, 100, 2**31 - 1])
def test_a_token_outside_the_vocabulary_is_refused(token):
    with pytest.raises(InvalidRequest, match=f"A token of input_ids is {token}; allowed: 0 to 99"):
        parse(prompt([1, token, 3]))


def test_a_scalar_with_too_many_values_is_refused():
    with pytest.raises(InvalidRequest, match="Invalid size for tensor temperature"):
        parse_one(temperature=np.ones((1, 2), np.float32))


@pytest.mark.parametrize("end_id", [-2, 100])
def test_an_end_id_outside_the_vocabulary_has_upstreams_text(end_id):
    with pytest.raises(InvalidRequest, match=rf"^EndId \({end_id}\) is not within acceptable range \[-1, 100\)\.$"):
        parse_one(end_id=ints([end_id]))


def test_end_ids_take_the_place_of_end_id():
    assert parse_one(end_id=ints([7])).end_ids == (7,)
    assert parse_one(end_id=ints([-1])).end_ids == ()
    assert parse_one(end_id=ints([7]), end_ids=ints([8, 9, -1, 8])).end_ids == (8, 9)
    assert parse_one(end_id=ints([7]), end_ids=ints([-1])).end_ids == ()


def test_word_lists_are_unpacked_and_checked():
    words = ints([[5, 6, 7], [2, 3, -1]])
    request = parse_one(stop_words_list=words, bad_words_list=np.zeros((1, 2, 0), np.int32))
    assert request.stop_words == ((5, 6), (7,))
    assert request.bad_words == ()
    with pytest.raises(InvalidRequest, match="Sparse list must not have out-of-bound offsets: bad_words_list"):
        parse_one(bad_words_list=ints([[5], [4]]))
    with pytest.raises(InvalidRequest, match="A token of stop_words_list is 100"):
        parse_one(stop_words_list=ints([[100], [1]]))


def test_stop_texts_are_decoded_and_empty_ones_are_skipped():
    request = parse_one(stop_words=fake_pb_utils.texts(["", "né", "x"]))
    assert request.stop_texts == ("né", "x")
    with pytest.raises(InvalidRequest, match="stop_words is not valid UTF-8"):
        parse_one(stop_words=fake_pb_utils.texts([b"\xff"]))


def test_a_short_bias_is_widened_to_the_vocabulary_and_an_empty_one_is_none():
    bias = parse_one(embedding_bias=np.array([[0.5, -np.inf]], np.float32)).embedding_bias
    assert bias is not None
    assert bias.shape == (100,)
    assert bias[0] == 0.5
    assert bias[1] == -np.inf
    assert not bias[2:].any()
    assert parse_one(embedding_bias=np.zeros((1, 0), np.float32)).embedding_bias is None


@pytest.mark.parametrize("bias", [np.zeros((1, 101)), np.full((1, 3), np.nan), np.full((1, 3), np.inf)])
def test_a_bias_that_does_not_fit_is_refused(bias):
    with pytest.raises(InvalidRequest, match="embedding_bias"):
        parse_one(embedding_bias=bias.astype(np.float32))


def test_a_batch_gives_one_request_for_each_row_cut_to_its_length():
    requests = parse(prompt([1, 2, 3], [4], temperature=np.array([[1.0], [0.5]], np.float32)))
    assert [r.prompt_ids for r in requests] == [[1, 2, 3], [4]]
    assert [(r.batch_index, r.batch_size) for r in requests] == [(0, 2), (1, 2)]
    assert [r.sampling.temperature for r in requests] == [1.0, 0.5]
    assert len({r.request_id for r in requests}) == 2


def test_a_model_that_is_not_decoupled_refuses_what_has_several_responses():
    unary = replace(LIMITS, decoupled=False)
    with pytest.raises(
        InvalidRequest, match=r"^Batch size > 1 requires the tensorrt_llm backend to be using decoupled"
    ):
        parse(prompt([1], [2]), unary)
    with pytest.raises(
        InvalidRequest, match=r"^Streaming is only supported if model is deployed using decoupled mode\.$"
    ):
        parse_one(unary, streaming=np.array([[True]]))
    with pytest.raises(InvalidRequest, match=r"^num_return_sequences > 1 requires"):
        parse_one(unary, num_return_sequences=ints([2]))
    assert parse_one(unary, num_return_sequences=ints([2]), beam_width=ints([2])).sampling.num_return_sequences == 2


def test_too_many_beams_or_sequences_are_refused_with_the_limit():
    with pytest.raises(LimitExceeded, match=r"beam_width is 5; allowed: 1 to max_beam_width \(4\)"):
        parse_one(beam_width=ints([5]))
    with pytest.raises(LimitExceeded, match=r"num_return_sequences is 1000000000; allowed: 1 to max_batch_size \(8\)"):
        parse_one(num_return_sequences=ints([10**9]))


def test_what_preprocessing_always_sends_is_accepted_and_more_is_not():
    default = {"decoder_input_ids": ints([0]), "decoder_input_lengths": ints([1]), "pad_id": ints([0])}
    assert parse_one(**default, prompt_table_extra_ids=np.zeros((1, 3), np.uint64)).prompt_ids
    with pytest.raises(Unsupported, match="decoder_input_ids"):
        parse_one(**{**default, "decoder_input_ids": ints([5])})
    with pytest.raises(Unsupported, match="decoder_input_ids"):
        parse_one(**{**default, "decoder_input_lengths": ints([2])})
    with pytest.raises(Unsupported, match="prompt_table_extra_ids"):
        parse_one(prompt_table_extra_ids=np.ones((1, 3), np.uint64))
    with pytest.raises(InvalidRequest, match=r"inputTokenExtraIds vector size \(2\)"):
        parse_one(prompt_table_extra_ids=np.zeros((1, 2), np.uint64))


def test_retention_ranges_of_different_lengths_have_upstreams_texts():
    starts = ints([0, 4])
    with pytest.raises(InvalidRequest, match=r"^retention_token_range_ends must be provided, and have the same length"):
        parse_one(retention_token_range_starts=starts)
    ranges = {"retention_token_range_starts": starts, "retention_token_range_ends": starts}
    with pytest.raises(InvalidRequest, match=r"^retention_token_range_priorities must be provided"):
        parse_one(**ranges, retention_token_range_priorities=ints([1]))
    ranges["retention_token_range_priorities"] = starts
    with pytest.raises(InvalidRequest, match=r"^retention_token_range_durations_ms must have the same length"):
        parse_one(**ranges, retention_token_range_durations_ms=ints([1]))
    with pytest.raises(Unsupported, match="retention_token_range_starts is not supported"):
        parse_one(**ranges)


def test_the_shorter_of_the_two_timeouts_counts():
    now = time.monotonic()
    (request,) = parse(prompt(timeout_ms=ints([2000])), timeout_us=500_000)
    assert request.deadline_s == pytest.approx(now + 0.5, abs=0.2)
    assert parse_one(timeout_ms=ints([0])).deadline_s is None
    with pytest.raises(InvalidRequest, match="timeout_ms is -1"):
        parse_one(timeout_ms=ints([-1]))


def test_a_parameter_that_is_no_input_is_noted_and_upstreams_own_are_not():
    (request,) = parse(
        prompt(), parameters={"min_length": 3, "Streaming": True, "triton_enable_empty_final_response": 1}
    )
    assert request.warnings == [
        "Parameter min_length is no input of this model and had no effect. Its name is min_tokens now."
    ]


def test_disaggregated_request_types_are_refused():
    with pytest.raises(Unsupported, match="request_type is context_only"):
        parse(prompt(), parameters={"request_type": "context_only"})
    with pytest.raises(InvalidRequest, match="request_type is sideways"):
        parse(prompt(), parameters={"request_type": "sideways"})
    assert parse(prompt(), parameters={"request_type": "context_and_generation"})


def test_a_stop_request_is_known_by_its_flag():
    assert is_stop({"stop": np.array([[True]])})
    assert not is_stop({"stop": np.array([[False]])})
    assert not is_stop({})


def test_flags_and_warnings_are_passed_on():
    names = ["return_log_probs", "return_context_logits", "return_generation_logits", "return_perf_metrics"]
    names += ["return_num_input_tokens", "return_num_output_tokens", "streaming"]
    request = parse_one(
        **{name: np.array([[True]]) for name in names},
        exclude_input_in_output=np.array([[False]]),
        exclude_stop_words_in_output=np.array([[True]]),
        warnings_in=fake_pb_utils.texts(["a note"]),
    )
    assert all(getattr(request, name) for name in names)
    assert not request.exclude_input
    assert request.exclude_stop_words
    assert request.warnings == ["a note"]
