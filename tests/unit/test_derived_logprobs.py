"""Log-probs from generation_logits: what preprocessing asks for and what postprocessing makes of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from python_backend.engine.batch_scorer import BatchScorer
from python_backend.logprobs.derive import derive_scores
from tests.unit import fake_pb_utils
from tests.unit.fake_pb_utils import InferenceRequest
from tests.unit.small_tokenizers import small_tokenizer
from tests.unit.test_postprocess import ids_of, load, request

if TYPE_CHECKING:
    from pathlib import Path

fake_pb_utils.install()

from python_backend.errors import InvalidRequest  # noqa: E402
from python_backend.triton.derived_logprobs import wants_logits  # noqa: E402

VOCAB = small_tokenizer("byte_level").vocabulary.size + 3  # padded, as models are


def logits_of(*shape: int) -> np.ndarray:
    return (np.random.default_rng(0).standard_normal((*shape, VOCAB)) * 3).astype(np.float32)


def lists(model: Any, one: InferenceRequest) -> list[list[dict]]:
    (response,) = model.execute([one])
    assert response.error is None, response.error.message()
    return [json.loads(text) for text in response["LOGPROBS"]]


@settings(max_examples=50, deadline=None)
@given(vocab=st.sampled_from([1, 7, 1000, 9000]), n=st.sampled_from([0, 1, 5, 20]), seed=st.integers(0, 99))
def test_they_equal_the_engines_own(vocab: int, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    row = np.round(rng.standard_normal(vocab) * 8, int(rng.integers(0, 3))).astype(np.float32)
    token_id = int(rng.integers(vocab))
    (found,) = derive_scores(row[None], [token_id], n)
    (score,) = BatchScorer(vocab).score([row], n)
    assert found.log_prob == pytest.approx(float(row[token_id]) - score.normalizer, abs=1e-5)
    assert found.token_ids == score.token_ids[:n]
    assert found.log_probs == pytest.approx(score.log_probs[:n], abs=1e-5)


def test_half_precision_logits_do_not_overflow() -> None:
    row = np.full((1, 60_000), 11.5, np.float16)  # the sum of their exponentials is over float16's largest number
    (found,) = derive_scores(row, [3], 1)
    assert found.log_prob == pytest.approx(-np.log(60_000), abs=1e-5)


def test_a_whole_answer_with_beams_has_a_list_for_each(tmp_path: Path) -> None:
    rows = [ids_of("Hello world"), ids_of("fox")]
    logits = logits_of(1, 2, len(rows[0]))
    found = lists(load(tmp_path), request([rows], GENERATION_LOGITS=logits, TOP_LOGPROBS=np.array([[2]], np.int32)))
    assert [[entry["id"] for entry in entries] for entries in found] == rows
    assert found[0][0]["text_offset"] == 0
    for beam, entries in enumerate(found):
        expected = derive_scores(logits[0, beam, : len(rows[beam])], rows[beam], 2)
        assert [entry["logprob"] for entry in entries] == pytest.approx([score.log_prob for score in expected])
        assert [[o["id"] for o in entry["top_logprobs"]] for entry in entries] == [s.token_ids for s in expected]


def test_a_stream_counts_its_text_along_and_ends_with_an_empty_list(tmp_path: Path) -> None:
    model = load(tmp_path, target="trtllm", top_logprobs="1")
    ids = ids_of("Größe 😀 fox")
    entries = []
    for start in range(0, len(ids), 3):
        part = ids[start : start + 3]
        (found,) = lists(model, request([[part]], id="r", GENERATION_LOGITS=logits_of(1, len(part), 1)))
        entries += found
    assert [entry["id"] for entry in entries] == ids
    assert entries[-1]["text_offset"] + len(entries[-1]["token"]) == len("Größe 😀 fox")
    assert {len(entry["top_logprobs"]) for entry in entries} == {1}
    assert lists(model, request([[[]]], id="r", GENERATION_LOGITS=logits_of(1, 0, 1))) == [[]]
    (again,) = lists(model, request([[ids[:2]]], id="r", GENERATION_LOGITS=logits_of(1, 2, 1)))
    assert again[0]["text_offset"] == 0  # the id may be used again


def test_a_prompt_in_front_of_the_answer_has_no_list(tmp_path: Path) -> None:
    ids = ids_of("Hello world")
    (found,) = lists(load(tmp_path), request([[[1, *ids]]], GENERATION_LOGITS=logits_of(1, 1, len(ids))))
    assert [entry["id"] for entry in found] == ids


def test_without_logits_there_is_no_output(tmp_path: Path) -> None:
    (response,) = load(tmp_path).execute([request([[ids_of("fox")]])])
    assert "OUTPUT" in response
    assert "LOGPROBS" not in response


@pytest.mark.parametrize("shape", [(2, 3), (1, 2, 4)])
def test_logits_of_another_shape_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    one = request([[ids_of("fox")]], GENERATION_LOGITS=logits_of(*shape))
    (response,) = load(tmp_path).execute([one])
    assert "GENERATION_LOGITS has shape" in response.error.message()


def test_logits_are_asked_for_with_log_probs_and_when_the_client_wants_them() -> None:
    count, flag = np.array([[3]], np.int32), np.array([[False]])
    assert wants_logits({}, 5, 1) is None
    assert wants_logits({"RETURN_GENERATION_LOGITS": flag}, 5, 1).tolist() == [[False]]
    assert wants_logits({"TOP_LOGPROBS": count, "RETURN_GENERATION_LOGITS": flag}, 5, 1).tolist() == [[True]]
    with pytest.raises(InvalidRequest, match=r"top_logprobs is 3; allowed: 0 to 2 \(outputs.top_logprobs of the spec"):
        wants_logits({"TOP_LOGPROBS": count}, 2, 1)
