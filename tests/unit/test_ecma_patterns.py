"""Patterns in normal form match what the patterns matched, inside the characters that may be written."""

from __future__ import annotations

import re

import pytest

from python_backend.guided.code_points import JSON_CHARS, TEXT_CHARS, Ranges
from python_backend.guided.ecma_patterns import PYTHON, PatternProblem, all_but, rewritten

TEXTS = [
    "",
    "a",
    "b",
    "ab",
    "aab",
    "xax",
    "12-é",
    "é",
    "😀",
    "a b",
    "\ufeff",
    "A",
    "_",
    "-",
    "]",
    "a-b",
    "{}",
    "^a$",
    "/",
]


def normal_form(pattern: str, chars: Ranges = TEXT_CHARS, search: bool = False) -> re.Pattern[str]:
    return re.compile(rewritten(pattern, PYTHON, chars, search=search))


@pytest.mark.parametrize(
    "pattern",
    [
        *("a", "a|b", "^a|b$", "^a*b+?$", "[^a]", "[a-c]{1,2}", r"\d\d-\w", r"[\w-]+", r"[\]\-x]", "(?:a|b){2}"),
        *("^$", "", r"^[^\W_]+$", "(?<name>a)b", ".", "^.$", r"é|\u{1F600}", r"\ud83d\ude00", r"\x61", r"\u0061"),
        *(r"\^a\$", r"^\{\}$"),
    ],
)  # fmt: skip
def test_a_normal_form_finds_what_the_pattern_finds(pattern):
    plain = re.compile(
        pattern.replace("(?<name>", "(?:").replace(r"\u{1F600}", "😀").replace(r"\ud83d\ude00", "😀"), re.ASCII
    )
    searched, whole = normal_form(pattern, search=True), normal_form(pattern)
    for text in TEXTS:
        assert bool(searched.fullmatch(text)) == bool(plain.search(text)), text
        if "^" not in pattern and "$" not in pattern:
            assert bool(whole.fullmatch(text)) == bool(plain.fullmatch(text)), text


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        *(("(?=a)b", r"\(\?="), ("(?<!a)b", r"\(\?<"), (r"(a)\1", r"\\1"), (r"\bword", r"\\b"), ("a(^b)", "anchor")),
        *(("(a", "too early"), ("a)", r"a \) without"), ("[b-a]", "a range"), ("*a", r"a bare \*"), ("[a", "too")),
        *((r"\p{L}", r"\\p"), ("a**", "a repetition"), ("a{x}", "repetition"), ("a{2,1}", "repetition")),
        (r"\ud800a", "escape"),
    ],
)  # fmt: skip
def test_what_has_no_normal_form_is_named(pattern, words):
    with pytest.raises(PatternProblem, match=words):
        normal_form(pattern, JSON_CHARS)


def test_a_class_loses_what_a_json_string_has_to_escape_and_a_lone_character_is_refused():
    some = normal_form("[^a]", JSON_CHARS)
    assert [char for char in 'ab"\\\n\té' if some.fullmatch(char)] == ["b", "é"]
    with pytest.raises(PatternProblem, match="need an escape"):
        normal_form('say "x"', JSON_CHARS)


def test_all_but_some_words():
    others = re.compile(all_but(["a", "abc", "é", 'q"'], PYTHON, JSON_CHARS))
    texts = ["", "a", "ab", "abc", "abcd", "b", "é", "éé", "e", "q", "😀"]
    assert [text for text in texts if not others.fullmatch(text)] == ["a", "abc", "é"]
    assert re.compile(all_but(["", "a"], PYTHON, JSON_CHARS)).fullmatch("") is None
