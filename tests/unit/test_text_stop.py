"""Stop strings end the text at the same character, however tokens and characters fall."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from python_backend.errors import LimitExceeded
from python_backend.text.stop import StopText
from tests.unit.small_tokenizers import KINDS, small_tokenizer


def first_end(text: str, words: list[str]) -> tuple[int, int] | None:
    """Start and end of the first complete word by brute force; at one end the longest."""
    for end in range(1, len(text) + 1):
        found = [word for word in words if word and text[:end].endswith(word)]
        if found:
            return end - max(map(len, found)), end
    return None


def generate(kind: str, ids: list[int], words: list[str], exclude: bool) -> tuple[str, str, bool]:
    """Text shown token by token as an engine would, the final text, and whether it stopped."""
    tokenizer = small_tokenizer(kind)
    stop = StopText(tokenizer, words, exclude)
    shown = ""
    for count in range(1, len(ids) + 1):
        cut = stop.push(ids[count - 1])
        if cut is not None:
            whole = tokenizer.decode(ids[:count])
            assert 0 <= cut <= len(whole)
            return shown, whole[: len(whole) - cut], True
        assert 0 <= stop.held_tokens() <= count
        shown = tokenizer.decode(ids[: count - stop.held_tokens()]).rstrip("\ufffd")
    return shown, tokenizer.decode(ids), False


words_strategy = st.lists(st.text("ab \n你😀", min_size=1, max_size=4), min_size=1, max_size=4)


@pytest.mark.parametrize("kind", ["byte_level", "llama", "gemma"])
@pytest.mark.parametrize("exclude", [False, True])
@settings(max_examples=200, deadline=None)
@given(text=st.text("ab \n你😀", max_size=24), words=words_strategy)
@example(text="aab", words=["ab"])
@example(text="abab", words=["abaa", "ba"])
@example(text="a😀b", words=["😀b", "b"])
def test_the_text_ends_where_a_naive_search_says(kind: str, exclude: bool, text: str, words: list[str]) -> None:
    tokenizer = small_tokenizer(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(ids)
    shown, final, stopped = generate(kind, ids, words, exclude)
    place = first_end(whole, words)
    assert stopped == (place is not None)
    if place is not None:
        assert final == whole[: place[0] if exclude else place[1]]
    assert final.startswith(shown)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exclude", [False, True])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_nothing_shown_is_taken_back_for_any_tokens(kind: str, exclude: bool, data: st.DataObject) -> None:
    tokenizer = small_tokenizer(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=20))
    whole = tokenizer.decode(ids)
    start = data.draw(st.integers(0, len(whole)))
    # An unfinished character is no text yet, so a stop string cannot match it.
    word = whole[start : start + data.draw(st.integers(1, 6))].replace("\ufffd", "") or "x"
    shown, final, _ = generate(kind, ids, [word], exclude)
    assert final.startswith(shown)
    assert word not in (final if exclude else final[:-1])


def test_a_stop_word_inside_a_token_cuts_the_text_exactly() -> None:
    tokenizer = small_tokenizer("byte_level")
    token = tokenizer.encode("Hello", add_special_tokens=False)
    stop = StopText(tokenizer, "ll")
    cuts = [stop.push(token_id) for token_id in token]
    text = tokenizer.decode(token[: next(i for i, cut in enumerate(cuts) if cut is not None) + 1])
    assert text[: len(text) - next(cut for cut in cuts if cut is not None)] == "Hell"


def test_the_cut_counts_the_replacement_character_of_a_broken_tail() -> None:
    tokenizer = small_tokenizer("llama")
    byte = {value: i for i, value in tokenizer.vocabulary.byte_values.items()}
    stop = StopText(tokenizer, "ab")
    ids = tokenizer.encode("ab", add_special_tokens=False)
    assert [stop.push(token_id) for token_id in ids][-1] == 0
    late = StopText(tokenizer, "😀")
    assert [late.push(byte[b]) for b in "😀".encode()] == [None, None, None, 0]


def test_tokens_are_held_only_while_a_stop_string_may_come() -> None:
    tokenizer = small_tokenizer("gemma")
    stop = StopText(tokenizer, "\n\n", exclude=True)
    held = []
    for token_id in tokenizer.encode("a\nb\n", add_special_tokens=False):
        stop.push(token_id)
        held.append(stop.held_tokens())
    assert held == [0, 1, 0, 1]


def test_a_caller_that_may_not_stop_yet_finds_the_next_match() -> None:
    tokenizer = small_tokenizer("gemma")
    ids = tokenizer.encode("a\n\nb\n\n", add_special_tokens=False)
    for exclude, cut in ((False, 0), (True, 2)):
        stop = StopText(tokenizer, "\n\n", exclude)
        cuts = [found for found in map(stop.push, ids) if found is not None]
        assert cuts == [cut, cut]
        assert stop.held_tokens() == (1 if exclude else 0)  # the last line break may begin a third


def test_without_exclude_nothing_is_held() -> None:
    tokenizer = small_tokenizer("gemma")
    stop = StopText(tokenizer, ["\n\n"])
    stop.push(tokenizer.encode("\n", add_special_tokens=False)[0])
    assert stop.held_tokens() == 0


def test_empty_strings_and_one_plain_string_are_accepted() -> None:
    tokenizer = small_tokenizer("byte_level")
    ids = tokenizer.encode("fox\n", add_special_tokens=False)
    assert [cut for cut in map(StopText(tokenizer, "\n").push, ids) if cut is not None] == [0]
    assert all(StopText(tokenizer, ["", ""]).push(token_id) is None for token_id in ids)


def test_too_many_or_too_long_words_are_refused_with_the_limit() -> None:
    tokenizer = small_tokenizer("byte_level")
    with pytest.raises(LimitExceeded, match="257 words; at most 256"):
        StopText(tokenizer, [str(n) for n in range(257)])
    with pytest.raises(LimitExceeded, match="5000 characters; at most 4096"):
        StopText(tokenizer, "x" * 5000)
