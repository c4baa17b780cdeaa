"""Word lists in the contract's layout, both ways, and bias words."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from python_backend.errors import InvalidRequest
from python_backend.text.bias import embedding_bias
from python_backend.text.words import bad_word_ids, clean_words, pack_words, stop_word_ids, unpack_words
from tests.unit.small_tokenizers import KINDS, small_tokenizer

word = st.lists(st.integers(0, 50_000), min_size=1, max_size=6).map(tuple)


def test_the_layout_is_that_of_the_contract() -> None:
    assert pack_words([[(5, 6), (7,)]]).tolist() == [[[5, 6, 7], [2, 3, -1]]]
    assert pack_words([[], []]).shape == (2, 2, 0)
    assert pack_words([[(5,)], []]).tolist() == [[[5], [1]], [[0], [-1]]]
    assert pack_words([[(5,)]]).dtype == np.int32


@given(st.lists(st.lists(word, max_size=5), min_size=1, max_size=4))
def test_what_is_packed_comes_back(batch: list[list[tuple[int, ...]]]) -> None:
    assert [unpack_words(row, "stop_words_list") for row in pack_words(batch)] == batch


@pytest.mark.parametrize(
    ("packed", "text"),
    [
        ([[1, 2], [2, 3]], "out-of-bound offsets"),
        ([[1, 2], [-2, 1]], "out-of-bound offsets"),
        ([[1, 2, 3], [2, 1, -1]], "non-increasing offsets"),
        ([[1, 2, 3], [-1, 2, 3]], "additional -1s"),
        ([[1, 2, 3]], "Invalid format for word list"),
    ],
)
def test_a_malformed_list_is_refused_by_name(packed: list[list[int]], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text) as caught:
        unpack_words(np.array(packed, np.int32), "bad_words_list")
    assert "bad_words_list" in str(caught.value)


def test_upstreams_list_of_empty_words_means_none() -> None:
    assert unpack_words(np.array([[0], [-1]], np.int32), "stop_words_list") == []


def test_a_text_and_a_list_are_both_words_and_empty_ones_are_skipped() -> None:
    assert clean_words("stop", "stop_words") == ["stop"]
    assert clean_words(["", "a", "a", "b", ""], "stop_words") == ["a", "b"]


@pytest.mark.parametrize("kind", KINDS)
def test_words_never_get_a_bos(kind: str) -> None:
    tokenizer = small_tokenizer(kind)
    for words in (stop_word_ids(tokenizer, ["dog", " dog"])[0], bad_word_ids(tokenizer, ["dog"])[0]):
        assert words
        assert all(tokenizer.bos_id not in ids for ids in words)


def test_a_bad_word_is_banned_with_and_without_the_space_before_it() -> None:
    tokenizer = small_tokenizer("byte_level")
    ids, warnings = bad_word_ids(tokenizer, ["dog"])
    assert {tokenizer.decode(form) for form in ids} == {"dog", " dog"}
    assert not warnings


def test_the_text_of_a_special_token_is_that_token_as_a_stop_word() -> None:
    assert stop_word_ids(small_tokenizer("llama"), ["</s>"])[0] == [(2,)]


def test_a_word_outside_the_vocabulary_is_warned_about_and_left_out() -> None:
    ids, warnings = stop_word_ids(small_tokenizer("wordpiece"), ["☃", "dog"])
    assert len(ids) == 1
    assert "'☃'" in warnings[0]


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"stop_words has a lone surrogate U\+D800 at character 1"):
        clean_words("a\ud800", "stop_words")


def test_bias_adds_up_on_every_token_of_every_word() -> None:
    tokenizer = small_tokenizer("byte_level")
    (space,) = tokenizer.encode(" ", add_special_tokens=False)
    bias = embedding_bias(tokenizer, [" ", "", " "], [1.5, 9.0, -0.5])
    assert bias[space] == 1.0
    assert np.count_nonzero(bias) == 1
    assert (bias.shape, bias.dtype) == ((tokenizer.vocab_size,), np.float32)


def test_bias_refuses_other_counts_and_numbers_that_are_none() -> None:
    tokenizer = small_tokenizer("byte_level")
    with pytest.raises(InvalidRequest, match=r"1 words and .* 2 weights"):
        embedding_bias(tokenizer, ["a"], [1.0, 2.0])
    with pytest.raises(InvalidRequest, match="embedding_bias_weights is nan"):
        embedding_bias(tokenizer, ["a"], [float("nan")])
