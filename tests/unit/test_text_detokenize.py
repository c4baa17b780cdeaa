"""Streamed pieces join to the decoded whole, for every kind of tokenizer and every way to cut the stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from python_backend.text import detokenize
from python_backend.text.detokenize import Detokenizer, DetokenizerTable, context_start, decode_delta
from tests.unit.small_tokenizers import CORPUS, KINDS, small_tokenizer

if TYPE_CHECKING:
    from python_backend.text.tokenizer import Tokenizer

TEXTS = [*CORPUS, " leading and  double   spaces\n\n  after lines ", "😀😀👨‍👩‍👧", "日本語とEnglish 混ざる"]


def chunks(ids: list[int], sizes: list[int]) -> list[list[int]]:
    result, at = [], 0
    for size in sizes:
        result.append(ids[at : at + size])
        at += size
    result.append(ids[at:])
    return result


def stateless(tokenizer: Tokenizer, pieces: list[list[int]], skip: bool = True) -> list[str]:
    ids: list[int] = []
    texts = []
    for n, piece in enumerate(pieces):
        context = ids[context_start(tokenizer, ids, len(ids)) :]
        assert len(context) <= detokenize.MAX_CONTEXT_TOKENS
        texts.append(decode_delta(tokenizer, context, piece, final=n == len(pieces) - 1, skip_special_tokens=skip))
        ids += piece
    return texts


def stateful(tokenizer: Tokenizer, pieces: list[list[int]], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip)
    return [detokenizer.push(piece, final=n == len(pieces) - 1) for n, piece in enumerate(pieces)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_of_random_ids_join_to_the_whole(kind: str, data: st.DataObject) -> None:
    tokenizer = small_tokenizer(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    sizes = data.draw(st.lists(st.integers(0, 4), max_size=30))
    skip = data.draw(st.booleans())
    whole = tokenizer.decode(ids, skip)
    assert "".join(stateless(tokenizer, chunks(ids, sizes), skip)) == whole
    assert "".join(stateful(tokenizer, chunks(ids, sizes), skip)) == whole


@pytest.mark.parametrize("kind", ["byte_level", "llama", "gemma"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_of_random_bytes_join_to_the_whole(kind: str, data: st.DataObject) -> None:
    """Most tokens are single bytes here, so that characters break in every way."""
    tokenizer = small_tokenizer(kind)
    pool = [*tokenizer.encode("é你😀\ufffd", add_special_tokens=False), 2]
    ids = data.draw(st.lists(st.sampled_from(pool), max_size=40))
    sizes = data.draw(st.lists(st.integers(0, 3), max_size=40))
    whole = tokenizer.decode(ids)
    assert "".join(stateless(tokenizer, chunks(ids, sizes))) == whole
    assert "".join(stateful(tokenizer, chunks(ids, sizes))) == whole


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_token_by_token_shows_no_broken_character_and_every_space(kind: str, text: str) -> None:
    tokenizer = small_tokenizer(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stateless(tokenizer, [[i] for i in ids])
    whole = tokenizer.decode(ids)
    assert "".join(pieces) == whole
    assert not any("\ufffd" in piece for piece in pieces)
    if kind in ("byte_level", "gemma"):
        assert whole == text


def test_a_character_cut_by_the_end_is_shown_as_one_replacement_character() -> None:
    tokenizer = small_tokenizer("byte_level")
    ids = tokenizer.encode("ok ÿ", add_special_tokens=False)[:-1]
    assert stateless(tokenizer, [ids])[-1] == tokenizer.decode(ids) == "ok �"


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_one_bad_byte_does_not_spoil_the_characters_around_it(kind: str) -> None:
    tokenizer = small_tokenizer(kind)
    byte = {value: i for i, value in tokenizer.vocabulary.byte_values.items()}
    ids = [byte[b] for b in "你".encode()] + [byte[0xFF]] + [byte[b] for b in "好".encode()]
    assert tokenizer.decode(ids) == "你\ufffd好"


@pytest.mark.parametrize("kind", KINDS)
def test_decode_equals_the_library_where_all_bytes_are_whole(kind: str) -> None:
    tokenizer = small_tokenizer(kind)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == tokenizer._fast.decode(ids)
        assert tokenizer.decode(ids, False) == tokenizer._fast.decode(ids, skip_special_tokens=False)


def test_the_context_is_a_single_token_in_plain_text() -> None:
    tokenizer = small_tokenizer("llama")
    ids = tokenizer.encode("The quick brown fox", add_special_tokens=False)
    assert context_start(tokenizer, ids, len(ids)) == len(ids) - 1
    assert context_start(tokenizer, ids, 0) == 0


def test_an_endless_run_of_special_tokens_keeps_the_context_bounded() -> None:
    tokenizer = small_tokenizer("byte_level")
    ids = [tokenizer.bos_id or 0] * 1000
    assert len(ids) - context_start(tokenizer, ids, len(ids)) == detokenize.MAX_CONTEXT_TOKENS


def test_streams_with_their_own_ids_do_not_mix() -> None:
    tokenizer = small_tokenizer("llama")
    table = DetokenizerTable(tokenizer)
    first = tokenizer.encode("The quick brown fox", add_special_tokens=False)
    second = tokenizer.encode("你好 world", add_special_tokens=False)
    texts = {"a": "", "b": ""}
    for n in range(max(len(first), len(second))):
        texts["a"] += table.push("a", first[n : n + 1])
        texts["b"] += table.push("b", second[n : n + 1])
    assert texts == {"a": "The quick brown fox", "b": "你好 world"}


def test_a_finished_or_idle_stream_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = small_tokenizer("byte_level")
    now = [0.0]
    monkeypatch.setattr(detokenize.time, "monotonic", lambda: now[0])
    table = DetokenizerTable(tokenizer, max_streams=3, max_idle_s=10.0)
    table.push("finished", [300])
    table.push("finished", [301], final=True)
    assert len(table) == 0
    for name in "abcd":
        table.push(name, [300])
    assert len(table) == 3
    now[0] = 11.0
    table.push("late", [300])
    assert len(table) == 1
