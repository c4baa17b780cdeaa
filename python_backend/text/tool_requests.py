"""What a request says about tools: definitions in OpenAI's shape, and which of them may or must be called.

Knows nothing of chat templates or of Triton.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from python_backend.errors import InvalidRequest, Unsupported
from python_backend.text.json_lists import parse_list
from python_backend.text.tokenizer import check_text

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FUNCTION_KEYS = frozenset({"name", "description", "parameters", "strict"})
_ANY_ORDER = ("auto", "none", "required")


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that the model may call."""

    name: str
    parameters: dict[str, Any]  # JSON schema of an object
    definition: dict[str, Any]  # as it was sent, for the chat template


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """The tools of one prompt."""

    tools: tuple[Tool, ...]
    choice: str = "auto"  # auto, none, required, or the name of the one to call
    parallel: bool = True

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that a call may name."""
        if self.choice in _ANY_ORDER:
            return self.tools
        return tuple(tool for tool in self.tools if tool.name == self.choice)


def parse_tools(tools_json: str, choice: str = "", parallel: bool = True) -> ToolRequest | None:
    """Check tool definitions; None where no tool may be called.

    Args:
        tools_json: JSON list as in OpenAI's `tools`.
        choice: auto (or empty), none, required, the name of a tool, or OpenAI's object that names one.
        parallel: whether one answer may hold several calls.

    Raises:
        InvalidRequest: it is no such list, or the choice names no tool of it; the place is named.
        LimitExceeded: more than MAX_TOOLS.
        Unsupported: a tool that is no function.
    """
    form = ' of {"type": "function", "function": {"name": …}}'
    entries = parse_list(tools_json, "tools", form, MAX_TOOLS)
    check_text(tools_json, "tools")
    tools = tuple(_tool(entry, f"tools[{index}]") for index, entry in enumerate(entries))
    names = [tool.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidRequest(f"tools has two functions named {twice!r}; give each a name of its own.")
    chosen = _choice(choice, names)
    if chosen == "none":
        return None
    return ToolRequest(tools, chosen, parallel and chosen in _ANY_ORDER)


def _tool(entry: Any, where: str) -> Tool:
    if not isinstance(entry, dict) or entry.get("type") != "function":
        kind = entry.get("type") if isinstance(entry, dict) else entry
        raise Unsupported(f"{where} has type {str(kind)[:40]!r}; only functions can be called.")
    function = entry.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{where}.function is missing or no object.")
    unknown = sorted(function.keys() - _FUNCTION_KEYS)
    if unknown:
        raise InvalidRequest(f"{where}.function has the unknown key {unknown[0]!r}.")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{where}.function.name is {json.dumps(name)[:80]}; 1 to 64 letters, digits, dots, dashes and underscores "
            "are needed."
        )
    parameters = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise InvalidRequest(f"{where}.function.parameters must be a JSON schema of type object.")
    return Tool(name, {"type": "object", **parameters}, entry)


def _choice(text: str, names: list[str]) -> str:
    named: Any = text.strip() or "auto"
    if named.startswith(("{", '"')):
        try:
            named = json.loads(named)
        except ValueError as error:
            raise InvalidRequest(f"tool_choice is no valid JSON: {error}") from None
    if isinstance(named, dict):
        function = named.get("function")
        named = function.get("name") if isinstance(function, dict) else None
    if named in _ANY_ORDER or named in names:
        return str(named)
    raise InvalidRequest(f"tool_choice is {text[:80]!r}; allowed: auto, none, required, or one of {', '.join(names)}.")
