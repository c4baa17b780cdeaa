"""A guide as the request names it, checked as far as that needs no tokenizer, and normalised.

Knows nothing of any constraint backend; what a backend cannot enforce is found by `keywords`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from python_backend.errors import InvalidRequest, LimitExceeded, Unsupported
from python_backend.guided.limits import GuideLimits

if TYPE_CHECKING:
    from python_backend.request import Guide

GuideKind = Literal["json", "json_schema", "regex", "ebnf_grammar", "choice", "structural_tag"]
Whitespace = Literal["single", "compact", "free"]
KINDS: tuple[str, ...] = get_args(GuideKind)
WHITESPACE: tuple[str, ...] = get_args(Whitespace)
_TAG_KEYS = frozenset({"structures", "triggers", "separator", "stop_after_first"})
_WITH_EXPRESSION = ("regex", "ebnf_grammar")


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """Free text becomes constrained at `trigger`: `begin` (which starts with it), JSON by `schema`, `end`."""

    trigger: str
    begin: str
    schema: Any
    end: str


@dataclass(frozen=True, slots=True)
class CheckedGuide:
    """A guide whose outer form is right. Which field is set depends on the kind."""

    kind: GuideKind
    strict: bool = True
    whitespace: Whitespace = "single"
    schema: Any = None  # json, json_schema: parsed
    expression: str = ""  # regex, ebnf_grammar
    choices: tuple[str, ...] = ()
    tags: tuple[StructuralTag, ...] = ()
    separator: str | None = None  # structural_tag: set, the answer is nothing but structures with this between them
    stop_after_first: bool = False  # structural_tag: the answer ends with its first structure


def check_kind(kind: str) -> GuideKind:
    """The kind, if it is one of the six.

    Raises:
        InvalidRequest: it is not.
    """
    if kind not in KINDS:
        raise InvalidRequest(f"guided_decoding_guide_type is {kind!r}; allowed: {', '.join(KINDS)}.")
    return cast("GuideKind", kind)


def check_guide(guide: Guide, limits: GuideLimits | None = None) -> CheckedGuide:
    """Parse a guide and check its form and size.

    Raises:
        InvalidRequest: unknown kind, no JSON, or not what the kind asks for.
        LimitExceeded: it is larger or deeper than `limits` allow.
    """
    limits = limits or GuideLimits()
    kind = check_kind(guide.kind)
    if guide.whitespace not in WHITESPACE:
        raise InvalidRequest(f"guided_decoding_whitespace is {guide.whitespace!r}; allowed: {', '.join(WHITESPACE)}.")
    whitespace = cast("Whitespace", guide.whitespace)
    _check_size(guide, limits)
    if kind == "json":
        # Clients that always send both tensors send a guide that says nothing.
        if guide.text.strip() not in ("", "{}", "true"):
            raise InvalidRequest("A guide of type json takes no guided_decoding_guide: use json_schema for a schema.")
        return CheckedGuide(kind, guide.strict, whitespace, schema={})
    if not guide.text.strip():
        raise InvalidRequest(f"guided_decoding_guide is empty; a guide of type {kind} needs one.")
    if kind in _WITH_EXPRESSION:
        return CheckedGuide(kind, guide.strict, expression=guide.text)
    value = parse_json(guide.text, kind, limits)
    if kind == "json_schema":
        if not isinstance(value, dict | bool):
            raise InvalidRequest(f"The JSON schema is {_short(value)}; a schema is an object, true or false.")
        return CheckedGuide(kind, guide.strict, whitespace, schema=value)
    if kind == "choice":
        return CheckedGuide(kind, guide.strict, choices=_choices(value, limits))
    tags = _tags(value)
    separator, stop_after_first = value.get("separator"), value.get("stop_after_first", False)
    if not isinstance(separator, str | None) or not isinstance(stop_after_first, bool):
        raise InvalidRequest("separator of structural_tag is a string, stop_after_first is true or false.")
    return CheckedGuide(
        kind, guide.strict, whitespace, tags=tags, separator=separator, stop_after_first=stop_after_first
    )


def parse_json(text: str, what: str, limits: GuideLimits) -> Any:
    """A JSON text as Python values; numbers that JSON does not have (NaN, Infinity) are refused.

    Raises:
        InvalidRequest: it is no JSON.
        LimitExceeded: it is nested deeper than allowed.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_object)
    except RecursionError:
        raise _too_deep(what, limits) from None
    except ValueError as error:
        raise InvalidRequest(f"guided_decoding_guide of type {what} is no JSON: {error}.") from None
    if _deeper_than(value, limits.max_depth):
        raise _too_deep(what, limits)
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} appears twice in one object")
    return found


def _too_deep(what: str, limits: GuideLimits) -> LimitExceeded:
    return LimitExceeded(f"guided_decoding_guide of type {what} is nested deeper than {limits.max_depth} levels.")


def _deeper_than(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return any(isinstance(item, dict | list) for item in level)


def _check_size(guide: Guide, limits: GuideLimits) -> None:
    limit = limits.max_expression_bytes if guide.kind in _WITH_EXPRESSION else limits.max_guide_bytes
    size = len(guide.text.encode("utf-8", "surrogatepass"))
    if size > limit:
        raise LimitExceeded(
            f"guided_decoding_guide of type {guide.kind} has {size} bytes; at most {limit} are allowed."
        )


def _choices(value: Any, limits: GuideLimits) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
        raise InvalidRequest(f"A guide of type choice is a JSON list of non-empty strings, not {_short(value)}.")
    longest = max(map(len, value))
    if longest > limits.max_literal_chars:
        raise LimitExceeded(f"A choice has {longest} characters; at most {limits.max_literal_chars} are allowed.")
    return tuple(dict.fromkeys(value))


def _tags(value: Any) -> tuple[StructuralTag, ...]:
    if not isinstance(value, dict) or not isinstance(value.get("structures"), list):
        raise InvalidRequest(
            'A guide of type structural_tag is {"structures": [{"begin", "schema", "end"}, …], "triggers": […]}, '
            f"not {_short(value)}."
        )
    unknown = sorted(value.keys() - _TAG_KEYS - {"type"})
    if unknown:
        raise Unsupported(f"structural_tag has the key {unknown[0]!r}; known: {', '.join(sorted(_TAG_KEYS))}.")
    triggers = value.get("triggers")
    if not isinstance(triggers, list) or not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise InvalidRequest(f"triggers of structural_tag is {_short(triggers)}; give a list of non-empty strings.")
    if not value["structures"]:
        raise InvalidRequest("structures of structural_tag is empty; give at least one.")
    return tuple(_tag(entry, index, triggers) for index, entry in enumerate(value["structures"]))


def _tag(entry: Any, index: int, triggers: list[str]) -> StructuralTag:
    place = f"structures[{index}] of structural_tag"
    if not isinstance(entry, dict) or entry.keys() - {"begin", "schema", "end"}:
        raise InvalidRequest(f"{place} is {_short(entry)}; it has begin, schema and end only.")
    begin, end, schema = entry.get("begin"), entry.get("end", ""), entry.get("schema", {})
    if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, dict):
        raise InvalidRequest(f"{place} is {_short(entry)}; begin and end are strings, schema is an object.")
    for trigger in triggers:
        if begin.startswith(trigger):
            return StructuralTag(trigger, begin, schema, end)
    raise InvalidRequest(f"{place} begins with {begin!r}, which starts with none of the triggers {triggers}.")


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:80]}…"


def utf8(text: str) -> str:
    """The text itself.

    Raises:
        InvalidRequest: it holds half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"The guide holds half of a surrogate pair (U+{ord(text[error.start]):04X}), which no UTF-8 text can have."
        ) from None
    return text
