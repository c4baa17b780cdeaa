"""What llguidance enforces of JSON Schema; docs/guided.md has what the official suite found. Plain data."""

from __future__ import annotations

from python_backend.guided.formats import DATE, DATE_TIME, TIME
from python_backend.guided.keywords import Support

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
        **dict.fromkeys(("duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")),
    },
)
