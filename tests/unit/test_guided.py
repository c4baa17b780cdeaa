"""Guides of every kind: what they accept, what they refuse and in which words, and what a matcher promises."""

from __future__ import annotations

import json
import random

import pytest

from python_backend.errors import EngineFailure, InvalidRequest, LimitExceeded, Unsupported
from python_backend.guided.after_marker import AfterMarker
from tests.unit.guided_helpers import END_ID, LIBRARIES, VOCAB_SIZE, accepts, allowed, compiled, tokenizer

PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"first_name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
        "required": ["first_name", "age"],
        "additionalProperties": False,
    }
)
NESTED = json.dumps(
    {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": {"$ref": "#/$defs/leaf"},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["v", "next"],
                "additionalProperties": False,
            },
            "leaf": {"type": "integer", "minimum": 0},
        },
        "$ref": "#/$defs/node",
    }
)  # fmt: skip
ENUM = json.dumps({"enum": ["在线", "离线", "a/b", 'say "x"', "😀", 1.5, None, {"k": [1]}]}, ensure_ascii=False)
LARGE_ENUM = json.dumps({"enum": [f"value {i}" for i in range(3000)]})
CHOICES = json.dumps(["yes", "a|b", "(c)", "在线", 'q"\\', "a\nb", "x.*", "#1 & ~2 - 3"], ensure_ascii=False)
SUM = 'root ::= term ("+" term)*\nterm ::= [0-9]+ | "(" root ")"'
TAG = json.dumps(
    {
        "structures": [{"begin": "<f=add>", "schema": json.loads(PERSON), "end": "</f>"}],
        "triggers": ["<f="],
    }
)

ACCEPTED = [
    ("json", "", '{"a": [1, -2.5e+10, "x", null, true, {}]}'),
    ("json", "", '"é在线😀 \\n \\" \\\\ /"'),
    ("json", "", "-0.5"),
    ("json_schema", "true", "[1, 2]"),
    ("json_schema", PERSON, '{"first_name": "Zoë", "age": -3}'),
    ("json_schema", NESTED, '{"v": 1, "next": {"v": 2, "next": null}}'),
    ("json_schema", ENUM, '"在线"'),
    ("json_schema", ENUM, '"a/b"'),
    ("json_schema", ENUM, '"say \\"x\\""'),
    ("json_schema", ENUM, '{"k": [1]}'),
    ("json_schema", LARGE_ENUM, '"value 2999"'),
    ("json_schema", '{"type": "object", "required": ["a"]}', '{"a": 1, "b": 2}'),
    ("json_schema", '{"type": "array", "minItems": 2}', "[1, 2]"),
    ("json_schema", '{"type": "string", "minLength": 2, "maxLength": 2}', '"😀é"'),
    ("json_schema", '{"const": "http://example.com/path"}', '"http://example.com/path"'),
    ("json_schema", '{"type": "string", "format": "date"}', '"2024-02-29"'),
    ("json_schema", '{"type": "string", "format": "date-time"}', '"2024-02-29T23:59:59.5+01:00"'),
    ("json_schema", '{"oneOf": [{"type": "integer"}, {"type": "string"}]}', "3"),
    ("json_schema", '{"properties": {"日本": {"type": "integer"}}, "required": ["日本"]}', '{"日本": 1}'),
    ("regex", r"\d{3}-\w+", "123-ab_c"),
    ("regex", "(?i)a(b|)", "AB"),
    ("regex", r"^a/b\/c\n$", "a/b/c\n"),
    ("regex", "(?<n>é|日本)+", "é日本"),
    ("choice", CHOICES, "a|b"),
    ("choice", CHOICES, "在线"),
    ("choice", CHOICES, 'q"\\'),
    ("choice", CHOICES, "a\nb"),
    ("choice", CHOICES, "#1 & ~2 - 3"),
    ("ebnf_grammar", SUM, "(1+2)+30"),
    ("ebnf_grammar", 'root ::= "a" root | "b"', "aaab"),
    ("ebnf_grammar", 'root ::= "日" [é-ü]', "日ö"),
    ("structural_tag", TAG, "free text < f = only"),
    ("structural_tag", TAG, 'so <f=add>{"first_name": "A", "age": 1}</f> and on'),
]
REFUSED = [
    ("json", "", "nul"),
    ("json", "", "01"),
    ("json", "", "{} "),
    ("json_schema", PERSON, '{"age": 1, "first_name": "x"}'),
    ("json_schema", PERSON, '{"first_name": "123456789", "age": 1}'),
    ("json_schema", PERSON, '{"first_name": "x"}'),
    ("json_schema", PERSON, '{"first_name": "x", "age": 1.5}'),
    ("json_schema", NESTED, '{"v": -1, "next": null}'),
    ("json_schema", ENUM, '"在"'),
    ("json_schema", LARGE_ENUM, '"value 3000"'),
    ("json_schema", '{"type": "object", "required": ["a"]}', "{}"),
    ("json_schema", '{"type": "string", "minLength": 2, "maxLength": 2}', '"😀"'),
    ("json_schema", '{"type": "string", "format": "date"}', '"2023-02-29"'),
    ("json_schema", '{"type": "string", "format": "time"}', '"22:59:60Z"'),
    ("json_schema", r'{"type": "string", "pattern": "^\\S$"}', '"\ufeff"'),
    ("regex", "a+", "ab"),
    ("regex", r"\d", "٣"),
    ("regex", r"\w", "é"),
    ("choice", CHOICES, "a"),
    ("choice", CHOICES, "xyz"),
    ("ebnf_grammar", SUM, "(1+2"),
    ("structural_tag", TAG, "<f=other>"),
    ("structural_tag", TAG, '<f=add>{"first_name": "A"}</f>'),
]
BROKEN = [
    ("yaml", "a: 1", InvalidRequest, "guided_decoding_guide_type is 'yaml'; allowed: json, json_schema, regex"),
    ("json_schema", "", InvalidRequest, "guided_decoding_guide is empty"),
    ("json_schema", "{", InvalidRequest, "is no JSON: .* column 2"),
    ("json_schema", "[]", InvalidRequest, r"a schema is an object, true or false"),
    ("json_schema", '{"a": 1, "a": 2}', InvalidRequest, "key 'a' appears twice"),
    ("json_schema", '{"minimum": NaN}', InvalidRequest, "NaN is no JSON number"),
    ("json_schema", '{"type": "strin"}', InvalidRequest, "Invalid type: strin"),
    ("json_schema", '{"required": "a"}', InvalidRequest, "Expected array for 'required'"),
    ("json_schema", "false", InvalidRequest, "No text can satisfy"),
    ("json_schema", '{"$ref": "#"}', InvalidRequest, "No text can satisfy"),
    ("json_schema", '{"type": "string", "minLength": 3, "maxLength": 2}', InvalidRequest, "No text can satisfy"),
    ("json_schema", '{"$ref": "https://example.com/schema"}', InvalidRequest, "example.com"),
    ("json_schema", '{"const": "\\ud800"}', InvalidRequest, r"surrogate pair \(U\+D800\)"),
    ("json_schema", "[" * 200 + "]" * 200, LimitExceeded, "nested deeper than 100 levels"),
    ("json_schema", "[" * 100_000, LimitExceeded, "nested deeper than 100 levels"),
    ("json_schema", json.dumps({"const": "x" * 5000}), LimitExceeded, "#/const holds a string of 5000 characters"),
    ("json_schema", " " * 300_000, LimitExceeded, "has 300000 bytes; at most 262144"),
    ("json", '{"type": "object"}', InvalidRequest, "use json_schema"),
    ("regex", "(?=a)b", Unsupported, "look-ahead"),
    ("regex", "(", InvalidRequest, "unclosed group"),
    ("regex", "[]", InvalidRequest, "unclosed character class"),
    ("regex", "\ud800", InvalidRequest, "surrogate"),
    ("regex", "a" * 20_000, LimitExceeded, "has 20000 bytes"),
    ("choice", "[]", InvalidRequest, "non-empty strings"),
    ("choice", '["a", 1]', InvalidRequest, "non-empty strings"),
    ("ebnf_grammar", 'start ::= "a"', InvalidRequest, "No 'root' rule"),
    ("ebnf_grammar", "root ::= foo", InvalidRequest, "Rule 'foo' not found"),
    ("ebnf_grammar", "root ::= root", InvalidRequest, "No text can satisfy"),
    ("structural_tag", '{"structures": []}', InvalidRequest, "triggers of structural_tag is null"),
    (
        "structural_tag",
        '{"structures": [{"begin": "<a", "schema": {}}], "triggers": ["<b"]}',
        InvalidRequest,
        "starts with none of the triggers",
    ),
]


@pytest.mark.parametrize(("kind", "guide", "text"), ACCEPTED)
def test_a_text_that_satisfies_the_guide_is_accepted(kind, guide, text):
    assert accepts(kind, guide, text)


@pytest.mark.parametrize(("kind", "guide", "text"), REFUSED)
def test_a_text_that_does_not_is_refused(kind, guide, text):
    assert not accepts(kind, guide, text)


@pytest.mark.parametrize(("kind", "guide", "error", "words"), BROKEN)
def test_a_guide_that_makes_no_sense_is_refused_with_the_reason(kind, guide, error, words):
    with pytest.raises(error, match=words):
        compiled(kind, guide)


def test_white_space_is_one_form_unless_more_is_asked_for():
    forms = ["[1, 2]", "[1,2]", "[1,\n  2]"]
    schema = '{"type": "array"}'
    by_name = {name: [accepts("json_schema", schema, form, whitespace=name) for form in forms]
               for name in ("single", "compact", "free")}  # fmt: skip
    assert by_name == {"single": [True, False, False], "compact": [False, True, False], "free": [True, True, True]}
    with pytest.raises(InvalidRequest, match="guided_decoding_whitespace is 'none'; allowed: single, compact, free"):
        accepts("json", "", "1", whitespace="none")


def test_a_schema_cannot_weaken_itself_by_options_of_the_library():
    schema = '{"x-guidance": {"lenient": true, "whitespace_flexible": true}, "type": "array"}'
    assert not accepts("json_schema", schema, "[1,\n2]")


def test_the_end_is_allowed_where_the_structure_may_end_and_nowhere_else():
    matcher = compiled("regex", "ab+").start((END_ID,))
    for text, may_end in (("a", False), ("b", True), ("b", True)):
        assert (END_ID in allowed(matcher)) is False or text != "a"
        matcher.accept(tokenizer().encode(text, add_special_tokens=False)[0])
        assert (END_ID in allowed(matcher)) is may_end is matcher.is_accepting
    assert not matcher.finished


def test_an_end_id_that_is_text_ends_the_answer_and_never_stands_inside_it():
    (quote,) = tokenizer().encode('"', add_special_tokens=False)
    matcher = compiled("json_schema", '{"type": "string", "maxLength": 1}').start((quote,))
    assert quote not in allowed(matcher)
    free = compiled("regex", 'x"?').start((quote,))
    free.accept(tokenizer().encode("x", add_special_tokens=False)[0])
    assert allowed(free) >= {quote}
    assert END_ID not in allowed(free)


def test_ids_beyond_the_tokenizer_are_never_allowed():
    matcher = compiled("regex", "(?s:.*)").start((END_ID,))
    assert max(allowed(matcher)) < tokenizer().vocab_size < VOCAB_SIZE


def test_special_tokens_are_no_text():
    specials = set(tokenizer().vocabulary.special_ids) - {END_ID}
    assert specials
    assert not specials & allowed(compiled("regex", "(?s:.*)").start((END_ID,)))


def test_a_complete_structure_is_finished_at_once():
    matcher = compiled("choice", '["yes", "no"]').start((END_ID,))
    for token_id in tokenizer().encode("no", add_special_tokens=False):
        assert not matcher.finished
        matcher.accept(token_id)
    assert matcher.finished
    assert allowed(matcher) == {END_ID}


@pytest.mark.parametrize("guide", [("json_schema", PERSON), ("json_schema", ENUM), ("ebnf_grammar", SUM)])
def test_forced_tokens_are_allowed_one_by_one_and_are_the_tokenizers_own(guide):
    choose = random.Random(0)
    num_forced = 0
    for _ in range(20):
        matcher = compiled(*guide).start((END_ID,))
        for _ in range(60):
            forced = matcher.forced_tokens()
            for token_id in forced:
                assert token_id in allowed(matcher)
                matcher.accept(token_id)
            text = tokenizer().decode(forced)
            if "\ufffd" not in text:  # it begins in the middle of a character
                assert tokenizer().encode(text, add_special_tokens=False) == forced
            num_forced += len(forced)
            options = sorted(allowed(matcher) - {END_ID})
            if not options:
                break
            matcher.accept(choose.choice(options))
    assert num_forced or guide[0] == "ebnf_grammar"


@pytest.mark.parametrize("library", LIBRARIES)
def test_rolling_back_gives_the_masks_of_before(library):
    choose = random.Random(1)
    matcher = compiled("json_schema", PERSON, library=library).start((END_ID,))
    masks = []
    for _ in range(25):
        masks.append(allowed(matcher))
        matcher.accept(choose.choice(sorted(masks[-1] - {END_ID})))
    for count in (1, 3, 7):
        matcher.rollback(count)
        masks = masks[: len(masks) - count + 1]
        assert allowed(matcher) == masks[-1]
        matcher.accept(choose.choice(sorted(masks[-1] - {END_ID})))
    with pytest.raises(EngineFailure, match="cannot go back by 1000"):
        matcher.rollback(1000)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_token_that_breaks_the_structure_is_an_error_of_its_request(library):
    matcher = compiled("choice", '["yes"]', library=library).start((END_ID,))
    with pytest.raises(EngineFailure, match="breaks the structure"):
        matcher.accept(tokenizer().encode("n", add_special_tokens=False)[0])


def test_matchers_of_one_guide_do_not_touch_each_other():
    guide = compiled("regex", "[ab]{2}")
    one, other = guide.start((END_ID,)), guide.start((END_ID,))
    one.accept(tokenizer().encode("a", add_special_tokens=False)[0])
    assert allowed(other) == allowed(guide.start((END_ID,)))


def test_behind_a_marker_the_guide_begins_and_before_it_only_the_end_is_kept_away():
    matcher = compiled("choice", '["yes"]').start((END_ID,))
    mask = AfterMarker(matcher, "</think>", (END_ID,), lambda ids: tokenizer().decode(ids, skip_special_tokens=False))
    for token_id in tokenizer().encode("so 😀 it is. </think>", add_special_tokens=False):
        assert not mask.finished
        assert mask.forced_tokens() == []
        assert allowed(mask) == set(range(VOCAB_SIZE)) - {END_ID}
        mask.accept(token_id)
    assert allowed(mask) < set(range(VOCAB_SIZE))
    for token_id in tokenizer().encode("yes", add_special_tokens=False):
        mask.accept(token_id)
    assert mask.finished
