"""Whether branches of oneOf exclude each other, so that anyOf says the same. Knows nothing of XGrammar itself."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

from python_backend.errors import RequestError
from python_backend.guided.xgrammar_types import type_of

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_REFERENCES = 20


def are_disjoint(branches: list[Any], target: Callable[[Any], Any]) -> bool:
    """Whether no value satisfies two of them; False when that cannot be seen at a glance.

    Args:
        branches: schemas.
        target: the schema that a reference leads to.
    """
    resolved = [_resolved(branch, target) for branch in branches]
    return all(_exclude(one, other, target) for one, other in itertools.combinations(resolved, 2))


def _resolved(schema: Any, target: Callable[[Any], Any]) -> Any:
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        try:
            schema = target(schema["$ref"])
        except RequestError:
            return {}
    return {}


def _exclude(one: Any, other: Any, target: Callable[[Any], Any]) -> bool:
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    values, other_values = _values(one), _values(other)
    if values is not None and other_values is not None:
        return not values & other_values
    types, other_types = _types(one), _types(other)
    if types is not None and other_types is not None and not types & other_types:
        return True
    return types == other_types == {"object"} and any(
        _exclude(_property(one, name, target), _property(other, name, target), target)
        for name in set(_strings(one.get("required"))) & set(_strings(other.get("required")))
        if name in _map(one) and name in _map(other)
    )


def _property(schema: dict[str, Any], name: str, target: Callable[[Any], Any]) -> Any:
    """The values that tell branches apart: a constant or a type, no deeper."""
    found = _resolved(_map(schema)[name], target)
    return {k: v for k, v in found.items() if k in ("const", "enum", "type")} if isinstance(found, dict) else found


def _map(schema: dict[str, Any]) -> dict[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def _strings(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _values(schema: dict[str, Any]) -> set[str] | None:
    if "const" in schema:
        return {_canonical(schema["const"])}
    return {_canonical(value) for value in schema["enum"]} if isinstance(schema.get("enum"), list) else None


def _canonical(value: Any) -> str:
    """Equal for values that JSON Schema holds equal."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(sorted(f'{json.dumps(k)}:{_canonical(v)}' for k, v in value.items()))}}}"
    return json.dumps(value)


def _types(schema: dict[str, Any]) -> set[str] | None:
    """JSON types of the values that a schema allows, as far as it says so itself."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return {type_of(value) for value in values}
    names = schema.get("type")
    if names is None:
        return None
    return {"number" if name == "integer" else name for name in ([names] if isinstance(names, str) else names)}
