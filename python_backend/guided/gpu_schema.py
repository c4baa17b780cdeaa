"""Checks a JSON schema for the XGrammar inside TensorRT-LLM (0.1.25 to 0.1.32), which takes it as it stands.

It looks at one keyword of a schema and passes over the neighbours, and gets some keywords wrong (integers one beyond
their bounds). Nothing can be rewritten on the way to it, so what it does not enforce is refused here.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from python_backend.guided.code_points import JSON_CHARS
from python_backend.guided.ecma_patterns import PYTHON, PatternProblem, rewritten
from python_backend.guided.keywords import ANNOTATIONS, Support, audit
from python_backend.guided.refusals import Refusals
from python_backend.guided.xgrammar_one_of import are_disjoint
from python_backend.guided.xgrammar_types import KEYWORDS_OF_TYPE, type_of

if TYPE_CHECKING:
    from collections.abc import Callable

SUPPORT = Support(
    keywords=frozenset(
        [
            *("type", "enum", "const", "minLength", "maxLength", "pattern", "items", "prefixItems"),
            *("maxItems", "minItems", "properties", "additionalProperties", "required", "allOf", "anyOf", "oneOf"),
            *("$ref", "$defs", "definitions"),
        ]
    ),
    formats=dict.fromkeys(("ipv4", "uuid")),
    ecma_patterns=True,
)
_HEADS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")  # it looks at the first of them, and at nothing else
_DEFINITIONS = ("$defs", "definitions")
_UNSEEN = frozenset(  # names that its cache of schemas takes for annotations wherever they stand
    ["title", "default", "description", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema"]
)


def check_schema(schema: Any, *, strict: bool, max_literal_chars: int) -> list[str]:
    """Warnings about what is not enforced, where the request puts up with it.

    Raises:
        Unsupported: with the keyword and its JSON path.
        LimitExceeded: a string in it is too long.
    """
    found = audit(schema, SUPPORT, strict=strict, max_literal_chars=max_literal_chars)
    checker = _Checker(schema, Refusals(strict))
    checker.node(found.schema, "#")
    checker.check_cache()
    return [*found.warnings, *checker.refusals.warnings]


class _Checker:
    """One pass over an audited schema."""

    def __init__(self, root: Any, refusals: Refusals) -> None:
        self._root, self.refusals = root, refusals
        self._by_key: dict[str, set[str]] = {}  # schemas by what the library's cache knows them by

    def node(self, schema: Any, path: str) -> None:
        """Check the schema at a path and those inside it."""
        if schema is False:
            self.refusals.refuse(f"The schema false at {path}")
        if not isinstance(schema, dict):
            return
        self._by_key.setdefault(_cache_key(schema), set()).add(_plain(schema))
        for keyword in _DEFINITIONS:
            for name, inner in _map(schema.get(keyword)).items():
                self.node(inner, f"{path}/{keyword}/{name}")
        asserting = [name for name in schema if name not in ANNOTATIONS and name not in _DEFINITIONS]
        head = next((name for name in _HEADS if name in schema), None)
        if head is not None:
            self._head(head, schema, path, [name for name in asserting if name != head])
        elif "type" in schema:
            names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            for name in names:
                self._type(name, schema, path)
        elif asserting:
            self.refusals.refuse(f"The keyword {asserting[0]} at {path}/{asserting[0]}, without type,")

    def check_cache(self) -> None:
        """Refuse schemas that the library would take for one another."""
        if any(len(schemas) > 1 for schemas in self._by_key.values()):
            self.refusals.refuse(
                f"A pair of schemas that differ only in properties with names such as {sorted(_UNSEEN)[2]!r}"
            )

    def _head(self, head: str, schema: dict[str, Any], path: str, others: list[str]) -> None:
        argument = schema[head]
        values = [argument] if head == "const" else argument if head == "enum" else []
        if values and others == ["type"] and isinstance(values, list) and _are_of(values, schema["type"]):
            others = []
        for name in others:
            self.refusals.refuse(f"The keyword {name} at {path}/{name}, beside {head},")
        if head == "$ref" and not self._leads_somewhere(argument):
            self.refusals.refuse(f"The keyword $ref at {path}/$ref, which leads to {argument!r},")
        if head in ("anyOf", "oneOf", "allOf") and isinstance(argument, list):
            for index, branch in enumerate(argument):
                self.node(branch, f"{path}/{head}/{index}")
            if head == "allOf" and len(argument) > 1:
                self.refusals.refuse(f"The keyword allOf at {path}/allOf, with more than one branch,")
            if head == "oneOf" and not are_disjoint(argument, self._target):
                self.refusals.refuse(f"The keyword oneOf at {path}/oneOf, whose branches may overlap,")

    def _type(self, name: str, schema: dict[str, Any], path: str) -> None:
        if name not in KEYWORDS_OF_TYPE:
            self.refusals.refuse(f"The type {name!r} at {path}/type")
            return
        checks: dict[str, Callable[[dict[str, Any], str], None]] = {
            "string": self._string,
            "array": self._array,
            "object": self._object,
        }
        if name in checks:
            checks[name](schema, path)

    def _string(self, schema: dict[str, Any], path: str) -> None:
        for name in ("minLength", "maxLength"):
            if name in schema:
                self.refusals.refuse(f"The keyword {name} at {path}/{name}, where raw control characters get through,")
        if "format" in schema and "pattern" in schema:
            self.refusals.refuse(f"The keyword pattern at {path}/pattern, beside format,")
        if "pattern" in schema:
            try:
                inside = rewritten(schema["pattern"], PYTHON, JSON_CHARS)
                problem = None if inside == rewritten(schema["pattern"], PYTHON) else "characters that need an escape"
            except PatternProblem as error:
                problem = str(error)
            if problem is not None:
                self.refusals.refuse(f"The pattern {schema['pattern']!r} at {path}/pattern, for {problem},")

    def _array(self, schema: dict[str, Any], path: str) -> None:
        if isinstance(schema.get("items"), dict):
            self.node(schema["items"], f"{path}/items")
        for index, item in enumerate(schema.get("prefixItems", [])):
            self.node(item, f"{path}/prefixItems/{index}")

    def _object(self, schema: dict[str, Any], path: str) -> None:
        properties = _map(schema.get("properties"))
        for name, inner in properties.items():
            self.node(inner, f"{path}/properties/{name}")
        additional = schema.get("additionalProperties", False)
        if isinstance(additional, dict):
            self.node(additional, f"{path}/additionalProperties")
        if additional is not False and properties:
            self.refusals.refuse(
                f"The keyword properties at {path}/properties, beside additionalProperties: a name may come twice,"
            )
        for name in schema.get("required", []):
            if name not in properties:
                self.refusals.refuse(f"The keyword required at {path}/required, for {name!r} outside properties,")

    def _leads_somewhere(self, pointer: Any) -> bool:
        return isinstance(pointer, str) and (pointer == "#" or isinstance(self._target(pointer), dict))

    def _target(self, pointer: Any) -> Any:
        """What a reference leads to, as the library resolves it; None when that is not a definition."""
        parts = pointer.split("/") if isinstance(pointer, str) else []
        if len(parts) != 3 or parts[0] != "#" or parts[1] not in _DEFINITIONS or set("~%") & set(parts[2]):
            return self._root if pointer == "#" else None
        return _map(_map(self._root).get(parts[1])).get(parts[2])


def _are_of(values: list[Any], types: Any) -> bool:
    names = types if isinstance(types, list) else [types]
    return all(
        type_of(value) in names or ("integer" in names and isinstance(value, int) and not isinstance(value, bool))
        for value in values
    )


def _plain(schema: Any, is_schema: bool = True) -> str:
    """A schema without annotations, so that those alone make no difference."""
    if isinstance(schema, list):
        return json.dumps([_plain(item) for item in schema])
    if not isinstance(schema, dict):
        return json.dumps(schema)
    literal = ("const", "enum")
    return json.dumps(
        sorted(
            (name, json.dumps(item) if is_schema and name in literal else _plain(item, not _is_map(name, is_schema)))
            for name, item in schema.items()
            if not is_schema or name not in ANNOTATIONS
        )
    )


def _is_map(name: str, is_schema: bool) -> bool:
    return is_schema and name in ("properties", *_DEFINITIONS)


def _cache_key(value: Any) -> str:
    if isinstance(value, dict):
        members = sorted((name, _cache_key(item)) for name, item in value.items() if name not in _UNSEEN)
        return json.dumps(members)
    return json.dumps([_cache_key(item) for item in value]) if isinstance(value, list) else json.dumps(value)


def _map(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
