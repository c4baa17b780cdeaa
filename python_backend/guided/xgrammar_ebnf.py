"""EBNF as XGrammar writes it for a JSON schema, made tighter where it lets through what is no JSON.

Knows nothing of keywords: the schema is one that XGrammar enforces as it stands.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from python_backend.guided.guide import utf8
from python_backend.guided.xgrammar_support import FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from python_backend.guided.guide import Whitespace

_SEPARATORS: dict[Whitespace, tuple[str, str]] = {"single": (", ", ": "), "compact": (",", ":"), "free": (",", ":")}
# Characters of strings: of those with a length, control characters would be some, and halves of surrogate pairs of all.
_LOOSE_CHARS = re.compile(r'\[\^(?:\\0-\\u001f)?\\"\\\\\\r\\n')
_CHARS = r"[^\0-\u001f\"\\\uD800-\uDFFF"
# Escapes: of what needs one. Others would write a name in a second way, or half of a surrogate pair.
_ESCAPES = r'basic_escape ::= (([\"\\bfnrt]) | ("u00" [01] [A-Fa-f0-9]))'
_ESCAPE_RULE = re.compile(r"^basic_escape ::= .*$", re.MULTILINE)
# Parts of values that the schema says nothing about keep to ", " whatever was asked for.
_ANY_RULES = re.compile(r'^(basic_(?:array_items|object_properties) ::= \(\()", "', re.MULTILINE)


# Strings, comments and classes of a grammar.
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|#[^\n]*|\[(?:\\.|[^\]\\])*\]')
_MARK = re.compile(r'Regex\("mark(\d+)", json_string=true\)')
# Code points below 256 as it prints them: before a hexadecimal digit it would not read them back as they were.
_SHORT_CODE = re.compile(r"\\(?:x([0-9a-f]{2})|.)", re.DOTALL)


def as_ebnf(library_grammar: Any, schema: Any, whitespace: Whitespace) -> str:
    """The grammar's text.

    Args:
        library_grammar: XGrammar's class of that name.
        schema: in XGrammar's terms.
        whitespace: between the parts of the JSON.

    Raises:
        InvalidRequest: the text is no UTF-8.
        RuntimeError: XGrammar finds the schema malformed.
    """
    patterns: list[str] = []
    item, key = _SEPARATORS[whitespace]
    schema_json = utf8(json.dumps(_with_marks(schema, patterns), ensure_ascii=False))
    # Any white space, indentation, separators, strict mode (other properties than the named ones are refused), most
    # white space, print, any order.
    options = (whitespace == "free", None, (item, key), False, None, False, False)
    printed = str(library_grammar.from_json_schema(schema_json, *options).to_string())
    printed = _SHORT_CODE.sub(lambda match: f"\\u00{match[1]}" if match[1] else match[0], printed)
    text, count = _ESCAPE_RULE.subn(lambda _: _ESCAPES, printed)
    if count != 1:
        raise RuntimeError("this release of XGrammar writes its grammars otherwise; install the locked one")
    text = _MARK.sub(lambda match: f"({patterns[int(match[1])]})", _LOOSE_CHARS.sub(lambda _: _CHARS, text))
    return _ANY_RULES.sub(lambda match: f'{match[1]}"{item}"', text) if whitespace == "compact" else text


def _with_marks(schema: Any, patterns: list[str]) -> Any:
    """The schema with a mark for each pattern: XGrammar's own regular expressions let more through than they say."""

    def mark(pattern: str) -> str:
        patterns.append(pattern)
        return f"mark{len(patterns) - 1}"

    if isinstance(schema, list):
        return [_with_marks(item, patterns) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for keyword, argument in schema.items():
        if keyword == "pattern":
            found[keyword] = mark(argument)
        elif keyword == "format":
            found["pattern"] = FORMATS[argument]  # known to be taken for what it says, and quicker than a grammar
        elif keyword == "enum":
            found[keyword] = argument
        elif keyword == "patternProperties":
            found[keyword] = {mark(pattern): _with_marks(item, patterns) for pattern, item in argument.items()}
        elif keyword in ("properties", "$defs"):
            found[keyword] = {name: _with_marks(item, patterns) for name, item in argument.items()}
        else:
            found[keyword] = _with_marks(argument, patterns)
    return found


def without_halves(ebnf: str) -> str:
    """A grammar whose negated classes have no half of a surrogate pair among their characters."""
    return _TOKEN.sub(lambda match: f"[^\\uD800-\\uDFFF{match[0][2:]}" if match[0][:2] == "[^" else match[0], ebnf)


def choices_ebnf(choices: Iterable[str]) -> str:
    """A grammar for one of some texts."""
    return "root ::= " + " | ".join(utf8(json.dumps(choice, ensure_ascii=False)) for choice in choices)
