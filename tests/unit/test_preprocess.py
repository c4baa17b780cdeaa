"""The preprocessing model: every tensor of the contract, batches, refusals, and one bad request among good ones."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit import fake_triton
from tests.unit.fake_pb_utils import InferenceRequest, InferenceResponse, TritonError, TritonModelException, texts
from tests.unit.fake_triton import MetricFamily
from tests.unit.small_tokenizers import small_tokenizer, write_tokenizer_dir

if TYPE_CHECKING:
    from pathlib import Path

fake_triton.install()

from python_backend.triton.preprocess import TritonPythonModel  # noqa: E402

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMES = {"model_name": "preprocessing", "model_version": "1"}
CLASSIC = ("INPUT_ID", "DECODER_INPUT_ID", "REQUEST_INPUT_LEN", "REQUEST_OUTPUT_LEN", "OUT_END_ID", "OUT_PAD_ID")


def load(
    directory: Path,
    kind: str = "llama",
    config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    **parameters: str,
) -> TritonPythonModel:
    write_tokenizer_dir(directory, kind, **({"chat_template": TEMPLATE} | (config or {})))
    values = {"tokenizer_dir": str(directory)} | parameters
    entries = {key: {"string_value": value} for key, value in values.items()}
    model = TritonPythonModel()
    model_config = {**(model_config or {}), "parameters": entries}
    model.initialize({**NAMES, "model_config": json.dumps(model_config)})
    return model


def request(*prompts: str | bytes, outputs: list[str] | None = None, id: str = "", **tensors: Any) -> InferenceRequest:
    inputs: dict[str, Any] = {"REQUEST_OUTPUT_LEN": np.full((max(1, len(prompts)), 1), 16, np.int32)}
    if prompts:
        inputs["QUERY"] = texts(*prompts)
    return InferenceRequest(inputs | tensors, outputs or [], id)


def run(model: TritonPythonModel, one: InferenceRequest) -> InferenceResponse:
    (response,) = model.execute([one])
    return response


def error(model: TritonPythonModel, one: InferenceRequest) -> tuple[str, int]:
    response = run(model, one)
    assert response.error is not None
    return response.error.message(), response.error.code()


@pytest.fixture
def model(tmp_path: Path) -> TritonPythonModel:
    return load(tmp_path / "tokenizer")


def test_a_step_by_step_client_finds_every_classic_output(model: TritonPythonModel) -> None:
    response = run(model, request("Hello world"))
    ids = small_tokenizer("llama").encode("Hello world")
    assert response.error is None
    assert response["INPUT_ID"].tolist() == [ids]
    assert response["INPUT_ID"].dtype == np.int32
    assert response["REQUEST_INPUT_LEN"].tolist() == [[len(ids)]]
    assert response["DECODER_INPUT_ID"].tolist() == [[2]]
    assert response["REQUEST_DECODER_INPUT_LEN"].tolist() == [[1]]
    assert response["REQUEST_OUTPUT_LEN"].tolist() == [[16]]
    assert response["OUT_END_ID"].tolist() == response["OUT_PAD_ID"].tolist() == [[2]]
    assert response["BAD_WORDS_IDS"].shape == response["STOP_WORDS_IDS"].shape == (1, 2, 0)
    assert response["EMBEDDING_BIAS"].shape == (1, 0)


def test_only_requested_outputs_are_made(model: TritonPythonModel) -> None:
    response = run(model, request("Hello", outputs=["INPUT_ID", "STOP_WORDS_IDS"]))
    assert {tensor.name() for tensor in response.output_tensors} == {"INPUT_ID", "STOP_WORDS_IDS"}


def test_prompts_of_a_batch_are_padded_behind_their_ids(model: TritonPythonModel) -> None:
    response = run(model, request("Hello world", "Hi", PAD_ID=np.array([[7], [9]], np.int32)))
    rows, (long, short) = response["INPUT_ID"].tolist(), response["REQUEST_INPUT_LEN"][:, 0].tolist()
    assert rows[0] == small_tokenizer("llama").encode("Hello world")
    assert long == len(rows[0])
    assert rows[1][:short] == small_tokenizer("llama").encode("Hi")
    assert rows[1][short:] == [9] * (long - short)


def test_one_bad_request_harms_no_other(model: TritonPythonModel) -> None:
    good = request("Hello")
    bad = [
        request(b"\xff\xfe"),
        request(),
        request("x", IMAGE_URL=texts("http://x")),
        request("x", MESSAGES=texts("[]")),
    ]
    responses = model.execute([good, *bad, good])
    assert [response.error is None for response in responses] == [True, False, False, False, False, True]
    assert responses[0]["INPUT_ID"].tolist() == responses[-1]["INPUT_ID"].tolist()


def test_invalid_utf8_is_named_with_its_place(model: TritonPythonModel) -> None:
    assert error(model, request(b"ab\xff")) == (
        "QUERY is not valid UTF-8: byte 0xff at offset 2. Send UTF-8 text.",
        TritonError.INVALID_ARG,
    )


@pytest.mark.parametrize("name", ["IMAGE_BYTES", "IMAGE_URL", "IMAGES", "VIDEO_BYTES"])
def test_images_and_video_are_refused_by_name(model: TritonPythonModel, name: str) -> None:
    message, code = error(model, request("x", **{name: np.zeros((1, 1, 1, 1, 1), np.uint8)}))
    assert name in message
    assert "text only" in message
    assert code == TritonError.UNSUPPORTED


def test_a_decoder_query_is_refused_unless_empty(model: TritonPythonModel) -> None:
    assert "DECODER_QUERY" in error(model, request("x", DECODER_QUERY=texts("y")))[0]
    assert run(model, request("x", DECODER_QUERY=texts(""))).error is None


def test_names_of_adapters_are_left_to_our_engine_and_unknown_to_others(
    model: TritonPythonModel, tmp_path: Path
) -> None:
    assert run(model, request("x", LORA_NAME=texts("mine"))).error is None
    message, code = error(load(tmp_path, target="trtllm"), request("x", LORA_NAME=texts("mine")))
    assert "'mine'" in message
    assert code == TritonError.NOT_FOUND


def test_messages_are_rendered_with_the_models_template(model: TritonPythonModel) -> None:
    messages = json.dumps([{"role": "user", "content": "Hello"}])
    ids = run(model, request(MESSAGES=texts(messages)))["INPUT_ID"][0].tolist()
    tokenizer = small_tokenizer("llama")
    expected = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert ids == tokenizer.encode(expected, add_special_tokens=False)


def test_text_and_messages_together_or_neither_are_refused(model: TritonPythonModel) -> None:
    assert "neither" in error(model, request())[0]
    assert "both" in error(model, request("x", MESSAGES=texts('[{"role":"user","content":"x"}]')))[0]


def test_end_and_pad_ids_of_the_client_win(model: TritonPythonModel) -> None:
    ids = {"END_ID": np.array([[-1]], np.int32), "PAD_ID": np.array([[5]], np.int32)}
    response = run(model, request("x", **ids))
    assert response["OUT_END_ID"].tolist() == response["OUT_END_IDS"].tolist() == [[-1]]
    assert response["OUT_PAD_ID"].tolist() == response["DECODER_INPUT_ID"].tolist() == [[5]]


def test_all_end_ids_of_generation_config_are_passed_on(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "generation_config.json").write_text('{"eos_token_id": [4, 2]}')
    response = run(load(tmp_path / "t"), request("x", "y"))
    assert response["OUT_END_IDS"].tolist() == [[2, 4], [2, 4]]
    assert response["OUT_END_ID"].tolist() == [[2], [2]]


def test_a_model_without_end_and_pad_tokens_works(tmp_path: Path) -> None:
    response = run(load(tmp_path / "t", config={"eos_token": None}), request("x"))
    assert response["OUT_END_ID"].tolist() == [[-1]]
    assert response["OUT_PAD_ID"].tolist() == [[0]]


def test_words_reach_the_engine_as_ids(model: TritonPythonModel) -> None:
    tokenizer = small_tokenizer("llama")
    response = run(model, request("x", STOP_WORDS_DICT=texts(["world", ""]), BAD_WORDS_DICT=texts("dog")))
    stop = tokenizer.encode("world", add_special_tokens=False)
    assert response["STOP_WORDS_IDS"][0, 0].tolist() == stop
    assert response["STOP_WORDS_IDS"][0, 1].tolist() == [len(stop)] + [-1] * (len(stop) - 1)
    assert tokenizer.bos_id not in response["BAD_WORDS_IDS"][0, 0]


def test_a_word_that_the_vocabulary_cannot_write_is_warned_about(tmp_path: Path) -> None:
    response = run(load(tmp_path / "t", "wordpiece"), request("hello", BAD_WORDS_DICT=texts("☃")))
    assert "not banned" in response["WARNINGS"][0, 0].decode()


def test_bias_words_need_as_many_weights(model: TritonPythonModel) -> None:
    words = {"EMBEDDING_BIAS_WORDS": texts(["dog", "fox"])}
    assert "2 words" in error(model, request("x", **words, EMBEDDING_BIAS_WEIGHTS=np.ones((1, 1), np.float32)))[0]
    bias = run(model, request("x", **words, EMBEDDING_BIAS_WEIGHTS=np.array([[2, -3]], np.float32)))["EMBEDDING_BIAS"]
    assert bias.shape == (1, small_tokenizer("llama").vocab_size)
    assert bias.min() < 0 < bias.max()


def test_prompt_table_extra_ids_are_zero_for_text(model: TritonPythonModel) -> None:
    response = run(model, request("Hello", PROMPT_TABLE_EXTRA_ID=np.array([[5]], np.uint64)))
    assert response["OUT_PROMPT_TABLE_EXTRA_IDS"].shape == response["INPUT_ID"].shape
    assert not response["OUT_PROMPT_TABLE_EXTRA_IDS"].any()


def engine_dir(directory: Path, max_input_len: int) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"build_config": {"max_input_len": max_input_len}}))
    return str(directory)


def test_a_prompt_over_the_limit_is_refused_with_both_numbers(tmp_path: Path) -> None:
    model = load(tmp_path / "t", gpt_model_path=engine_dir(tmp_path / "engine", 4))
    length = len(small_tokenizer("llama").encode("The quick brown fox jumps"))
    message, code = error(model, request("The quick brown fox jumps"))
    assert f"Prompt length ({length}) exceeds maximum input length (4)" in message
    assert code == TritonError.INVALID_ARG
    assert run(model, request("Hi")).error is None


def test_a_huge_prompt_is_refused_before_it_is_tokenised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(tmp_path / "t", gpt_model_path=engine_dir(tmp_path / "engine", 100))
    tokenizer = model._preprocessor._tokenizer
    encoded: list[str] = []
    real = tokenizer.encode_batch
    monkeypatch.setattr(tokenizer, "encode_batch", lambda t, *a, **k: (encoded.extend(t), real(t, *a, **k))[1])
    assert "at least" in error(model, request("a" * 1_000_000))[0]
    chat = json.dumps([{"role": "user", "content": "a" * 1_000_000}])
    assert "at least" in error(model, request(MESSAGES=texts(chat)))[0]
    assert encoded == []


def test_streaming_without_an_id_is_refused_only_where_state_is_kept_by_id(tmp_path: Path) -> None:
    stream = {"STREAM": np.array([[True]])}
    backend = load(tmp_path / "t", target="trtllm")
    assert "request id" in error(backend, request("x", **stream))[0]
    assert run(backend, request("x", **stream, id="7")).error is None
    assert run(load(tmp_path / "t"), request("x", **stream)).error is None


def test_special_tokens_are_added_unless_the_parameter_says_otherwise(tmp_path: Path) -> None:
    assert run(load(tmp_path / "a", add_special_tokens="No"), request("fox"))["INPUT_ID"][0, 0] != 1
    assert run(load(tmp_path / "b", add_special_tokens="${add_special_tokens}"), request("fox"))["INPUT_ID"][0, 0] == 1
    with pytest.raises(TritonModelException, match="add_special_tokens is 'maybe'; allowed: true or false"):
        load(tmp_path / "c", add_special_tokens="maybe")


def test_a_multimodal_repository_fails_the_load(tmp_path: Path) -> None:
    with pytest.raises(TritonModelException, match="multimodal"):
        load(tmp_path, multimodal_model_path="/vision")


def test_an_engine_directory_without_an_engine_fails_the_load(tmp_path: Path) -> None:
    with pytest.raises(TritonModelException, match=r"config\.json does not exist"):
        load(tmp_path / "t", gpt_model_path=str(tmp_path / "nowhere"))


def test_an_unexpected_error_is_internal_and_keeps_its_traceback_to_itself(
    model: TritonPythonModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("surprise")

    monkeypatch.setattr(model._preprocessor, "_outputs", fail)
    message, code = error(model, request("x"))
    assert code == TritonError.INTERNAL
    assert "KeyError" in message
    assert "Traceback" not in message


def test_refusals_are_counted_by_code(model: TritonPythonModel) -> None:
    def refused(code: str) -> float:
        return MetricFamily.values.get(("llm_requests_refused_total", ("1", code, "preprocessing")), 0)

    before = {code: refused(code) for code in ("INVALID_ARG", "UNSUPPORTED")}
    model.execute([request(), request("good"), request("x", IMAGE_URL=texts("y")), request(b"\xff")])
    assert {code: refused(code) - count for code, count in before.items()} == {"INVALID_ARG": 2, "UNSUPPORTED": 1}


def test_a_missing_tokenizer_fails_the_load_with_its_path(tmp_path: Path) -> None:
    model = TritonPythonModel()
    config = {"parameters": {"tokenizer_dir": {"string_value": str(tmp_path / "nowhere")}}}
    with pytest.raises(TritonModelException, match=r"nowhere.tokenizer\.json does not exist"):
        model.initialize({**NAMES, "model_config": json.dumps(config)})


shapes = st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple)
BYTES_INPUTS = (
    "QUERY",
    "MESSAGES",
    "DECODER_QUERY",
    "BAD_WORDS_DICT",
    "STOP_WORDS_DICT",
    "EMBEDDING_BIAS_WORDS",
    "LORA_NAME",
)
NUMBER_INPUTS = ("REQUEST_OUTPUT_LEN", "END_ID", "PAD_ID", "EMBEDDING_BIAS_WEIGHTS", "PROMPT_TABLE_EXTRA_ID", "STREAM")


@pytest.fixture(scope="module")
def shared_model(tmp_path_factory: pytest.TempPathFactory) -> TritonPythonModel:
    return load(tmp_path_factory.mktemp("shared"))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_tensors_of_any_shape_are_served_or_refused_with_a_reason(
    shared_model: TritonPythonModel, data: st.DataObject
) -> None:
    tensors: dict[str, np.ndarray] = {}
    for name in data.draw(st.sets(st.sampled_from(BYTES_INPUTS))):
        shape = data.draw(st.just((1, 1)) | shapes)
        elements = st.binary(max_size=6) | st.just(b"Hello world")
        size = int(np.prod(shape))
        array = np.empty(size, object)
        array[:] = data.draw(st.lists(elements, min_size=size, max_size=size))
        tensors[name] = array.reshape(shape)
    for name in data.draw(st.sets(st.sampled_from(NUMBER_INPUTS))):
        tensors[name] = np.ones(data.draw(st.just((1, 1)) | shapes), np.int32)
    good = request("Hello")
    odd, fine = shared_model.execute([InferenceRequest(tensors), good])
    assert fine.error is None
    assert odd.error is None or odd.error.code() != TritonError.INTERNAL, odd.error.message()


def guide(kind: str, text: str = "") -> dict[str, Any]:
    return {"GUIDED_DECODING_GUIDE_TYPE": texts(kind), "GUIDED_DECODING_GUIDE": texts(text)}


@pytest.mark.parametrize(
    ("target", "kind", "text", "words"),
    [
        (
            "trtllm",
            "choice",
            '["a"]',
            "guided_decoding_guide_type choice is not enforced by target trtllm; allowed: json",
        ),
        ("trtllm", "yaml", "a: 1", "guided_decoding_guide_type is 'yaml'"),
        ("trtllm", "json_schema", "{", "is no JSON"),
        ("llmapi", "json", "", "target llmapi serves no structured output"),
    ],
)
def test_a_guide_that_a_gpu_target_would_ignore_is_refused(tmp_path, target, kind, text, words):
    message, _ = error(load(tmp_path, target=target), request("x", id="1", **guide(kind, text)))
    assert words in message


def test_a_keyword_that_a_gpu_target_ignores_is_refused_or_told(tmp_path):
    trtllm = load(tmp_path, target="trtllm")
    schema = guide("json_schema", '{"type": "integer", "minimum": 3}')
    message, _ = error(trtllm, request("x", id="1", **schema))
    assert "The keyword minimum at #/minimum cannot be enforced" in message
    loose = run(trtllm, request("x", id="1", **schema, GUIDED_DECODING_STRICT=np.array([[False]])))
    assert loose["WARNINGS"].tolist() == [[b"The keyword minimum at #/minimum is not enforced."]]


def test_guides_that_a_target_enforces_pass(tmp_path):
    trtllm = load(tmp_path / "t", target="trtllm")
    assert run(trtllm, request("x", id="1", **guide("json_schema", '{"type": "object"}'))).error is None
    assert run(load(tmp_path / "c"), request("x", **guide("choice", "checked where it is compiled"))).error is None
