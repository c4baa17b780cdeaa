"""The postprocessing model: whole answers, streamed pieces, cuts, and a backend that sends no contexts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit import fake_pb_utils
from tests.unit.fake_pb_utils import InferenceRequest, TritonError, TritonModelException, texts
from tests.unit.small_tokenizers import KINDS, small_tokenizer, write_tokenizer_dir

if TYPE_CHECKING:
    from pathlib import Path

fake_pb_utils.install()

from python_backend.text.detokenize import context_start  # noqa: E402
from python_backend.triton.postprocess import TritonPythonModel  # noqa: E402


def load(directory: Path, kind: str = "byte_level", **parameters: str) -> TritonPythonModel:
    values = {"tokenizer_dir": str(write_tokenizer_dir(directory, kind))} | parameters
    model = TritonPythonModel()
    config = {"parameters": {key: {"string_value": value} for key, value in values.items()}}
    model.initialize({"model_config": json.dumps(config)})
    return model


def request(rows: list[list[list[int]]], id: str = "", **tensors: Any) -> InferenceRequest:
    width = max(len(ids) for beams in rows for ids in beams)
    tokens = np.full((len(rows), len(rows[0]), width), -1, np.int32)
    for b, beams in enumerate(rows):
        for k, ids in enumerate(beams):
            tokens[b, k, : len(ids)] = ids
    lengths = np.array([[len(ids) for ids in beams] for beams in rows], np.int32)
    return InferenceRequest({"TOKENS_BATCH": tokens, "SEQUENCE_LENGTH": lengths} | tensors, id=id)


def run(model: TritonPythonModel, one: InferenceRequest) -> list[str]:
    (response,) = model.execute([one])
    assert response.error is None
    output = response["OUTPUT"]
    assert output.ndim == 1
    return [text.decode() for text in output]


def ids_of(text: str, kind: str = "byte_level") -> list[int]:
    return small_tokenizer(kind).encode(text, add_special_tokens=False)


def test_a_classic_request_gives_one_text_for_each_beam_in_order(tmp_path: Path) -> None:
    rows = [[ids_of("Hello world"), ids_of("Hi")], [ids_of("fox"), ids_of("")]]
    assert run(load(tmp_path), request(rows)) == ["Hello world", "Hi", "fox", ""]


def test_special_tokens_are_skipped_unless_the_parameter_says_otherwise(tmp_path: Path) -> None:
    rows = [[[1, *ids_of("fox"), 2]]]
    assert run(load(tmp_path), request(rows)) == ["fox"]
    assert run(load(tmp_path, skip_special_tokens="False"), request(rows)) == ["<s>fox</s>"]


def test_a_wrong_parameter_fails_the_load(tmp_path: Path) -> None:
    with pytest.raises(TritonModelException, match="skip_special_tokens is 'maybe'"):
        load(tmp_path, skip_special_tokens="maybe")


def stream(model: TritonPythonModel, ids: list[int], kind: str, size: int, cut: int = 0) -> list[str]:
    tokenizer, pieces = small_tokenizer(kind), []
    for sent in range(0, len(ids), size):
        context = ids[context_start(tokenizer, ids, sent) : sent]
        tensors: dict[str, Any] = {"DETOKENIZE_CONTEXT": np.array([[[-1, *context]]], np.int32)}
        if sent + size >= len(ids):
            tensors |= {"FINISH_REASON": texts("stop"), "TEXT_CUT": np.array([[cut]], np.int32)}
        pieces += run(model, request([[ids[sent : sent + size]]], **tensors))
    return pieces


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 3])
def test_streamed_pieces_join_to_the_whole(tmp_path: Path, kind: str, size: int) -> None:
    text = "Hello world, the quick brown fox. 你好 😀!"
    ids = ids_of(text, kind)
    pieces = stream(load(tmp_path, kind), ids, kind, size)
    assert "".join(pieces) == small_tokenizer(kind).decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_the_cut_counts_characters_not_bytes(tmp_path: Path) -> None:
    model = load(tmp_path)
    assert "".join(stream(model, ids_of("stop 你😀é"), "byte_level", 100, cut=3)) == "stop "
    assert run(model, request([[ids_of("ab")]], TEXT_CUT=np.array([[9]], np.int32))) == [""]


def test_an_empty_last_piece_releases_what_was_held_back(tmp_path: Path) -> None:
    model = load(tmp_path)
    half = ids_of("ÿ")[:1]
    empty = np.zeros((1, 1, 0), np.int32)
    assert run(model, request([[half]], DETOKENIZE_CONTEXT=empty)) == [""]
    last = {"DETOKENIZE_CONTEXT": np.array([[half]], np.int32), "FINISH_REASON": texts("length")}
    assert run(model, request([[[]]], **last)) == ["\ufffd"]


def test_a_backend_without_contexts_streams_right_by_request_id(tmp_path: Path) -> None:
    model = load(tmp_path, "llama", target="trtllm")
    ids = {"a": ids_of("The quick 你好", "llama"), "b": ids_of("lazy dog", "llama")}
    texts_by_id = {"a": "", "b": ""}
    for n in range(max(map(len, ids.values()))):
        for name, row in ids.items():
            texts_by_id[name] += run(model, request([[row[n : n + 1]]], id=name))[0]
    assert texts_by_id == {"a": "The quick 你好", "b": "lazy dog"}
    assert run(model, request([[[]]], id="a")) == [""]
    assert run(model, request([[ids["b"]]], id="a")) == ["lazy dog"]


def test_tensors_that_do_not_fit_are_refused_and_harm_no_other(tmp_path: Path) -> None:
    model = load(tmp_path)
    good, bad = request([[ids_of("fox")]]), request([[ids_of("fox")]], DETOKENIZE_CONTEXT=np.zeros((1, 2, 1), np.int32))
    responses = model.execute([good, bad, good])
    assert [response.error is None for response in responses] == [True, False, True]
    assert "DETOKENIZE_CONTEXT has shape [1, 2, 1]" in responses[1].error.message()


def test_ids_outside_the_vocabulary_show_nothing(tmp_path: Path) -> None:
    assert run(load(tmp_path), request([[[*ids_of("fox"), 2_000_000_000]]])) == ["fox"]


@pytest.fixture(scope="module")
def shared_models(tmp_path_factory: pytest.TempPathFactory) -> list[TritonPythonModel]:
    return [load(tmp_path_factory.mktemp("cpu")), load(tmp_path_factory.mktemp("backend"), target="trtllm")]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_tensors_of_any_shape_are_decoded_or_refused_with_a_reason(
    shared_models: list[TritonPythonModel], data: st.DataObject
) -> None:
    tensors: dict[str, np.ndarray] = {}
    names = ("TOKENS_BATCH", "SEQUENCE_LENGTH", "DETOKENIZE_CONTEXT", "TEXT_CUT", "BATCH_INDEX", "SEQUENCE_INDEX")
    for name in data.draw(st.sets(st.sampled_from(names))):
        shape = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
        size = int(np.prod(shape))
        values = data.draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=size, max_size=size))
        tensors[name] = np.array(values, np.int32).reshape(shape)
    for model in shared_models:
        (response,) = model.execute([InferenceRequest(tensors, id="x")])
        assert response.error is None or response.error.code() != TritonError.INTERNAL, response.error.message()
