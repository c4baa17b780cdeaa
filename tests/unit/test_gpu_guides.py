"""Guides for TensorRT-LLM's own XGrammar: what that passes over in silence or gets wrong is refused beforehand."""

from __future__ import annotations

import json

import pytest

from python_backend.errors import Unsupported
from python_backend.guided.gpu_targets import check_for_target
from python_backend.request import Guide

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}


def check(schema: object, strict: bool = True) -> list[str]:
    return check_for_target(Guide("json_schema", json.dumps(schema), strict=strict), "trtllm")


@pytest.mark.parametrize(
    "schema",
    [
        {**OBJECT, "required": ["a"], "additionalProperties": False, "title": "T"},
        {"type": "array", "items": {"enum": ["a", 1, None]}, "minItems": 1, "maxItems": 3},
        {"anyOf": [{"type": "string", "pattern": "^[a-z]{2}-[0-9]+$"}, {"type": "null"}], "default": None},
        {"$ref": "#/$defs/n", "$defs": {"n": {**OBJECT, "description": "n"}}},
        {"type": "string", "enum": ["a", "b"]},
        {"oneOf": [{"type": "boolean"}, {"type": "string", "format": "uuid"}]},
        {"allOf": [{"type": "integer"}], "description": "one"},
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {},
    ],
)
def test_what_it_enforces_passes(schema):
    assert check(schema) == []


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "minimum": 3}, "minimum at #/minimum"),
        ({"type": "integer", "multipleOf": 3}, "multipleOf at #/multipleOf"),
        ({"type": "string", "maxLength": 3}, "maxLength at #/maxLength, where raw control characters"),
        ({"type": "string", "pattern": "[^a]"}, "characters that need an escape"),
        ({"type": "string", "pattern": "(?=a)"}, r"#/pattern, for \(\?="),
        ({"type": "string", "format": "date"}, "format 'date' at #/format"),
        ({"items": {"type": "string"}}, "items at #/items, without type"),
        ({"type": "array", "items": {"not": {}}}, "not at #/items/not"),
        ({**OBJECT, "required": ["b"]}, "for 'b' outside properties"),
        ({**OBJECT, "additionalProperties": True}, "a name may come twice"),
        ({**OBJECT, "anyOf": [{"type": "object"}]}, "type at #/type, beside anyOf"),
        ({"allOf": [OBJECT, OBJECT]}, "with more than one branch"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "whose branches may overlap"),
        ({"$ref": "#anchor"}, r"\$ref at #/\$ref, which leads to '#anchor'"),
        ({"type": "integer", "enum": ["a"]}, "type at #/type, beside enum"),
        ({"type": "array", "prefixItems": [{"const": {"title": 1}}, {"const": {"title": 2}}]}, "differ only in"),
        (
            {"anyOf": [{"type": "object", "properties": {"title": {"type": kind}}} for kind in ("string", "null")]},
            "differ only in",
        ),
    ],
)
def test_what_it_does_not_is_refused_or_told(schema, words):
    with pytest.raises(Unsupported, match=words):
        check(schema)
    assert check(schema, strict=False)


def test_other_kinds_and_targets():
    assert check_for_target(Guide("json"), "trtllm") == []
    assert check_for_target(Guide("regex", r"\d+-[a-z]*"), "trtllm") == []
    with pytest.raises(Unsupported, match=r"not enforced by target trtllm: it has \(\?="):
        check_for_target(Guide("regex", "(?=a)b"), "trtllm")
    with pytest.raises(Unsupported, match="structural_tag is not enforced by target trtllm; allowed: json, "):
        check_for_target(Guide("structural_tag", "{}"), "trtllm")
    with pytest.raises(Unsupported, match="target llmapi serves no structured output"):
        check_for_target(Guide("json"), "llmapi")
