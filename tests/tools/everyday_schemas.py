"""A seeded sample of schemas as applications send them (extraction, tool calls, forms), each with an answer."""

from __future__ import annotations

import json
import random
from typing import Any

TEXT = (
    "the order was delivered on time and customer asked for a refund because one of items had been damaged in transit "
    "please check invoice number before you call them again our team will answer within two business days thank"
)
WORDS = TEXT.split()
NAMES = ["Anna Müller", "John Smith", "李伟", "Fatima Zahra", "Carlos García", "Olga Petrova", "Priya Nair"]
FIELDS = [
    *("title", "summary", "name", "email", "status", "priority", "price", "quantity", "tags", "address", "created_at"),
    *("is_active", "score", "notes", "items", "category", "country", "website", "id", "due_date", "language", "reason"),
]


def sample(seed: int, count: int) -> list[tuple[str, str]]:
    """Schemas and an answer to each, as JSON texts."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        schema, answer = _object(rng, 2)
        found.append((json.dumps(schema), json.dumps(answer, ensure_ascii=False)))
    return found


def _object(rng: random.Random, depth: int) -> tuple[dict[str, Any], dict[str, Any]]:
    names = rng.sample(FIELDS, rng.randint(3, 7))
    fields = {name: _field(rng, depth - 1) for name in names}
    required = [name for name in names if rng.random() < 0.8]
    schema = {
        "type": "object",
        "properties": {name: schema for name, (schema, _) in fields.items()},
        "required": required,
        "additionalProperties": False,
    }
    present = [name for name in names if name in required or rng.random() < 0.5]
    return schema, {name: fields[name][1] for name in present}


def _field(rng: random.Random, depth: int) -> tuple[dict[str, Any], Any]:
    simple = [
        _text,
        _text,
        _name,
        _choice,
        _choice,
        _count,
        _amount,
        _flag,
        _date,
        _email,
        _identifier,
        _code,
        _optional,
    ]
    return rng.choice([*simple, _list, _list, _nested] if depth > 0 else simple)(rng, depth)


def _sentence(rng: random.Random, low: int, high: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, high))).capitalize() + "."


def _text(rng: random.Random, depth: int) -> tuple[dict[str, Any], Any]:
    described = {"type": "string", "description": "What the customer said."}
    return rng.choice([{"type": "string"}, described, {"type": "string", "maxLength": 500}]), _sentence(rng, 4, 30)


def _name(rng: random.Random, depth: int) -> tuple[dict[str, Any], Any]:
    return {"type": "string", "minLength": 1, "maxLength": 80}, rng.choice(NAMES)


def _choice(rng: random.Random, depth: int) -> tuple[dict[str, Any], Any]:
    values = rng.sample(["open", "in_progress", "closed", "low", "medium", "high", "urgent", "DE", "US", "billing"], 4)
    return {"type": "string", "enum": values}, rng.choice(values)


def _count(rng: random.Random, depth: int) -> tuple[dict[str, Any], Any]:
    return {"type": "integer", "minimum": 0, "maximum": rng.choice([10, 100, 10000])}, rng.randint(0, 10)


def _amount(rng: random.Random, depth: int) -> tuple[dict[str, Any], Any]:
    return rng.choice([{"type": "number"}, {"type": "number", "minimum": 0}]), round(rng.uniform(0, 500), 2)


def _flag(rng: random.Random, depth: int) -> tuple[dict[str, Any], Any]:
    return {"type": "boolean"}, rng.random() < 0.5


def _date(rng: random.Random, depth: int) -> tuple[dict[str, Any], Any]:
    day = f"20{rng.randint(10, 29)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    return rng.choice([({"type": "string", "format": "date"}, day), _moment(day)])


def _moment(day: str) -> tuple[dict[str, Any], Any]:
    return {"type": "string", "format": "date-time"}, f"{day}T10:15:00Z"


def _email(rng: random.Random, depth: int) -> tuple[dict[str, Any], Any]:
    return {"type": "string", "format": "email"}, f"{rng.choice(WORDS)}.{rng.choice(WORDS)}@example.com"


def _identifier(rng: random.Random, depth: int) -> tuple[dict[str, Any], Any]:
    digits = f"{rng.getrandbits(128):032x}"
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return {"type": "string", "format": "uuid"}, "-".join(parts)


def _code(rng: random.Random, depth: int) -> tuple[dict[str, Any], Any]:
    return {"type": "string", "pattern": "^[A-Z]{2,4}-[0-9]{3,6}$"}, f"INV-{rng.randint(1000, 99999)}"


def _optional(rng: random.Random, depth: int) -> tuple[dict[str, Any], Any]:
    schema, value = rng.choice([_text, _count, _date])(rng, depth)
    return {"anyOf": [schema, {"type": "null"}], "default": None}, rng.choice([value, None])


def _list(rng: random.Random, depth: int) -> tuple[dict[str, Any], Any]:
    schema, value = rng.choice([_text, _choice, _nested])(rng, depth)
    return {"type": "array", "items": schema, "maxItems": 10}, [value] * rng.randint(0, 3)


def _nested(rng: random.Random, depth: int) -> tuple[dict[str, Any], Any]:
    return _object(rng, depth)
