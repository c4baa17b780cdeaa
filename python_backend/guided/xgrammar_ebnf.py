"""EBNF as XGrammar writes it for a JSON schema, made tighter where it lets through what is no JSON.

Knows nothing of keywords: the schema is one that XGrammar enforces as it stands.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from python_backend.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from python_backend.guided.guide import Whitespace

_SEPARATORS: dict[Whitespace, tuple[str, str]] = {"single": (", ", ": "), "compact": (",", ":"), "free": (",", ":")}
# Characters of strings with a length: control characters would be among them.
_LOOSE_CHARS, _CHARS = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\]"
# Escapes: of what needs one. Others would write a name in a second way, or half of a surrogate pair.
_ESCAPES = r'basic_escape ::= (([\"\\bfnrt]) | ("u00" [01] [A-Fa-f0-9]))'
_ESCAPE_RULE = re.compile(r"^basic_escape ::= .*$", re.MULTILINE)
# Parts of values that the schema says nothing about keep to ", " whatever was asked for.
_ANY_RULES = re.compile(r'^(basic_(?:array_items|object_properties) ::= \(\()", "', re.MULTILINE)


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
    item, key = _SEPARATORS[whitespace]
    schema_json = utf8(json.dumps(schema, ensure_ascii=False))
    # Any white space, indentation, separators, strict mode (other properties than the named ones are refused), most
    # white space, print, any order.
    options = (whitespace == "free", None, (item, key), False, None, False, False)
    text, count = _ESCAPE_RULE.subn(
        lambda _: _ESCAPES, str(library_grammar.from_json_schema(schema_json, *options).to_string())
    )
    if count != 1:
        raise RuntimeError("this release of XGrammar writes its grammars otherwise; install the locked one")
    text = text.replace(_LOOSE_CHARS, _CHARS)
    return _ANY_RULES.sub(lambda match: f'{match[1]}"{item}"', text) if whitespace == "compact" else text


def choices_ebnf(choices: Iterable[str]) -> str:
    """A grammar for one of some texts."""
    return "root ::= " + " | ".join(utf8(json.dumps(choice, ensure_ascii=False)) for choice in choices)


def utf8(text: str) -> str:
    """The text itself.

    Raises:
        InvalidRequest: it holds half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"The guide holds half of a surrogate pair (U+{ord(text[error.start]):04X}), which no UTF-8 text can have."
        ) from None
    return text
