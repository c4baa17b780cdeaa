"""What llguidance enforces of JSON Schema; docs/guided.md has what the official suite found. Plain data."""

from __future__ import annotations

from typing import Any

from python_backend.guided.formats import DATE, DATE_TIME, EMAIL, TIME
from python_backend.guided.keywords import Support

_OTHER_SIDE = {"exclusiveMinimum": ("maximum", "exclusiveMaximum"), "exclusiveMaximum": ("minimum", "exclusiveMinimum")}


def problem(keyword: str, schema: dict[str, Any]) -> str | None:
    """A whole number as an exclusive bound is let through when the other bound is less than one away."""
    bound = schema[keyword]
    if keyword not in _OTHER_SIDE or schema.get("type") == "integer" or not _is_number(bound) or bound != int(bound):
        return None
    near = [schema[name] for name in _OTHER_SIDE[keyword] if _is_number(schema.get(name))]
    return "with the other bound less than one away" if any(0 < abs(other - bound) < 1 for other in near) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


SUPPORT = Support(
    keywords=frozenset(
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
            "items",
            "prefixItems",
            "additionalItems",
            "maxItems",
            "minItems",
            "properties",
            "patternProperties",
            "additionalProperties",
            "required",
            "maxProperties",
            "minProperties",
            "allOf",
            "anyOf",
            "oneOf",
            "$ref",
            "$defs",
            "definitions",
        ]
    ),
    formats={
        "date": DATE,
        "time": TIME,
        "date-time": DATE_TIME,
        "email": EMAIL,
        **dict.fromkeys(("duration", "hostname", "ipv4", "ipv6", "uri", "uuid")),
    },
    problem=problem,
)
