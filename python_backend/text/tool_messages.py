"""Messages about tools, as chat templates want them: earlier calls, and templates that know nothing of tools.

Knows nothing of templates themselves.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from python_backend.text.tool_formats import described

if TYPE_CHECKING:
    from collections.abc import Sequence

Message = dict[str, Any]


def with_parsed_arguments(message: Message) -> Message:
    """OpenAI sends the arguments of earlier calls as JSON text; templates were written for the values."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_parsed(call) for call in calls]}


def without_tools(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """The same said in plain messages: tools in the system message, calls and their results as text."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    if plain[0]["role"] == "system":
        content = f"{plain[0]['content']}\n\n{described(tools)}"
        return [{**plain[0], "content": content}, *plain[1:]]
    return [{"role": "system", "content": described(tools)}, *plain]


def _parsed(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _plain(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    written = [f"<tool_call>\n{json.dumps(_called(call), ensure_ascii=False)}\n</tool_call>" for call in calls]
    content = "\n".join([*([message["content"]] if message.get("content") else []), *written])
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}


def _called(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    return {"name": function.get("name"), "arguments": function.get("arguments")}
