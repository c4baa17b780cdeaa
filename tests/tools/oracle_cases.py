"""What the mask oracle asks about: seeded structures of every kind, each with a judge that no backend has a part in."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import referencing.exceptions

from tests.server.guided_cases import cases, judge_json
from tests.tools.guided_suite import SUITE

NAMES = ["a", "ab", "b", "title", "name", "größe", "在线", 'q"uote', "x/y", ""]
PATTERNS = [
    "^a",
    "b$",
    "^[a-c]{1,3}$",
    r"^\d+(\.\d{2})?$",
    "x|y",
    "^(foo|bar)+$",
    "[^é]",
    r"^\S+@\S+$",
    r"\.",
    "^.{2,4}$",
]
REGEXES = [
    *(r"[ab]{2,3}", r"(foo|bar)*baz", r"\d{1,3}(\.\d{1,3}){3}", r"[^\W\d_]+", r"\s?x\s?", r"a|ab|abc", r"(a|b)+?c"),
    *(
        r"[\u4e00-\u9fff]{1,2}",
        r"é?è?",
        r"\x41\u0042",
        r"[+\-*/]",
        r"\$\{[a-z]+\}",
        "^start.{0,3}end$",
        r"(?:(?:a)b?){2}",
    ),
]
GRAMMARS = [
    ('root ::= "a" root "b" | "c"', r"a*cb*", lambda text: text.count("a") == text.count("b")),
    ('root ::= item ("," item)*\nitem ::= [0-9]+ | "\\"" [a-z]* "\\""', r'(\d+|"[a-z]*")(,(\d+|"[a-z]*"))*', None),
    ('root ::= "x"{2,4} [^\\n]? | ""', r"(x{2,4}[^\n]?)?", None),
]


class Undecided(Exception):
    """No judge has a say about this text."""


@dataclass(frozen=True, slots=True)
class OracleCase:
    """A structure; `judge` says what is wrong with a whole text, or None; instances are JSON values to write."""

    source: str
    kind: str
    guide: str
    judge: Callable[[str], str | None]
    whitespace: str = "single"
    instances: tuple[Any, ...] = field(default=())


def oracle_cases(seed: int, count: int) -> Iterator[OracleCase]:
    """The official suite whole, then `count` seeded structures of each of two generators, and expressions."""
    for name, groups in json.loads(SUITE.read_text(encoding="utf-8")).items():
        for group in groups:
            instances = tuple((test["data"], test["valid"]) for test in group["tests"])
            judge = _by_suite(instances, None if "regex" in name else judge_json(group["schema"]))
            yield OracleCase("official suite", "json_schema", json.dumps(group["schema"]), judge, "single", instances)
    for case in cases(seed, count):
        yield OracleCase("cases of the server tests", case.kind, case.guide, case.judge, case.whitespace)
    rng = random.Random(seed)
    for _ in range(count):
        schema = _schema(rng, 2)
        whitespace = rng.choice(["single", "single", "compact", "free"])
        yield OracleCase("generated schemas", "json_schema", json.dumps(schema), judge_json(schema), whitespace)
    for pattern in REGEXES:
        yield OracleCase("expressions", "regex", pattern, _by_pattern(pattern))
    for grammar, pattern, extra in GRAMMARS:
        yield OracleCase("expressions", "ebnf_grammar", grammar, _by_pattern(pattern, extra))


def mutated(value: Any, rng: random.Random) -> Any:
    """A value near another one, valid or not."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(list(value))
        found = dict(value)
        action = rng.random()
        if action < 0.3:
            del found[name]
        elif action < 0.5:
            found[rng.choice(NAMES)] = rng.choice([1, "x", None])
        else:
            found[name] = mutated(found[name], rng)
        return found
    if isinstance(value, list) and value and rng.random() < 0.8:
        return rng.choice([value[1:], [*value, value[0]], [mutated(value[0], rng), *value[1:]]])
    if isinstance(value, str):
        return rng.choice([value[1:], value + "x", value + "é", value.upper(), 1])
    if isinstance(value, int | float) and not isinstance(value, bool):
        return rng.choice([value + 1, -value, value * 10, value + 0.5, str(value)])
    return rng.choice([None, True, 0, "", [], {}])


def _by_suite(instances: tuple[Any, ...], other: Callable[[str], str | None] | None) -> Callable[[str], str | None]:
    """The suite's own word where it has one; jsonschema's, whose patterns are Python's, for other texts."""

    def judge(text: str) -> str | None:
        for value, valid in instances:
            if json.dumps(value, sort_keys=True) == json.dumps(json.loads(text), sort_keys=True):
                return None if valid else "the suite says that it is invalid"
        try:
            if other is not None:
                return other(text)
        except (re.error, referencing.exceptions.Unresolvable):
            pass
        raise Undecided

    return judge


def _by_pattern(pattern: str, extra: Callable[[str], bool] | None = None) -> Callable[[str], str | None]:
    python = pattern.replace("[^\\W\\d_]", "[A-Za-z]").replace("\\d", "[0-9]").replace("\\s", "[\\s\ufeff]")
    compiled = re.compile(python)
    return lambda text: (
        None if compiled.fullmatch(text) and (extra is None or extra(text)) else f"{text!r} does not match {pattern}"
    )


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    makers = [_string, _number, _integer, _constant]
    if depth > 0:
        makers += [_object, _object, _array, _union, _all_of]
    return rng.choice(makers)(rng, depth - 1)


def _some(rng: random.Random, **options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if rng.random() < 0.4}


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 3)
    typed = {"type": "string"} if rng.random() < 0.8 else {}
    if rng.random() < 0.4:
        return {**typed, "pattern": rng.choice(PATTERNS)}
    if rng.random() < 0.3:
        return {**typed, "format": rng.choice(["date", "email", "hostname", "uuid", "ipv4", "duration", "time"])}
    return {**typed, **_some(rng, minLength=low, maxLength=low + rng.randint(0, 4))}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.choice([0, -1.5, -3, 2, 0.25, 10, -0.001])
    high = low + rng.choice([0.5, 1, 7.25, 100])
    return {"type": "number", **_some(rng, minimum=low, maximum=high, exclusiveMinimum=low, exclusiveMaximum=high)}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low, step = rng.randint(-120, 120), rng.choice([2, 3, 7, 10])
    high = low + rng.choice([step, 30, 990, 12345])
    bounds = _some(rng, minimum=low, exclusiveMaximum=high, maximum=high, exclusiveMinimum=low)
    return {"type": "integer", **bounds, **({"multipleOf": step} if rng.random() < 0.3 else {})}


def _constant(rng: random.Random, depth: int) -> dict[str, Any]:
    values = [1, 0, -2.5, "a", "é\n", "", None, True, False, [], [1, "x"], {"k": {"l": [2]}}, {"a": 1, "b": 2}]
    typed = {"type": rng.choice(["string", "integer", ["string", "array", "null"]])} if rng.random() < 0.3 else {}
    return {**typed, "enum": rng.sample(values, 4)} if rng.random() < 0.6 else {"const": rng.choice(values)}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(0, 4))
    found: dict[str, Any] = {"properties": {name: _schema(rng, depth) for name in names}}
    if rng.random() < 0.9:
        found["type"] = "object"
    extra = rng.sample(NAMES, 1) if rng.random() < 0.15 else []
    found["required"] = [name for name in names if rng.random() < 0.6] + [name for name in extra if name not in names]
    found["additionalProperties"] = rng.choice([False, False, True, _schema(rng, 0)])
    if rng.random() < 0.15:
        found["patternProperties"] = {rng.choice(["^x", "^z+$", "[0-9]"]): _schema(rng, 0)}
    low = rng.randint(0, 2)
    return {**found, **(_some(rng, minProperties=low, maxProperties=low + 2) if rng.random() < 0.3 else {})}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    found = {
        "type": "array",
        "items": _schema(rng, depth),
        **_some(rng, minItems=low, maxItems=low + rng.randint(0, 2)),
    }
    if rng.random() < 0.3:
        found["prefixItems"] = [_schema(rng, 0) for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.2:
        found["items"] = False
    return found


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.4:
        kinds = rng.sample(["x", "y", "z"], 2)
        branches = [{**_object(rng, 0), "type": "object"} for _ in kinds]
        for branch, kind in zip(branches, kinds, strict=True):
            branch["properties"] = {"kind": {"const": kind}, **branch["properties"]}
            branch["required"] = ["kind", *branch["required"]]
        return {"oneOf": branches}
    found = {rng.choice(["anyOf", "anyOf", "oneOf"]): [_schema(rng, depth) for _ in range(2)]}
    return {**found, "type": rng.choice(["object", "string", "number"])} if rng.random() < 0.2 else found


def _all_of(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {"$defs": {"d": _schema(rng, depth)}, "$ref": "#/$defs/d", "description": "a reference"}
    return {"allOf": [_schema(rng, 0), _schema(rng, 0)]}
