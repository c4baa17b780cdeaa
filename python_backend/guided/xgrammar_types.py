"""The form that XGrammar enforces of a schema of one JSON type: no neighbour that it passes over in silence."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from python_backend.errors import InvalidRequest, Unsupported
from python_backend.guided.code_points import JSON_CHARS
from python_backend.guided.ecma_patterns import EBNF, PYTHON, PatternProblem, all_but, rewritten
from python_backend.guided.xgrammar_support import (
    MAX_COUNT,
    MAX_DECIMALS,
    MAX_INTEGER,
    MAX_MULTIPLE_OF,
    MAX_MULTIPLE_OF_RANGE,
    MAX_NUMBER,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from python_backend.guided.refusals import Refusals

TYPES = ("object", "array", "string", "number", "boolean", "null")
_NUMBER = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])
_OBJECT = frozenset(
    ["properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"]
)
KEYWORDS_OF_TYPE: dict[str, frozenset[str]] = {
    "object": _OBJECT,
    "array": frozenset(["items", "prefixItems", "minItems", "maxItems"]),
    "string": frozenset(["pattern", "format", "minLength", "maxLength"]),
    "number": _NUMBER,
    "integer": _NUMBER,
    "boolean": frozenset(),
    "null": frozenset(),
}


def type_of(value: Any) -> str:
    """The JSON type of a value; a number without a fraction is a number."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    kinds: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "number")


class TypeForms:
    """Forms by type.

    Args:
        node: rewrites a schema at a path; False when it allows nothing.
        refusals: takes what cannot be enforced.
    """

    def __init__(self, node: Callable[[Any, str], Any], refusals: Refusals) -> None:
        self._node, self._refusals = node, refusals

    def form(self, name: str, schema: dict[str, Any], path: str) -> Any:
        """The schema for values of one type; False when there are none."""
        own = {keyword: value for keyword, value in schema.items() if keyword in KEYWORDS_OF_TYPE[name]}
        if name in ("boolean", "null"):
            return {"type": name}
        if name == "number" and "multipleOf" in own:
            return self._multiples(own, path)
        form: Callable[[dict[str, Any], str], Any] = getattr(self, f"_{name}")
        return form(own, path)

    def check_literals(self, values: list[Any], path: str) -> None:
        """Constants are written as the library formats them; refuse what that would change."""
        for value in values:
            if isinstance(value, list | dict):
                self.check_literals(list(value.values()) if isinstance(value, dict) else value, path)
            elif type_of(value) == "number":
                exact = abs(value) <= MAX_INTEGER if isinstance(value, int) else float(f"{value:.15g}") == value
                if not exact:
                    raise Unsupported(f"The number {value} at {path} cannot be enforced: it has too many digits.")

    def _string(self, own: dict[str, Any], path: str) -> Any:
        form: dict[str, Any] = {"type": "string"}
        if "pattern" in own:
            if not isinstance(own["pattern"], str):
                raise InvalidRequest(f"{path}/pattern is {own['pattern']!r}; a pattern is a string.")
            text = self._pattern(own["pattern"], f"{path}/pattern")
            form |= {} if text is None else {"pattern": text}
        if "format" in own and "pattern" in form:
            self._refusals.refuse(f"The keyword format at {path}/format, beside pattern,")
        elif "format" in own:
            form["format"] = own["format"]
        for name in ("minLength", "maxLength"):
            length = self._count(own.get(name, 0), f"{path}/{name}")
            if name in own and len(form) > 1 and not form.keys() & {"minLength"}:
                self._refusals.refuse(f"The keyword {name} at {path}/{name}, beside pattern or format,")
            elif name in own and (name == "maxLength" or length):
                form[name] = length
        return form

    def _pattern(self, pattern: str, path: str) -> str | None:
        try:
            return rewritten(pattern, EBNF, JSON_CHARS, search=True)
        except PatternProblem as problem:
            self._refusals.refuse(f"The pattern {pattern!r} at {path}, for {problem},")
            return None

    def _number(self, own: dict[str, Any], path: str) -> Any:
        kept: dict[str, Any] = {"type": "number"}
        for name, bound in own.items():
            self._check_number(bound, f"{path}/{name}")
            if (Fraction(str(bound)) * 10**MAX_DECIMALS).denominator != 1 or abs(bound) > MAX_NUMBER:
                self._refusals.refuse(f"The keyword {name} at {path}/{name}, with more than {MAX_DECIMALS} decimals,")
            else:
                kept[name] = bound
        return kept

    def _multiples(self, own: dict[str, Any], path: str) -> Any:
        """Multiples of a whole number are integers."""
        step = own["multipleOf"]
        self._check_number(step, f"{path}/multipleOf")
        if step == int(step):
            return self._integer(own, path)
        self._refusals.refuse(f"The keyword multipleOf at {path}/multipleOf, for numbers with a fraction,")
        return self._number({name: value for name, value in own.items() if name != "multipleOf"}, path)

    def _integer(self, own: dict[str, Any], path: str) -> Any:
        for name, value in own.items():
            self._check_number(value, f"{path}/{name}")
        lows = [math.ceil(Fraction(str(own["minimum"])))] if "minimum" in own else []
        lows += [math.floor(Fraction(str(own["exclusiveMinimum"]))) + 1] if "exclusiveMinimum" in own else []
        highs = [math.floor(Fraction(str(own["maximum"])))] if "maximum" in own else []
        highs += [math.ceil(Fraction(str(own["exclusiveMaximum"]))) - 1] if "exclusiveMaximum" in own else []
        kept: dict[str, Any] = {"type": "integer"}
        for name, bounds, strictest in (("minimum", lows, max), ("maximum", highs, min)):
            if bounds and abs(strictest(bounds)) > MAX_INTEGER:
                self._refusals.refuse(f"The keyword {name} at {path}/{name}, beyond 64 bits,")
            elif bounds:
                kept[name] = strictest(bounds)
        if kept.get("minimum", -math.inf) > kept.get("maximum", math.inf):
            return False
        return self._with_multiples(kept, own, path) if "multipleOf" in own else kept

    def _with_multiples(self, kept: dict[str, Any], own: dict[str, Any], path: str) -> Any:
        step = Fraction(str(own["multipleOf"])).numerator  # integers among the multiples of p/q are those of p
        what = f"The keyword multipleOf at {path}/multipleOf"
        low, high = kept.get("minimum"), kept.get("maximum")
        if step == 1:
            return kept
        if low is not None and high is not None:
            if high - low > MAX_MULTIPLE_OF_RANGE:
                self._refusals.refuse(f"{what}, with bounds more than {MAX_MULTIPLE_OF_RANGE} apart,")
                return kept
            values = list(range(-(-low // step) * step, high + 1, step))
            return {"enum": values} if values else False
        if step > MAX_MULTIPLE_OF or low is not None or high is not None:
            reason = f", above {MAX_MULTIPLE_OF}," if step > MAX_MULTIPLE_OF else ", with one bound only,"
            self._refusals.refuse(what + reason)
            return kept
        return {**kept, "multipleOf": step}

    def _array(self, own: dict[str, Any], path: str) -> Any:
        kept: dict[str, Any] = {"type": "array"}
        for name in ("minItems", "maxItems"):
            if name in own:
                kept[name] = self._count(own[name], f"{path}/{name}")
        prefix = own.get("prefixItems", [])
        if not isinstance(prefix, list):
            raise InvalidRequest(f"{path}/prefixItems is {prefix!r}; it is a list of schemas.")
        forms = [self._node(item, f"{path}/prefixItems/{index}") for index, item in enumerate(prefix)]
        if False in forms:
            kept["maxItems"] = min(forms.index(False), kept.get("maxItems", MAX_COUNT))
        forms = forms[: kept.get("maxItems", MAX_COUNT)]
        items = self._node(own.get("items", True), f"{path}/items")
        if kept.get("minItems", 0) > kept.get("maxItems", MAX_COUNT if items is not False else len(forms)):
            return False
        return {**kept, "items": items, **({"prefixItems": forms} if forms else {})}

    def _object(self, own: dict[str, Any], path: str) -> Any:
        properties = {
            name: self._node(schema, f"{path}/properties/{_escaped(name)}")
            for name, schema in self._map(own, "properties", path).items()
        }
        additional = self._node(own.get("additionalProperties", True), f"{path}/additionalProperties")
        required = self._required(own, path)
        patterns = self._patterns(own, properties, required, path)
        for name in required:
            properties.setdefault(name, additional)
        if any(properties[name] is False for name in required):
            return False
        if patterns:
            additional = False  # what no pattern takes is not written: narrower, and nothing wrong gets through
        names = list(properties)
        properties = {name: form for name, form in properties.items() if form is not False}
        if patterns and len(names) != len(properties):
            self._refusals.refuse(f"The keyword properties at {path}/properties, with the schema false,")
        kept = {"type": "object", "properties": properties, "required": required, "additionalProperties": additional}
        if patterns:
            kept["patternProperties"] = patterns
        elif additional is not False and (len(names) != len(properties) or any(map(_is_hard, names))):
            kept["propertyNames"] = {"pattern": all_but(names, EBNF, JSON_CHARS)}
        return self._with_counts(kept, own, path)

    def _with_counts(self, kept: dict[str, Any], own: dict[str, Any], path: str) -> Any:
        low = self._count(own.get("minProperties", 0), f"{path}/minProperties")
        is_open = kept["additionalProperties"] is not False or "patternProperties" in kept
        if low > max(1, len(kept["required"])) and is_open:
            self._refusals.refuse(
                f"The keyword minProperties at {path}/minProperties, beside names that the schema does not give,"
            )
            low = 0
        if low > len(kept["required"]):
            kept["minProperties"] = low
        if not is_open and low > len(kept["properties"]):
            return False
        if "maxProperties" in own:
            kept["maxProperties"] = self._count(own["maxProperties"], f"{path}/maxProperties")
            if kept["maxProperties"] < max(low, len(kept["required"])):
                return False
        return kept

    def _required(self, own: dict[str, Any], path: str) -> list[str]:
        required = own.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise InvalidRequest(f"{path}/required is {required!r}; it is a list of names.")
        return list(dict.fromkeys(required))

    def _patterns(
        self, own: dict[str, Any], properties: dict[str, Any], required: list[str], path: str
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        place = f"{path}/patternProperties"
        for pattern, schema in self._map(own, "patternProperties", path).items():
            text = self._pattern(pattern, f"{place}/{_escaped(pattern)}")
            form = self._node(schema, f"{place}/{_escaped(pattern)}")
            if text is None or (form == {} and "additionalProperties" not in own):
                continue  # nothing is asked of such names that other names do not have to meet
            searched = re.compile(rewritten(pattern, PYTHON, search=True))
            known = next((name for name in {*properties, *required} if searched.fullmatch(name)), None)
            if known is not None:
                self._refusals.refuse(
                    f"The keyword patternProperties at {place}, with a pattern that {known!r} matches,"
                )
            elif form is False or any(other != form for other in found.values()):
                self._refusals.refuse(f"The keyword patternProperties at {place}, with patterns that may overlap,")
            else:
                found[text] = form
        return found

    def _map(self, own: dict[str, Any], keyword: str, path: str) -> dict[str, Any]:
        found = own.get(keyword, {})
        if not isinstance(found, dict):
            raise InvalidRequest(f"{path}/{keyword} is {found!r}; it is an object.")
        return found

    def _count(self, value: Any, path: str) -> int:
        self._check_number(value, path)
        if value != int(value) or value < 0:
            raise InvalidRequest(f"{path} is {value!r}; it is a whole number, 0 or more.")
        if value > MAX_COUNT:
            self._refusals.refuse(f"The count at {path}, above {MAX_COUNT},")
        return min(int(value), MAX_COUNT)

    def _check_number(self, value: Any, path: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidRequest(f"{path} is {value!r}; it is a number.")


def _is_hard(name: str) -> bool:
    """Whether a name has bytes that the library cannot keep away from additional names."""
    return not name.isascii() or not name.isprintable() or '"' in name or "\\" in name


def _escaped(name: str) -> str:
    """A reference token of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
