"""A seeded, varied stream of structures with what it takes to judge an answer: schemas, regexes, grammars, choices."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import Any

import jsonschema

WORDS = ["red", "blue", "größe", "在线", "café", "Paris", "emoji😀", "a/b", "C:\\dir", "it's", "x", "y", "zeta", "100%"]
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
_CLOCK = r"([01]\d|2[0-3]):[0-5]\d"
_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_TIME = re.compile(rf"{_CLOCK}:[0-5]\d(\.\d+)?([Zz]|[+-]{_CLOCK})", re.ASCII)


@dataclass(frozen=True, slots=True)
class GuidedCase:
    """One request's structure; `judge` says what is wrong with a whole answer, or None."""

    kind: str
    guide: str
    judge: Callable[[str], str | None]
    whitespace: str = "single"

    def tensors(self) -> dict[str, Any]:
        found = {"guided_decoding_guide_type": self.kind, "guided_decoding_guide": self.guide}
        return found | ({"guided_decoding_whitespace": self.whitespace} if self.whitespace != "single" else {})


def cases(seed: int, count: int) -> list[GuidedCase]:
    """The same cases for the same seed."""
    rng = random.Random(seed)
    makers = [_schema, _schema, _schema, _schema, _regex, _grammar, _choice, _json]
    return [rng.choice(makers)(rng) for _ in range(count)]


@CHECKER.checks("time")
def _is_time(text: object) -> bool:
    return not isinstance(text, str) or _TIME.fullmatch(text) is not None


@CHECKER.checks("date", raises=ValueError)
def _is_date(text: object) -> bool:
    """The year 0000 is RFC 3339's, though not Python's; 2000 has the same days."""
    if not isinstance(text, str):
        return True
    return bool(_DATE.fullmatch(text) and date.fromisoformat(f"2{text[1:]}" if text.startswith("0000") else text))


@CHECKER.checks("date-time", raises=ValueError)
def _is_date_time(text: object) -> bool:
    return not isinstance(text, str) or (_is_date(text[:10]) and text[10] in "tT" and _is_time(text[11:]))


def judge_json(schema: Any) -> Callable[[str], str | None]:
    """Judges by jsonschema, formats included."""
    validator = jsonschema.Draft202012Validator(schema, format_checker=CHECKER)

    def judge(text: str) -> str | None:
        try:
            value = json.loads(text)
        except ValueError as error:
            return f"no JSON: {error}"
        problem = next(validator.iter_errors(value), None)
        return None if problem is None else f"{problem.json_path}: {problem.message}"

    return judge


def _json(rng: random.Random) -> GuidedCase:
    return GuidedCase("json", "", judge_json({}), rng.choice(["single", "compact", "free"]))


def _schema(rng: random.Random) -> GuidedCase:
    schema = _object(rng, depth=2)
    if rng.random() < 0.3:
        schema["$defs"] = {"node": _object(rng, depth=1), "leaf": _string(rng)}
        schema["properties"]["ref"] = {"$ref": rng.choice(["#/$defs/node", "#/$defs/leaf"])}
        schema["required"].append("ref")
    whitespace = rng.choice(["single", "single", "compact", "free"])
    return GuidedCase("json_schema", json.dumps(schema), judge_json(schema), whitespace)


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    makers = [_string, _integer, _number, _literal, _union]
    return rng.choice([*makers, _object, _array])(rng, depth - 1) if depth > 0 else rng.choice(makers)(rng)


def _object(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    names = rng.sample([*WORDS, "first_name", "age", "size", "tags"], rng.randint(1, 4))
    required = [name for name in names if rng.random() < 0.7]
    return {
        "type": "object",
        "properties": {name: _value(rng, depth) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    low = rng.randint(0, 2)
    found = {"type": "array", "items": _value(rng, depth), "minItems": low, "maxItems": low + rng.randint(0, 2)}
    if rng.random() < 0.2:
        return {"type": "array", "prefixItems": [_value(rng, 0)], "items": False, "minItems": 1}
    return found


def _string(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    low = rng.randint(0, 4)
    return rng.choice(
        [
            {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 12)},
            {"type": "string", "pattern": rng.choice([r"^[A-Z]{2}-\d{2,4}$", r"^(\w+ ){1,2}\w{1,5}$", "^[äöü]+x?$"])},
            {"type": "string", "format": rng.choice(["date", "date-time", "uuid", "ipv4", "email", "time"])},
        ]
    )


def _integer(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    found: dict[str, Any] = {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}
    return found if rng.random() < 0.8 else {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700}


def _number(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    low = rng.randint(-5, 5)
    return {"type": "number", "exclusiveMinimum": low, "maximum": low + rng.randint(1, 100)}


def _literal(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    if rng.random() < 0.2:
        return {"enum": [f"value {i}" for i in range(500)]}
    values = [*WORDS, 1, 2.5, None, True, ["x", 1], {"k": "v"}]
    return {"const": rng.choice(values)} if rng.random() < 0.3 else {"enum": rng.sample(values, 3)}


def _union(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    return {"anyOf": [_string(rng), _integer(rng), {"type": "null"}]}


def _regex(rng: random.Random) -> GuidedCase:
    pattern = rng.choice(
        [
            r"\d{3}-\w{2,8}",
            r"(yes|no|maybe)( [a-z]{1,6}){0,2}",
            r"[A-Z][a-zäöü]{2,9}, \d{1,2}\. (Mai|Juni) 20\d\d",
            r"(#[0-9a-f]{6};){1,3}",
            r"(北京|上海|東京)市?[0-9]{1,3}号",
            r"[^a-z\n]{3,10}",
        ]
    )
    return GuidedCase("regex", pattern, _judge_pattern(pattern))


def _grammar(rng: random.Random) -> GuidedCase:
    digits = rng.randint(1, 3)
    grammar = f'root ::= sum\nsum ::= term ("+" term){{0,2}}\nterm ::= [0-9]{{1,{digits}}} | "(" term ")"'
    number = f"[0-9]{{1,{digits}}}"

    def judge(text: str) -> str | None:
        plain = re.sub(r"[()]", "", text)
        nested = all(part.count("(") == part.count(")") for part in text.split("+"))
        return None if nested and re.fullmatch(rf"{number}(\+{number}){{0,2}}", plain) else f"no sum: {text!r}"

    return GuidedCase("ebnf_grammar", grammar, judge)


def _choice(rng: random.Random) -> GuidedCase:
    choices = rng.sample(WORDS, rng.randint(2, 5))
    return GuidedCase("choice", json.dumps(choices), lambda text: None if text in choices else f"not one: {text!r}")


def _judge_pattern(pattern: str) -> Callable[[str], str | None]:
    compiled = re.compile(pattern.replace(r"\d", "[0-9]").replace(r"\w", "[A-Za-z0-9_]"))
    return lambda text: None if compiled.fullmatch(text) else f"{text!r} does not match"
