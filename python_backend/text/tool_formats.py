"""How models write tool calls: which format a chat template teaches, its texts, and the structure that enforces it.

Knows nothing of requests or tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from python_backend.text.tool_requests import ToolRequest


_VALUES = frozenset({"const", "enum", "default", "examples"})  # keywords whose content is no schema


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The text of calls: opening, then head NAME middle ARGUMENTS tail for each, with `between`, then closing."""

    name: str
    trigger: str  # what begins a call and appears in no other text
    head: str
    middle: str
    tail: str
    between: str = ""
    opening: str = ""
    closing: str = ""
    special: bool = False  # whether the trigger is a special token
    one_call: bool = False  # whether the format has no way to say several

    @property
    def start(self) -> str:
        """All that stands before the first call's name."""
        return self.opening + self.head


HERMES = ToolFormat(
    "hermes",
    trigger="<tool_call>",
    head='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    tail="}\n</tool_call>",
    between="\n",
)
LLAMA3 = ToolFormat(
    "llama3",
    trigger='{"name": "',
    head='{"name": "',
    middle='", "parameters": ',
    tail="}",
    one_call=True,
)
MISTRAL = ToolFormat(
    "mistral",
    trigger="[TOOL_CALLS]",
    opening="[TOOL_CALLS][",
    head='{"name": "',
    middle='", "arguments": ',
    tail="}",
    between=", ",
    closing="]",
    special=True,
)
MISTRAL_ARGS = ToolFormat(
    "mistral-args", trigger="[TOOL_CALLS]", head="[TOOL_CALLS]", middle="[ARGS]", tail="", special=True
)
FORMATS = {tool_format.name: tool_format for tool_format in (HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS)}


def template_format(template: str) -> ToolFormat | None:
    """The format that a chat template teaches; None where it does not speak of tools."""
    if "tools" not in template:
        return None
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<tool_call>" not in template and '"parameters"' in template:
        return LLAMA3
    return HERMES


def tools_guide(request: ToolRequest, tool_format: ToolFormat) -> str:
    """A guide of type structural_tag: with `auto` free text and calls, otherwise nothing but calls."""
    one = tool_format.one_call or not request.parallel
    if tool_format is MISTRAL:
        structures = [{"begin": tool_format.trigger, "schema": _list_schema(request, one), "end": ""}]
        one = True  # the list holds all of them
    else:
        structures = [
            {
                "begin": tool_format.head + tool.name + tool_format.middle,
                "schema": tool.parameters,
                "end": tool_format.tail,
            }
            for tool in request.callable
        ]
    guide: dict[str, Any] = {"structures": structures, "triggers": [tool_format.trigger], "stop_after_first": one}
    if request.choice != "auto":
        guide["separator"] = tool_format.between
    return json.dumps(guide, ensure_ascii=False)


def _list_schema(request: ToolRequest, one: bool) -> dict[str, Any]:
    """Calls as items of a JSON list."""
    items = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.name},
                "arguments": _moved(tool.parameters, f"/items/anyOf/{index}/properties/arguments"),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for index, tool in enumerate(request.callable)
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": items}}
    return {**schema, "maxItems": 1} if one else schema


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to itself hold where it stands inside another one."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: f"#{place}{value[1:]}"
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else value
        if key in _VALUES
        else _moved(value, place)
        for key, value in schema.items()
    }


def described(tools: Sequence[Mapping[str, Any]]) -> str:
    """The system message for templates that do not speak of tools."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You can call functions. To call one, write\n"
        '<tool_call>\n{"name": "the function\'s name", "arguments": {"argument": "value"}}\n</tool_call>\n'
        f"The functions, one JSON description a line:\n{lines}"
    )
