"""XGrammar as the backend: the same answers, what it would pass over in silence, and what its matcher promises."""

from __future__ import annotations

import json
import random

import pytest

from python_backend.errors import BuildError, EngineFailure, InvalidRequest, RequestError, Unsupported
from python_backend.guided import xgrammar_library
from python_backend.guided.backends import make_backend
from python_backend.guided.compiler import GuideCompiler
from python_backend.guided.limits import GuideLimits
from python_backend.request import Guide
from tests.unit import guided_helpers
from tests.unit.guided_helpers import END_ID, NEEDS_XGRAMMAR, VOCAB_SIZE, allowed, tokenizer, write_tokenizer_json
from tests.unit.small_tokenizers import fast_tokenizer_json
from tests.unit.test_guided import ACCEPTED, ENUM, PERSON, REFUSED, SUM, TAG
from tests.unit.test_guided_compiler import ANY_OF_4, MANY, chain

pytestmark = NEEDS_XGRAMMAR
WITHOUT = ("(?i)a(b|)",)  # regular expressions that XGrammar has no form for


def accepts(kind: str, guide: object, text: str, **options: object) -> bool:
    guide = guide if isinstance(guide, str) else json.dumps(guide)
    return guided_helpers.accepts(kind, guide, text, library="xgrammar", **options)


def start(kind: str, guide: str, **options: object):
    return guided_helpers.compiled(kind, guide, library="xgrammar", **options).start((END_ID,))


@pytest.mark.parametrize(("kind", "guide", "text"), [case for case in ACCEPTED if case[1] not in WITHOUT])
def test_a_text_that_satisfies_the_guide_is_accepted(kind, guide, text):
    assert accepts(kind, guide, text)


@pytest.mark.parametrize(("kind", "guide", "text"), REFUSED)
def test_a_text_that_does_not_is_refused(kind, guide, text):
    assert not accepts(kind, guide, text)


CLOSED = {"type": "object", "additionalProperties": False}
A = {"properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "minLength": 2, "maxLength": 3}, '"ab"', '"a\tb"'),  # no raw control characters
        ({"type": "string", "pattern": "^[^é]+$"}, '"ab"', '"a"b"'),  # no quote out of a class
        ({"type": "string", "pattern": "b"}, '"abc"', '"ac"'),  # a pattern is searched for
        ({"minLength": 2}, "1", '"a"'),  # without a type it is about strings and nothing else
        ({"type": "object", "required": ["a"]}, '{"a": 1}', "{}"),
        ({"type": "object", **A}, '{"a": 1, "b": "x"}', '{"\\u0061": "x"}'),  # no name in a second spelling
        ({"type": "object", "properties": {"é": {"type": "integer"}}}, '{"ê": "x"}', '{"é": "x"}'),
        ({"type": "object", "properties": {"a": False}}, '{"b": 1}', '{"a": 1}'),
        ({"type": "string", "enum": ["a", 1]}, '"a"', "1"),
        ({"const": {"a": [1, 2]}}, '{"a": [1, 2]}', '{"a": [1]}'),
        ({"allOf": [A, {"required": ["a"]}, {"maxProperties": 1}], "type": "object"}, '{"a": 1}', '{"a": 1, "b": 2}'),
        ({"allOf": [{"minimum": 3}, {"type": "integer"}]}, "4", "2"),
        ({"$ref": "#/$defs/n", "maximum": 5, "$defs": {"n": {"type": "integer"}}}, "5", "6"),
        ({"type": "object", **A, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, '{"b": 1}', '{"c": 1}'),
        ({"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 30}, "14", "15"),
        ({"type": "integer", "multipleOf": 1.5}, "3", "2"),
        ({"type": "integer", "minimum": 1.5}, "2", "1"),
        ({**CLOSED, "patternProperties": {"^x": {"type": "integer"}}}, '{"xy": 1}', '{"y": 1}'),
        ({**CLOSED, "patternProperties": {"^x": {"type": "integer"}}}, "{}", '{"xy": "1"}'),
        ({"type": "array", "prefixItems": [{"type": "null"}, False]}, "[null]", "[null, 1]"),
        ({"oneOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]}, '"x"', "2"),
        ({"type": ["integer", "null"], "minimum": 3}, "null", "2"),
        ({"type": "string", "format": "email"}, '"a.b@c.example"', '"a.b@c..example"'),
        ({"properties": {"a": {"$ref": "#/properties/b~1c"}, "b/c": {"type": "null"}}}, '{"a": null}', '{"a": 1}'),
    ],
)
def test_keywords_that_it_passes_over_in_silence_are_rewritten(schema, good, bad):
    assert accepts("json_schema", schema, good)
    assert not accepts("json_schema", schema, bad)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "number", "multipleOf": 0.1}, "keyword multipleOf at #/multipleOf, for numbers with a fraction"),
        ({"type": "integer", "multipleOf": 3, "minimum": 0}, "multipleOf at #/multipleOf, with one bound only"),
        ({"type": "integer", "multipleOf": 2048}, "multipleOf at #/multipleOf, above 1024"),
        ({"type": "string", "pattern": "(?=a)b"}, r"pattern '\(\?=a\)b' at #/pattern"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "maxLength at #/maxLength, beside pattern"),
        ({"type": "string", "pattern": "a", "format": "date"}, "format at #/format, beside pattern"),
        ({"enum": ["ab", "c"], "minLength": 2}, "minLength at #/minLength, beside enum"),
        ({"type": "object", "minProperties": 2}, "minProperties at #/minProperties, beside names"),
        ({"items": {"oneOf": [{"minimum": 1}, {"maximum": 3}]}}, "oneOf at #/items/oneOf, whose branches"),
        ({"allOf": [{"additionalProperties": False}, A]}, "additionalProperties at #/allOf/1 beside"),
        ({"$ref": "other.json"}, "leads to 'other.json' outside this schema"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$id": "b"}}}, r"beside the \$id at #/\$defs/a/\$id"),
        ({**CLOSED, "patternProperties": {"a": {"type": "null"}, "b": {}}}, "patterns that may overlap"),
        ({**A, "patternProperties": {"a": {"type": "null"}}}, "a pattern that 'a' matches"),
        ({"type": "number", "minimum": 0.12345678}, "minimum at #/minimum, with more than 6 decimals"),
        ({"uniqueItems": True}, "uniqueItems at #/uniqueItems"),
    ],
)  # fmt: skip
def test_what_it_cannot_enforce_is_refused_by_name_or_told(schema, words):
    with pytest.raises(Unsupported, match=words):
        accepts("json_schema", schema, "1")
    made = guided_helpers.backend("xgrammar")
    grammar = made.grammar(guided_helpers.check_guide(Guide("json_schema", json.dumps(schema), strict=False)))
    assert grammar.warnings


def test_what_nothing_satisfies_is_refused():
    for schema in (
        {"type": "string", "enum": [1]},
        False,
        {"type": "object", "required": ["a"], "properties": {"a": False}},
    ):
        with pytest.raises(InvalidRequest, match="No text can satisfy"):
            accepts("json_schema", schema, "1")


def test_white_space_is_one_form_unless_more_is_asked_for():
    texts = ('{"a": [1, 2], "b": {"c": 1, "d": [3, 4]}}', '{"a":[1,2],"b":{"c":1,"d":[3,4]}}', '{ "a" : [1, \n2] }')
    for kind, guide in (("json", ""), ("json_schema", '{"properties": {"a": {"type": "array"}}}')):
        by_name = {
            name: [accepts(kind, guide, text, whitespace=name) for text in texts]
            for name in ("single", "compact", "free")
        }
        assert by_name == {"single": [True, False, False], "compact": [False, True, False], "free": [True, True, True]}


def test_an_escape_writes_what_needs_one_and_no_half_of_a_pair():
    assert accepts("json", "", '"\\n \\" \\\\ \\u001f é😀 /"')
    assert not any(accepts("json", "", f'"{escape}"') for escape in ("\\ud83d", "\\u0061", "\\/", "\\u00e9"))


@pytest.mark.parametrize(
    ("kind", "guide"),
    [
        ("json_schema", '{"type": "string"}'),
        ("json_schema", '{"type": "string", "maxLength": 9}'),
        ("json_schema", '{"type": "string", "pattern": "."}'),
        ("ebnf_grammar", 'root ::= "\\"" [^"]* "\\""  # [^x]'),
        ("regex", '"[^"]*"'),
    ],
)
def test_every_character_is_written_as_utf_8_has_it(kind, guide):
    ids = byte_tokens()
    good = [b"\xc3\xa9", b"\xed\x9f\xbf", b"\xf4\x8f\xbf\xbf"]
    for raw in [*good, b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\x80"]:
        matcher = start(kind, guide)
        try:
            for byte in b'"' + raw + b'"':
                matcher.accept(ids[byte])
            taken = matcher.is_accepting
        except EngineFailure:
            taken = False
        assert taken is (raw in good), raw


def byte_tokens() -> dict[int, int]:
    """Tokens of one byte each."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain}
    letters |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in plain)}
    vocabulary = json.loads(fast_tokenizer_json("byte_level"))["model"]["vocab"]
    return {byte: vocabulary[letter] for byte, letter in letters.items()}


def test_the_end_is_the_requests_and_special_tokens_are_no_text():
    (quote,) = tokenizer().encode('"', add_special_tokens=False)
    guide = guided_helpers.compiled("regex", 'x"?', library="xgrammar")
    matcher = guide.start((quote,))
    assert quote not in allowed(matcher)
    matcher.accept(tokenizer().encode("x", add_special_tokens=False)[0])
    assert allowed(matcher) >= {quote}
    assert END_ID not in allowed(matcher)
    free = allowed(start("regex", ".*"))
    assert max(free) < tokenizer().vocab_size < VOCAB_SIZE
    assert free & set(tokenizer().vocabulary.special_ids) == {END_ID}


def test_a_complete_structure_is_finished_at_once():
    matcher = start("choice", '["yes", "no"]')
    for token_id in tokenizer().encode("no", add_special_tokens=False):
        assert not matcher.finished
        matcher.accept(token_id)
    assert matcher.finished
    matcher.rollback(1)
    assert not matcher.finished
    assert not start("regex", "a*").finished


@pytest.mark.parametrize(
    "guide", [("json_schema", PERSON), ("json_schema", ENUM), ("ebnf_grammar", SUM), ("structural_tag", TAG)]
)
def test_forced_tokens_are_allowed_one_by_one(guide):
    choose = random.Random(0)
    num_forced = 0
    for _ in range(20):
        matcher = start(*guide)
        for _ in range(60):
            forced = matcher.forced_tokens()
            for token_id in forced:
                assert token_id in allowed(matcher)
                matcher.accept(token_id)
            num_forced += len(forced)
            options = sorted(allowed(matcher) - {END_ID})
            if not options:
                break
            matcher.accept(choose.choice(options))
    assert num_forced or guide[0] in ("ebnf_grammar", "structural_tag")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", json.dumps({"type": "object", "properties": MANY})),
        ("json_schema", json.dumps({"allOf": [{"anyOf": ANY_OF_4}] * 12})),
        ("json_schema", chain(6000)),
        ("regex", "(" * 8000 + "a" + ")" * 8000),
        ("json_schema", json.dumps({"pattern": "^(\\\\w{1,900}é){1,900}$", "type": "string"})),
        ("ebnf_grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
        ("ebnf_grammar", "root ::= root root | root"),
        ("ebnf_grammar", "root ::= [a"),
    ],
)  # fmt: skip
def test_hostile_guides_are_refused_and_the_next_one_is_served(hostile_compiler, kind, text):
    error = hostile_compiler.submit(Guide(kind, text)).exception(timeout=120)
    assert isinstance(error, RequestError)
    assert hostile_compiler.submit(Guide("regex", "after")).result(timeout=120)


@pytest.fixture(scope="module")
def hostile_compiler(tmp_path_factory):
    path = write_tokenizer_json(tmp_path_factory.mktemp("tokenizer"))
    limits = GuideLimits(num_workers=1, compile_cpu_s=1.0)
    made = GuideCompiler(path, VOCAB_SIZE, (END_ID,), backend="xgrammar", limits=limits)
    made.start()
    yield made
    made.stop()


def test_without_the_package_the_message_says_how_to_get_it(monkeypatch):
    xgrammar_library.load_library.cache_clear()
    monkeypatch.setattr(xgrammar_library, "is_installed", lambda: False)
    with pytest.raises(BuildError, match="make setup EXTRA=xgrammar"):
        make_backend("xgrammar", GuideLimits())
    with pytest.raises(BuildError, match="allowed: llguidance, xgrammar"):
        make_backend("outlines", GuideLimits())
