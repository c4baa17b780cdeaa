"""From what a model wrote to tool calls in OpenAI's shape, whole or as they grow.

Pure: what a piece adds is the difference of two readings, of all text before it and of all text with it.
"""

from __future__ import annotations

import json
import secrets
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from python_backend.text.detokenize import settled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from python_backend.text.output import Piece
    from python_backend.text.tokenizer import Tokenizer
    from python_backend.text.tool_formats import ToolFormat

_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # what Mistral's templates insist on; others take any


@dataclass(frozen=True, slots=True)
class Call:
    """A call as far as it has been written."""

    name: str
    arguments: str  # JSON text


@dataclass(frozen=True, slots=True)
class Reading:
    """An answer taken apart."""

    content: str
    calls: tuple[Call, ...] = ()


def read_answer(text: str, tool_format: ToolFormat, *, final: bool = True) -> Reading:
    """Content and calls of an answer; unless `final`, what may become the start of a call is held back."""
    content: list[str] = []
    calls: list[Call] = []
    position = 0
    while True:
        start = text.find(tool_format.trigger, position)
        if start < 0:
            rest = text[position:]
            content.append(rest if final else rest[: len(rest) - _overlap(rest, tool_format.trigger)])
            break
        content.append(text[position:start])
        begun = text[start : start + len(tool_format.start)]
        if begun != tool_format.start:
            if final and not tool_format.start.startswith(begun):
                content.append(text[start:])  # nothing that we know how to read
            break
        end = _read_calls(text, start + len(tool_format.start), tool_format, calls)
        if end is None:
            break
        position = end
    # White space around calls only separates them, and max_tokens may cut the next one off.
    shown = [
        part for index, part in enumerate(content) if index == 0 or not tool_format.trigger.startswith(part.strip())
    ]
    return Reading("".join(shown), tuple(calls))


def new_calls(before: Sequence[Call], now: Sequence[Call]) -> list[dict[str, Any]]:
    """What to tell of the calls, as entries of OpenAI's `tool_calls`: an id and a name once, arguments as they come."""
    entries: list[dict[str, Any]] = []
    for index, call in enumerate(now):
        if index >= len(before):
            entries.append(
                {
                    "index": index,
                    "id": "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH)),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
            )
        elif len(call.arguments) > len(before[index].arguments):
            more = call.arguments[len(before[index].arguments) :]
            entries.append({"index": index, "function": {"arguments": more}})
    return entries


def piece_calls(tokenizer: Tokenizer, piece: Piece, tool_format: ToolFormat, skip_special: bool) -> tuple[str, str]:
    """The text that a piece adds, and the JSON list of what it adds to the calls ("" for nothing).

    The piece's context has to be all that was generated before.
    """
    before = Reading("")
    if piece.context:
        text = _text(tokenizer, piece.context, tool_format, skip_special)
        before = read_answer(settled(text), tool_format, final=False)
    text = _text(tokenizer, [*piece.context, *piece.ids], tool_format, skip_special)
    text = text[: len(text) - piece.text_cut] if piece.final else settled(text)
    now = read_answer(text, tool_format, final=piece.final)
    entries = new_calls(before.calls, now.calls)
    return now.content[len(before.content) :], json.dumps(entries, ensure_ascii=False) if entries else ""


def _text(tokenizer: Tokenizer, ids: Sequence[int], tool_format: ToolFormat, skip_special: bool) -> str:
    if not tool_format.special:
        return tokenizer.decode(ids, skip_special)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    if skip_special:
        for special in tokenizer.vocabulary.special_texts:
            if special not in tool_format.start + tool_format.middle:
                text = text.replace(special, "")
    return text


def _read_calls(text: str, position: int, tool_format: ToolFormat, calls: list[Call]) -> int | None:
    """Read calls from the first one's name on; where they end, None where they have not ended yet."""
    while True:
        middle = text.find(tool_format.middle, position)
        if middle < 0:
            return None
        name, arguments = text[position:middle], middle + len(tool_format.middle)
        end = json_end(text, arguments)
        calls.append(Call(name, text[arguments:end]))
        if end is None or not text.startswith(tool_format.tail, end):
            return None
        position = end + len(tool_format.tail)
        following = tool_format.between + tool_format.head
        if tool_format.opening and text.startswith(following, position):
            position += len(following)
            continue
        if not text.startswith(tool_format.closing, position):
            return None
        return position + len(tool_format.closing)


def json_end(text: str, start: int) -> int | None:
    """Where the JSON object that begins at `start` ends; None where it has not ended yet."""
    depth, inside_string, escaped = 0, False, False
    for position in range(start, len(text)):
        character = text[position]
        if inside_string:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                inside_string = False
        elif character == '"':
            inside_string = True
        elif character in "{[":
            depth += 1
        elif character in "}]":
            depth -= 1
            if depth == 0:
                return position + 1
    return None


def _overlap(text: str, trigger: str) -> int:
    """How many characters at the end of the text begin the trigger."""
    for length in range(min(len(text), len(trigger) - 1), 0, -1):
        if text.endswith(trigger[:length]):
            return length
    return 0
