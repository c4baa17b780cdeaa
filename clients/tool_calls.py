"""Tool calls of an answer, put together from what arrives of them.

Knows nothing of transports or of the tools themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call, in OpenAI's terms; `arguments` is JSON text, whole once the answer has ended."""

    id: str
    name: str
    arguments: str

    def as_message_entry(self) -> dict[str, Any]:
        """The call for `tool_calls` of an assistant's message, which later requests have to repeat."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class GrowingCalls:
    """The calls of one sequence; each entry is one of OpenAI's `delta.tool_calls`."""

    def __init__(self) -> None:
        self._calls: dict[int, ToolCall] = {}

    def add(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Take the news of one response."""
        for entry in entries:
            known = self._calls.get(entry["index"], ToolCall("", "", ""))
            function = entry["function"]
            self._calls[entry["index"]] = ToolCall(
                entry.get("id", known.id), function.get("name", known.name), known.arguments + function["arguments"]
            )

    def calls(self) -> tuple[ToolCall, ...]:
        """All of them so far, in order."""
        return tuple(call for _, call in sorted(self._calls.items()))


def parse_entries(text: str) -> tuple[dict[str, Any], ...]:
    """The entries of one sequence in a response; "" holds none."""
    return tuple(json.loads(text)) if text else ()
