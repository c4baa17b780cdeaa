"""Extraction: a note in prose, and a JSON Schema that the answer has to follow."""

from __future__ import annotations

import json
from typing import Any

from loadtests.workloads.base import Item, Workload, log_normal

_SCHEMAS: tuple[dict[str, Any], ...] = (
    {
        "type": "object",
        "properties": {"place": {"type": "string", "maxLength": 24}, "visitors": {"type": "integer", "maximum": 9999}},
        "required": ["place", "visitors"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "mood": {"enum": ["calm", "busy", "gloomy"]},
            "mentions_weather": {"type": "boolean"},
            "keywords": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 3},
        },
        "required": ["mood", "mentions_weather", "keywords"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "title": {"type": "string", "maxLength": 32},
            "score": {"type": "integer", "minimum": 1, "maximum": 5},
        },
        "required": ["title", "score"],
        "additionalProperties": False,
    },
)


class Extraction(Workload):
    """Answers end by their structure; one that is no JSON, or lacks a key, is a failure."""

    name = "extraction"
    about = "Notes of 32 to 256 tokens and one of three JSON Schemas; the answer ends where the structure does."

    def item(self, index: int) -> Item:
        """The request at a position."""
        rng = self.rng(index)
        schema = _SCHEMAS[rng.randrange(len(_SCHEMAS))]
        note, _ = self.prose(log_normal(rng, 80, 0.6, 32, 256), index)
        fields = {
            "messages": [{"role": "user", "content": f"{note}\n\nDescribe this note as JSON."}],
            "guided_decoding_guide_type": "json_schema",
            "guided_decoding_guide": json.dumps(schema),
        }

        def problem(text: str) -> str | None:
            return structure_problem(text, schema)

        return Item(index, self.name, fields, 128, check=problem)


def structure_problem(text: str, schema: dict[str, Any]) -> str | None:
    """What an answer lacks, or None; the schema's keys and no more than that."""
    try:
        found = json.loads(text)
    except ValueError as error:
        return f"the answer is no JSON ({error})"
    if not isinstance(found, dict):
        return "the answer is no JSON object"
    missing = [key for key in schema["required"] if key not in found]
    return f"the answer lacks {missing[0]!r}" if missing else None
