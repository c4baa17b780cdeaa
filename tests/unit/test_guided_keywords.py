"""The audit of JSON schemas: enforced, an annotation, or refused by name and path; nothing weakens in silence."""

from __future__ import annotations

import json

import pytest

from python_backend.errors import Unsupported
from python_backend.guided.keywords import ASSERTIONS, Support, audit, ecma_spaces
from python_backend.guided.llguidance_support import SUPPORT
from tests.unit.guided_helpers import accepts, backend, compiled


def audited(schema, strict=True, support=SUPPORT):
    return audit(schema, support, strict=strict, max_literal_chars=100)


@pytest.mark.parametrize("keyword", sorted(ASSERTIONS - SUPPORT.keywords - {"format"}))
def test_what_is_not_enforced_is_refused_with_keyword_and_path(keyword):
    companions = {"then": {"if": True}, "else": {"if": True}, "if": {"then": False}}
    companions |= {name: {"contains": {"type": "null"}} for name in ("minContains", "maxContains")}
    argument = {"dependentRequired": {"a": ["b"]}, "dependentSchemas": {"a": False}, "dependencies": {"a": ["b"]},
                "uniqueItems": True, "minContains": 1, "maxContains": 1}.get(keyword, {"type": "null"})  # fmt: skip
    schema = {"properties": {"a/b": {keyword: argument, **companions.get(keyword, {})}}}
    if keyword in ("$dynamicAnchor", "$recursiveAnchor"):  # say nothing without the reference, which is refused
        assert "properties" in audited(schema).schema
        return
    with pytest.raises(Unsupported, match=r"The keyword \S+ at #/properties/a~1b/\S+ cannot be enforced\..*strict"):
        audited(schema)
    found = audited(schema, strict=False)
    assert keyword not in found.schema["properties"]["a/b"]
    assert any(f"#/properties/a~1b/{keyword} is not enforced" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    "schema",
    [
        {"uniqueItems": False},
        {"unevaluatedProperties": True},
        {"unevaluatedItems": {}},
        {"minContains": 2},
        {"then": False},
        {"if": False},
        {"dependentRequired": {}},
        {"propertyNames": True},
    ],
)
def test_a_keyword_that_can_refuse_nothing_is_dropped(schema):
    assert audited(schema).schema == {}


def test_annotations_pass_and_unknown_keywords_are_told():
    schema = {"title": "t", "default": 1, "x-order": 2, "requried": ["a"]}
    found = audited(schema)
    assert found.schema == {"title": "t", "default": 1}
    assert found.warnings == ["#/requried is no JSON-Schema keyword and has no effect."]


def test_an_unknown_format_is_refused_by_name_where_it_could_matter():
    with pytest.raises(Unsupported, match=r"The format 'iri' at #/items/format cannot be enforced\. Formats that are"):
        audited({"items": {"format": "iri"}})
    found = audited({"type": "integer", "format": "int32"})
    assert found.schema == {"type": "integer"}
    assert "says nothing about values of type integer" in found.warnings[0]


def test_properties_may_have_the_names_of_keywords():
    schema = {"properties": {"not": {"type": "null"}, "format": {"const": "x"}}, "enum": [{"not": None, "format": "x"}]}
    assert audited(schema).schema == schema
    assert accepts("json_schema", json.dumps(schema), '{"not": null, "format": "x"}')


def test_a_format_beside_pattern_and_all_of_is_enforced_with_them():
    schema = {"format": "date", "pattern": "^2024", "allOf": [{"pattern": "-01$"}]}
    assert accepts("json_schema", json.dumps(schema), '"2024-05-01"')
    assert not accepts("json_schema", json.dumps(schema), '"2024-05-02"')
    assert not accepts("json_schema", json.dumps(schema), '"2023-05-01"')


def test_one_of_whose_branches_overlap_is_refused_or_named():
    schema = '{"oneOf": [{"type": "integer"}, {"minimum": 2}]}'
    with pytest.raises(Unsupported, match=r"The keyword oneOf cannot be enforced.*Use anyOf"):
        compiled("json_schema", schema)
    assert accepts("json_schema", schema, "3", strict=False)
    from python_backend.guided.guide import check_guide
    from python_backend.request import Guide

    grammar = backend().grammar(check_guide(Guide("json_schema", schema, strict=False)))
    assert "oneOf is enforced as anyOf" in grammar.warnings[0]


def test_a_backend_with_less_support_refuses_more():
    less = Support(SUPPORT.keywords - {"multipleOf"}, {})
    with pytest.raises(Unsupported, match="multipleOf at #/multipleOf"):
        audited({"multipleOf": 2}, support=less)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [(r"\s", r"[\s\x{FEFF}]"), (r"[\S]", r"[[^\s\x{FEFF}]]"), (r"\\s", r"\\s"), (r"\d\\", r"\d\\"), ("\\", "\\")],
)
def test_white_space_in_patterns_is_ecmas(pattern, expected):
    assert ecma_spaces(pattern) == expected
