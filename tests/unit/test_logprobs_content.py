"""Tokens, bytes, offsets and numbers of a list of log-probabilities, for every kind of tokenizer."""

from __future__ import annotations

import json
import math
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from python_backend.logprobs.content import ContentWriter, prompt_content
from python_backend.logprobs.tokens import TokenTable
from tests.unit.small_tokenizers import CORPUS, small_tokenizer

KINDS = ("byte_level", "llama", "gemma", "metaspace")


class Scores(NamedTuple):
    log_prob: float = -1.5
    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    masked: float | None = None


def table_of(kind: str) -> TokenTable:
    return TokenTable(small_tokenizer(kind))


def chunks_of(ids: list[int], sizes: list[int]) -> list[list[int]]:
    found, start = [], 0
    for size in sizes:
        found.append(ids[start : start + size])
        start += size
    return [*found, ids[start:]]


def entries_of(table: TokenTable, ids: list[int], sizes: list[int] = ()) -> list[dict]:
    writer = ContentWriter(table)
    return [
        entry
        for chunk in chunks_of(ids, list(sizes))
        for entry in json.loads(writer.write(chunk, [Scores() for _ in chunk]))
    ]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(text=st.one_of(st.sampled_from(CORPUS), st.text(max_size=20)), sizes=st.lists(st.integers(0, 5), max_size=8))
def test_offsets_point_into_the_text_however_it_is_cut_into_chunks(kind: str, text: str, sizes: list[int]) -> None:
    table = table_of(kind)
    ids = table.tokenizer.encode(text, add_special_tokens=False)
    entries = entries_of(table, ids, sizes)
    assert entries == entries_of(table, ids)
    assert [entry["id"] for entry in entries] == ids
    whole = table.tokenizer.decode(ids)
    offsets = [entry["text_offset"] for entry in entries]
    assert offsets == sorted(offsets)
    for index, entry in enumerate(entries):
        assert whole[: entry["text_offset"]] == _settled(table.tokenizer.decode(ids[:index]))


def _settled(text: str) -> str:
    return text[:-1] if text.endswith("\ufffd") else text


@pytest.mark.parametrize("text", CORPUS)
def test_bytes_of_byte_level_tokens_join_to_the_text(text: str) -> None:
    table = table_of("byte_level")
    entries = entries_of(table, table.tokenizer.encode(text, add_special_tokens=False))
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == text
    for entry in entries:
        assert entry["token"] == bytes(entry["bytes"]).decode("utf-8", "backslashreplace")
        assert "\ufffd" not in entry["token"]


def test_a_character_split_over_tokens_keeps_one_offset_and_readable_bytes() -> None:
    table = table_of("byte_level")
    ids = table.tokenizer.encode("a\U0001f9ffb", add_special_tokens=False)  # an emoji the vocabulary has not seen
    entries = entries_of(table, ids)
    parts = entries[1:-1]
    assert len(parts) > 1
    assert {entry["text_offset"] for entry in parts} == {1}
    assert entries[-1]["text_offset"] == 2
    assert parts[0]["token"].startswith("\\xf0")


def test_special_tokens_show_no_text_but_are_named() -> None:
    table = table_of("byte_level")
    special = table.tokenizer.encode("<|im_end|>", add_special_tokens=False)
    hello = table.tokenizer.encode("Hello", add_special_tokens=False)
    entries = entries_of(table, [*hello, *special, *hello])
    named = entries[len(hello)]
    assert (named["token"], named["bytes"], named["text_offset"]) == ("<|im_end|>", None, 5)
    assert entries[len(hello) + 1]["text_offset"] == 5


def test_tokens_behind_a_cut_are_left_out() -> None:
    table = table_of("byte_level")
    ids = table.tokenizer.encode("ab 1 2 3", add_special_tokens=False)
    scores = [Scores() for _ in ids]
    whole = json.loads(ContentWriter(table).write(ids, scores))
    for cut in range(1, 8):
        left = json.loads(ContentWriter(table).write(ids, scores, text_cut=cut))
        assert left == [entry for entry in whole if entry["text_offset"] < 8 - cut]


def test_numbers_order_and_the_share_that_a_mask_removed() -> None:
    table = table_of("byte_level")
    scores = [Scores(-0.25, (7, 9), (-0.25, -2.0), 0.125), Scores(1e-9), Scores(-math.inf)]
    first, second, third = json.loads(ContentWriter(table).write([7, 8, 9], scores))
    assert list(first) == ["token", "bytes", "id", "logprob", "text_offset", "masked_probability", "top_logprobs"]
    assert first["masked_probability"] == 0.125
    assert [(e["id"], e["logprob"]) for e in first["top_logprobs"]] == [(7, -0.25), (9, -2.0)]
    assert (second["logprob"], third["logprob"]) == (0.0, -9999.0)
    assert "masked_probability" not in second


def test_ids_behind_the_vocabulary_are_harmless() -> None:
    table = table_of("byte_level")
    (entry,) = entries_of(table, [table.vocabulary.size + 5])
    assert (entry["token"], entry["bytes"]) == ("", None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_spells_its_special_tokens_and_its_first_token_has_no_number(kind: str) -> None:
    table = table_of(kind)
    ids = table.tokenizer.encode("<|im_start|>Hello world", add_special_tokens=False)
    entries = json.loads(prompt_content(table, ids, [Scores() for _ in ids[1:]]))
    assert [entry["id"] for entry in entries] == ids
    assert entries[0]["logprob"] is None
    assert entries[0]["token"] == "<|im_start|>"
    assert entries[1]["text_offset"] == len("<|im_start|>")
