"""Rewrites an audited JSON schema into one that XGrammar enforces as it stands, or refuses what has no such form.

XGrammar looks at one keyword of a schema ($ref, const, enum, anyOf, oneOf, allOf, type, in this order) and passes
over its neighbours without a word. Here each schema gets one of them and no neighbour that it would not look at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from python_backend.errors import InvalidRequest
from python_backend.guided.keywords import ANNOTATIONS
from python_backend.guided.refusals import Refusals
from python_backend.guided.xgrammar_one_of import are_disjoint
from python_backend.guided.xgrammar_types import KEYWORDS_OF_TYPE, TYPES, TypeForms, type_of

if TYPE_CHECKING:
    from collections.abc import Iterable

# Where a reference may lead: keywords whose argument is a schema, a list of them, or a map.
_SCHEMAS = frozenset(["items", "additionalProperties"])
_LISTS = frozenset(["prefixItems", "allOf", "anyOf", "oneOf"])
_MAPS = frozenset(["properties", "patternProperties", "$defs", "definitions"])
_DEFINITIONS = frozenset(["$defs", "definitions"])
_UNIONS = ("anyOf", "oneOf")
# Keywords that know their own neighbours only, so that those of another branch cannot join them.
_LOOKS_AT = {"additionalProperties": ("properties", "patternProperties"), "items": ("prefixItems",)}
_MAX_MERGES = 200  # of allOf branches that are written out in one schema


def rewrite(schema: Any, *, strict: bool) -> tuple[Any, list[str]]:
    """The schema in XGrammar's terms, and warnings.

    Args:
        schema: as `keywords.audit` gives it.
        strict: refuse what is not enforced; else leave it out and say so.

    Raises:
        Unsupported: with the keyword and its JSON path.
        InvalidRequest: a reference leads nowhere, or nothing satisfies the schema.
    """
    refusals = Refusals(strict)
    rewriter = _Rewriter(schema, refusals)
    root = rewriter.node(schema, "#")
    if root is False:
        raise InvalidRequest("No text can satisfy the structure: the schema allows no value.")
    return {**root, "$defs": rewriter.definitions} if rewriter.definitions else root, refusals.warnings


class _Rewriter:
    """One pass; referenced schemas move into definitions of their own."""

    def __init__(self, root: Any, refusals: Refusals) -> None:
        self._root, self._refusals = root, refusals
        self._types = TypeForms(self.node, refusals)
        self._names: dict[str, str] = {}
        self.definitions: dict[str, Any] = {}
        self._inner_id = next((path for path in _inner_ids(root, "#")), None)
        self._num_merges = 0

    def node(self, schema: Any, path: str) -> Any:
        """The rewritten schema at a path; False when it allows nothing."""
        if isinstance(schema, bool):
            return {} if schema else False
        if not isinstance(schema, dict):
            raise InvalidRequest(f"The schema at {path} is {schema!r}; a schema is an object, true or false.")
        found = {k: v for k, v in schema.items() if k not in ANNOTATIONS and k not in _DEFINITIONS}
        if "allOf" in found:
            return self._all_of(found, path)
        if "$ref" in found:
            return self._ref(found, path)
        if "const" in found or "enum" in found:
            return self._literal(found, path)
        for keyword in _UNIONS:
            if keyword in found:
                return self._union(keyword, found, path)
        return self._typed(found, path)

    def _all_of(self, schema: dict[str, Any], path: str) -> Any:
        """Branches become one schema, where their keywords do not depend on each other."""
        branches = _list(schema.pop("allOf"), f"{path}/allOf")
        merged: Any = schema
        for index, branch in enumerate(branches):
            merged = self._merged(merged, self._inlined(branch, merged, path), f"{path}/allOf/{index}")
            if merged is False:
                return False
        return self.node(merged, path)

    def _inlined(self, branch: Any, beside: Any, path: str) -> Any:
        """The branch itself, or what it refers to when something stands beside it."""
        while isinstance(branch, dict) and "$ref" in branch and (beside or len(branch) > 1):
            self._num_merges += 1
            if self._num_merges > _MAX_MERGES:
                self._refusals.refuse(f"The keyword allOf at {path} with references that go in circles or are too many")
                return {}
            rest = {k: v for k, v in branch.items() if k != "$ref" and k not in ANNOTATIONS}
            target = self._target(branch["$ref"], path)
            branch = target if not rest else {"allOf": [target, rest]}
        return branch

    def _merged(self, one: Any, other: Any, path: str) -> Any:
        if isinstance(other, bool):
            return one if other else False
        if not isinstance(other, dict):
            raise InvalidRequest(f"The schema at {path} is {other!r}; a schema is an object, true or false.")
        other = {k: v for k, v in other.items() if k not in ANNOTATIONS and k not in _DEFINITIONS}
        if not one or not other:
            return one or other
        if "allOf" in other:
            other = dict(other)
            for inner in _list(other.pop("allOf"), f"{path}/allOf"):
                other = self._merged(other, self._inlined(inner, other, path), path)
                if other is False:
                    return False
        return self._merged_keywords(dict(one), other, path)

    def _merged_keywords(self, merged: dict[str, Any], other: dict[str, Any], path: str) -> Any:
        for one, two in ((merged, other), (other, merged)):
            for keyword, neighbours in _LOOKS_AT.items():
                if one.get(keyword, True) not in (True, {}) and any(name in two for name in neighbours):
                    self._refusals.refuse(f"The keyword {keyword} at {path} beside allOf, anyOf or oneOf")
        for keyword, argument in other.items():
            clash = keyword in merged and merged[keyword] != argument
            if keyword == "required" and clash:
                merged[keyword] = list(dict.fromkeys([*merged[keyword], *argument]))
            elif keyword == "properties" and clash and not (merged[keyword].keys() & argument.keys()):
                merged[keyword] = {**merged[keyword], **argument}
            elif keyword == "type" and clash:
                types = _common_types(merged[keyword], argument)
                if not types:
                    return False
                merged[keyword] = types
            elif clash or (keyword in _UNIONS and any(union in merged for union in _UNIONS)):
                self._refusals.refuse(f"The keyword {keyword} at {path}, beside another {keyword},")
            else:
                merged[keyword] = argument
        return merged

    def _ref(self, schema: dict[str, Any], path: str) -> Any:
        if len(schema) > 1:
            reference = schema.pop("$ref")
            return self._all_of({**schema, "allOf": [{"$ref": reference}]}, path)
        target = self._target(schema["$ref"], path)
        pointer = schema["$ref"]
        if pointer not in self._names:
            self._names[pointer] = name = f"d{len(self._names)}"
            self.definitions[name] = {}  # known before it is rewritten: it may refer to itself
            rewritten = self.node(target, pointer)
            if rewritten is False:
                raise InvalidRequest(f"No text can satisfy the structure: what {path}/$ref names allows no value.")
            self.definitions[name] = rewritten
        return {"$ref": f"#/$defs/{self._names[pointer]}"}

    def _target(self, pointer: Any, path: str) -> Any:
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            self._refusals.refuse(f"The keyword $ref at {path}/$ref, which leads to {pointer!r} outside this schema,")
            return {}
        if self._inner_id is not None:
            self._refusals.refuse(f"The keyword $ref beside the $id at {self._inner_id}")
            return {}
        found, kind = self._root, "schema"
        for token in pointer.split("/")[1:]:
            found, kind = _step(found, kind, unquote(token).replace("~1", "/").replace("~0", "~"))
            if kind == "nothing":
                raise InvalidRequest(f"{path}/$ref leads to {pointer!r}, where no schema is.")
        if kind != "schema":
            raise InvalidRequest(f"{path}/$ref leads to {pointer!r}, where no schema is.")
        return found

    def _literal(self, schema: dict[str, Any], path: str) -> Any:
        keyword = "const" if "const" in schema else "enum"
        values = [schema["const"]] if keyword == "const" else _list(schema["enum"], f"{path}/enum")
        types = _types(schema["type"]) if "type" in schema else TYPES
        kept = [value for value in values if type_of(value) in types or _is_whole(value, types)]
        for other in schema.keys() - {keyword, "type"}:
            if other in (*_UNIONS, "enum") or any(other in KEYWORDS_OF_TYPE[type_of(value)] for value in kept):
                self._refusals.refuse(f"The keyword {other} at {path}/{other}, beside {keyword},")
        if not kept:
            return False
        self._types.check_literals(kept, f"{path}/{keyword}")
        plain = [value for value in kept if not isinstance(value, list | dict)]
        forms = [{"enum": plain}] if plain else []
        return _any_of([*forms, *(_exactly(value) for value in kept if isinstance(value, list | dict))])

    def _union(self, keyword: str, schema: dict[str, Any], path: str) -> Any:
        branches = _list(schema.pop(keyword), f"{path}/{keyword}")
        wholes = []
        for index, branch in enumerate(branches):
            whole = self._merged(schema, self._inlined(branch, schema, path), f"{path}/{keyword}/{index}")
            if whole is not False:
                wholes.append(whole)
        if keyword == "oneOf" and not are_disjoint(wholes, lambda pointer: self._target(pointer, path)):
            self._refusals.refuse(
                f"The keyword oneOf at {path}/oneOf, whose branches cannot be told apart in advance,",
                " Use anyOf, or give each branch a required property with another const.",
                "enforced as anyOf",
            )
        return _any_of(self.node(whole, f"{path}/{keyword}/{index}") for index, whole in enumerate(wholes))

    def _typed(self, schema: dict[str, Any], path: str) -> Any:
        asserting = schema.keys() - {"type"}
        if not asserting and "type" not in schema:
            return {}
        types = _types(schema["type"]) if "type" in schema else TYPES
        return _any_of(self._types.form(name, schema, path) for name in types)


def _any_of(branches: Iterable[Any]) -> Any:
    kept = [branch for branch in branches if branch is not False]
    if not kept:
        return False
    if {} in kept:
        return {}
    return kept[0] if len(kept) == 1 else {"anyOf": kept}


def _exactly(value: Any) -> dict[str, Any]:
    """A schema for one value; a list or an object is written with the white space of the rest."""
    if isinstance(value, list):
        forms = [_exactly(item) for item in value]
        return {"type": "array", "items": False, "minItems": len(forms), **({"prefixItems": forms} if forms else {})}
    if isinstance(value, dict):
        forms_by_name = {name: _exactly(item) for name, item in value.items()}
        closed = {"additionalProperties": False, "required": list(value)}
        return {"type": "object", "properties": forms_by_name, **closed}
    return {"enum": [value]}


def _step(found: Any, kind: str, token: str) -> tuple[Any, str]:
    """One token of a JSON pointer, through places that hold schemas only."""
    if kind == "list":
        known = token.isascii() and token.isdigit() and int(token) < len(found)
        return (found[int(token)], "schema") if known else (None, "nothing")
    if not isinstance(found, dict) or token not in found:
        return None, "nothing"
    below = found[token]
    if kind == "map":
        return below, "schema"
    for keywords, inner, holder in ((_SCHEMAS, "schema", object), (_LISTS, "list", list), (_MAPS, "map", dict)):
        if token in keywords and isinstance(below, holder):
            return below, inner
    return None, "nothing"


def _types(argument: Any) -> tuple[str, ...]:
    names = [argument] if isinstance(argument, str) else argument
    if not isinstance(names, list) or not names or not all(name in (*TYPES, "integer") for name in names):
        raise InvalidRequest(f"type is {argument!r}; allowed: {', '.join(TYPES)}, integer, or a list of them.")
    kept = [name for name in names if name != "integer" or "number" not in names]
    return tuple(dict.fromkeys(kept))


def _common_types(one: Any, other: Any) -> list[str]:
    first, second = _types(one), _types(other)
    found = [name for name in first if name in second or (name == "integer" and "number" in second)]
    return found + [name for name in second if name == "integer" and "number" in first and name not in found]


def _is_whole(value: Any, types: tuple[str, ...]) -> bool:
    """A number that is an integer, whatever it looks like, or an integer where a number may stand."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return "number" in types or ("integer" in types and value == int(value))


def _inner_ids(schema: Any, path: str) -> Iterable[str]:
    """Paths of $id below the root: references in such a part would start there."""
    open_parts = [(schema, path, "schema")]
    while open_parts:
        part, at, kind = open_parts.pop()
        if kind == "list":
            open_parts += [(item, f"{at}/{index}", "schema") for index, item in enumerate(part)]
        elif isinstance(part, dict):
            if kind == "schema" and at != path and "$id" in part:
                yield f"{at}/$id"
            for token in part:
                below, inner = _step(part, kind, token)
                if inner != "nothing":
                    open_parts.append((below, f"{at}/{token}", inner))


def _list(argument: Any, path: str) -> list[Any]:
    if not isinstance(argument, list) or not argument:
        raise InvalidRequest(f"{path} is {argument!r}; it is a list with one entry at least.")
    return argument
