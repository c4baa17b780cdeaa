"""Audits a JSON schema keyword by keyword: enforced by the backend, an annotation, or refused with its path.

Knows nothing of grammars. `Support` is what a backend says of itself; the vocabulary is that of draft 2020-12.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from python_backend.errors import LimitExceeded
from python_backend.guided.refusals import Refusals

if TYPE_CHECKING:
    from collections.abc import Callable

# Say something about a schema, assert nothing about an instance.
ANNOTATIONS = frozenset(
    [
        "title",
        "description",
        "default",
        "deprecated",
        "readOnly",
        "writeOnly",
        "examples",
        "$comment",
        "$schema",
        "$id",
        "id",
        "$anchor",
        "$vocabulary",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "discriminator",
    ]
)
_SUBSCHEMA = frozenset(
    [
        "items",
        "additionalItems",
        "additionalProperties",
        "contains",
        "propertyNames",
        "not",
        "if",
        "then",
        "else",
        "unevaluatedItems",
        "unevaluatedProperties",
    ]
)
_LIST = frozenset(["prefixItems", "allOf", "anyOf", "oneOf"])
_MAP = frozenset(["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"])
# Every keyword of draft 2020-12 that can refuse an instance, and those of older drafts that still can.
ASSERTIONS = frozenset(
    [
        "type",
        "enum",
        "const",
        "multipleOf",
        "maximum",
        "exclusiveMaximum",
        "minimum",
        "exclusiveMinimum",
        "maxLength",
        "minLength",
        "pattern",
        "maxItems",
        "minItems",
        "uniqueItems",
        "maxContains",
        "minContains",
        "maxProperties",
        "minProperties",
        "required",
        "dependentRequired",
        "format",
        "$ref",
        "$dynamicRef",
        "$dynamicAnchor",
        "$recursiveRef",
        "$recursiveAnchor",
        "dependencies",
    ]
) | (_SUBSCHEMA | _LIST | _MAP)


# Keywords that mean something beside one of these only.
_NEEDS = {
    "minContains": ("contains",),
    "maxContains": ("contains",),
    "if": ("then", "else"),
    "then": ("if",),
    "else": ("if",),
    "$dynamicAnchor": (),
    "$recursiveAnchor": (),
}
# Arguments with which a keyword allows everything.
_EMPTY: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "propertyNames": (True, {}),
    "additionalItems": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
}


@dataclass(frozen=True, slots=True)
class Support:
    """What a backend enforces.

    Attributes:
        keywords: assertions it enforces.
        formats: for each format it enforces a pattern that takes its place, or None to hand it over as it is.
        ecma_patterns: patterns mean what ECMA-262 says without our help.
        problem: why a keyword is not enforced beside its neighbours (keyword, schema); None when it is.
    """

    keywords: frozenset[str]
    formats: dict[str, str | None]
    ecma_patterns: bool = False
    problem: Callable[[str, dict[str, Any]], str | None] = lambda keyword, schema: None


@dataclass(slots=True)
class Audit:
    """The schema as the backend gets it, and what has to be told."""

    schema: Any
    warnings: list[str] = field(default_factory=list)


def audit(schema: Any, support: Support, *, strict: bool, max_literal_chars: int) -> Audit:
    """Check every keyword of a schema.

    Args:
        schema: parsed JSON; left as it is.
        support: of the backend in use.
        strict: refuse what is not enforced; else drop it and say so.
        max_literal_chars: of a string that has to appear as it is.

    Raises:
        Unsupported: with the keyword and its JSON path.
        LimitExceeded: a const, enum value or property name is too long.
    """
    walk = _Walk(support, strict, max_literal_chars)
    return Audit(walk.schema(schema, "#"), walk.warnings)


class _Walk:
    """One pass over a schema."""

    def __init__(self, support: Support, strict: bool, max_literal_chars: int) -> None:
        self._support, self._max_literal_chars = support, max_literal_chars
        self._refusals = Refusals(strict)
        self.warnings = self._refusals.warnings

    def schema(self, value: Any, path: str) -> Any:
        """The rewritten schema at a path."""
        if not isinstance(value, dict):
            return value  # true, false, or something that the backend refuses
        kept: dict[str, Any] = {}
        for keyword, argument in value.items():
            self._keyword(keyword, argument, value, f"{path}/{_escaped(keyword)}", kept)
        pattern = self._support.formats.get(kept.get("format", ""))
        if pattern is not None:
            del kept["format"]
            kept["allOf"] = [*kept.get("allOf", []), {"pattern": pattern}]
        return kept

    def _keyword(self, keyword: str, argument: Any, siblings: dict[str, Any], path: str, kept: dict[str, Any]) -> None:
        if keyword in ANNOTATIONS:
            kept[keyword] = argument
        elif keyword not in ASSERTIONS:
            if not keyword.startswith("x-"):
                self.warnings.append(f"{path} is no JSON-Schema keyword and has no effect.")
        elif _says_nothing(keyword, argument, siblings):
            return
        elif keyword == "format":
            self._format(argument, siblings, path, kept)
        elif keyword not in self._support.keywords:
            self._refusals.refuse(f"The keyword {keyword} at {path}")
        elif (problem := self._support.problem(keyword, siblings)) is not None:
            self._refusals.refuse(f"The keyword {keyword} at {path}, {problem},")
        else:
            self._check_literals(keyword, argument, path)
            kept[keyword] = self._below(keyword, argument, path)

    def _below(self, keyword: str, argument: Any, path: str) -> Any:
        if keyword in _SUBSCHEMA:
            return self.schema(argument, path)
        if keyword in _LIST and isinstance(argument, list):
            return [self.schema(item, f"{path}/{index}") for index, item in enumerate(argument)]
        if keyword in _MAP and isinstance(argument, dict):
            items = argument.items()
            if keyword == "patternProperties":
                return {self._pattern(name): self.schema(item, f"{path}/{_escaped(name)}") for name, item in items}
            return {name: self.schema(item, f"{path}/{_escaped(name)}") for name, item in items}
        if keyword == "pattern" and isinstance(argument, str):
            return self._pattern(argument)
        return argument

    def _pattern(self, pattern: str) -> str:
        return pattern if self._support.ecma_patterns else ecma_spaces(pattern)

    def _format(self, name: Any, siblings: dict[str, Any], path: str, kept: dict[str, Any]) -> None:
        types = siblings.get("type", "string")
        if "string" not in (types if isinstance(types, list) else [types]):
            self.warnings.append(
                f"The format {name!r} at {path} says nothing about values of type {types} and has no effect."
            )
            return
        if not isinstance(name, str) or name not in self._support.formats:
            known = ", ".join(sorted(self._support.formats))
            self._refusals.refuse(f"The format {name!r} at {path}", f" Formats that are: {known}.")
            return
        kept["format"] = name

    def _check_literals(self, keyword: str, argument: Any, path: str) -> None:
        if keyword in ("const", "enum"):
            longest = max(map(len, _strings(argument)), default=0)
        elif keyword == "properties" and isinstance(argument, dict):
            longest = max(map(len, argument), default=0)
        else:
            return
        if longest > self._max_literal_chars:
            raise LimitExceeded(
                f"{path} holds a string of {longest} characters; at most {self._max_literal_chars} are allowed."
            )


def _says_nothing(keyword: str, argument: Any, siblings: dict[str, Any]) -> bool:
    """Whether a keyword in this place can refuse no instance at all."""
    if keyword in _NEEDS:
        return not any(name in siblings for name in _NEEDS[keyword])
    return any(argument is value or (value == {} and argument == {}) for value in _EMPTY.get(keyword, ()))


def ecma_spaces(pattern: str) -> str:
    r"""A pattern whose \s and \S mean what ECMA-262 says: U+FEFF is white space."""
    parts: list[str] = []
    escaped = False
    for char in pattern:
        if escaped:
            parts.append({"s": r"[\s\x{FEFF}]", "S": r"[^\s\x{FEFF}]"}.get(char, f"\\{char}"))
            escaped = False
        elif char == "\\":
            escaped = True
        else:
            parts.append(char)
    return "".join(parts) + ("\\" if escaped else "")


def _strings(value: Any) -> list[str]:
    found: list[str] = []
    open_values = [value]
    while open_values:
        item = open_values.pop()
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, dict):
            found += item
            open_values += item.values()
        elif isinstance(item, list):
            open_values += item
    return found


def _escaped(name: str) -> str:
    """A reference token of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
