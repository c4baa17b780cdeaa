"""What XGrammar enforces of JSON Schema, after `xgrammar_schema` has rewritten it. Plain data."""

from __future__ import annotations

from python_backend.guided.formats import DATE, DATE_TIME, DURATION, EMAIL, HOSTNAME, IPV4, TIME, UUID
from python_backend.guided.keywords import Support

# Patterns stand for formats: XGrammar's own ones let more through.
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": DATE_TIME,
    "duration": DURATION,
    "email": EMAIL,
    "hostname": HOSTNAME,
    "ipv4": IPV4,
    "uuid": UUID,
}
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
    formats=dict.fromkeys(FORMATS),
    ecma_patterns=True,
)
MAX_MULTIPLE_OF = 1024  # the library ignores a larger one
MAX_MULTIPLE_OF_RANGE = 10_000  # integers between the bounds beside multipleOf; it ignores that as well
MAX_COUNT = 2**31 - 2  # of items, properties, characters
MAX_INTEGER = 2**63 - 2  # of a bound or a constant
MAX_DECIMALS = 6  # of a number's bound
MAX_NUMBER = 1e15  # of a number's bound
