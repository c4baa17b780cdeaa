"""`${name}` of upstream's templates that nobody filled in: where they are, and a text that can be read all the same.

Knows nothing of what the values would mean.
"""

from __future__ import annotations

import re

UNKNOWN_TYPE = "TYPE_INVALID"  # what an unfilled data_type is read as
UNKNOWN_NUMBER = 2**31 - 1  # and an unfilled number
_PLACEHOLDER = re.compile(r"\$\{[^}]*\}")
_BARE = re.compile(r"(\w+\s*:\s*)\$\{[^}]*\}")
_IN_LIST = re.compile(r"([\[,]\s*)\$\{[^}]*\}")
_IN_QUOTES = re.compile(r"\"[^\"]*\"")


def holds_placeholder(text: str) -> bool:
    """Whether a value was never filled in."""
    return _PLACEHOLDER.search(text) is not None


def placeholder_findings(text: str) -> list[tuple[int, str]]:
    """Line and finding of each placeholder in the text of a config.pbtxt.

    Triton cannot read a file with a bare one; the backends take one in quotes for no value at all.
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            continue
        quoted = {match for part in _IN_QUOTES.findall(line) for match in _PLACEHOLDER.findall(part)}
        for match in _PLACEHOLDER.findall(line):
            harm = (
                "it counts as not set. Write a value, or take the parameter out"
                if match in quoted
                else ("Triton cannot read the file. Write a value")
            )
            found.append((number, f"{match} was never filled in: {harm}."))
    return found


def readable(text: str) -> str:
    """The text with unknown values for bare placeholders, on the same lines."""
    text = _IN_LIST.sub(rf"\g<1>{UNKNOWN_NUMBER}", text)
    return _BARE.sub(lambda match: match[1] + _unknown(match[1]), text)


def _unknown(key: str) -> str:
    name = key.rstrip(": \t")
    if name == "data_type":
        return UNKNOWN_TYPE
    return "false" if name in ("decoupled", "preserve_ordering", "optional") else str(UNKNOWN_NUMBER)
