"""The lines of a config.pbtxt on which tensors, parameters and ensemble steps begin. Knows nothing of their meaning."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

Place = tuple[str, ...]  # ("input", name), ("parameter", key), ("step", model), ("step", model, tensor)
_TOKEN = re.compile(
    r'#[^\n]*|"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'|[A-Za-z_][\w.]*|[{}\[\]:,;<>]|[^\s{}\[\]:,;<>"\'#]+|\n'
)
_NAMES = {"input": "name", "output": "name", "parameters": "key", "step": "model_name"}
_CALLED = {"parameters": "parameter"}


@dataclass(slots=True)
class _Block:
    """A message while it is open."""

    kind: str
    line: int
    name: str = ""
    keys: list[tuple[str, int]] = field(default_factory=list)


def lines_of(text: str) -> dict[Place, int]:
    """Where each tensor, parameter, step and mapped tensor of a step is; broken text gives what comes before."""
    found: dict[Place, int] = {}
    stack: list[_Block] = []
    lists: list[tuple[str, int]] = []  # kind of the items, and how many messages are open around them
    line, word, word_line, field_name = 1, "", 1, ""
    for token in _TOKEN.findall(text):
        if token == "\n":
            line += 1
        elif token == "[":
            lists.append((word, len(stack)))
        elif token == "]" and lists:
            lists.pop()
        elif token in "{<":
            in_list = lists and lists[-1][1] == len(stack)  # items after the first have no name in front of them
            stack.append(_Block(lists[-1][0], line) if in_list else _Block(word, word_line))
        elif token in "}>" and stack:
            _close(stack, found)
        elif token[0] in "\"'" and stack:
            _string(stack, field_name, token[1:-1], line)
        elif token == ":":
            field_name = word
        elif re.match(r"[A-Za-z_]", token):
            word, word_line = token, line
    return found


def _string(stack: list[_Block], field_name: str, value: str, line: int) -> None:
    block = stack[-1]
    if field_name == _NAMES.get(block.kind):
        block.name = value
    elif field_name == "key" and block.kind in ("input_map", "output_map") and len(stack) > 1:
        stack[-2].keys.append((value, line))


def _close(stack: list[_Block], found: dict[Place, int]) -> None:
    block = stack.pop()
    if block.kind in _NAMES and block.name:
        kind = _CALLED.get(block.kind, block.kind)
        found.setdefault((kind, block.name), block.line)
        for key, line in block.keys:
            found.setdefault((kind, block.name, key), line)
