"""Patterns of ECMA-262 rewritten with code points, classes, groups and repetitions only: as EBNF, or for Python.

Classes are computed here, so that what a pattern may write inside a JSON string is known and not left to a library.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from python_backend.guided.code_points import LAST, TEXT_CHARS, Ranges, complement, minus, union

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_CONTROL_ESCAPES = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}
_DIGIT = ((48, 57),)
_WORD = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE = (
    *((9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
_LINE_ENDS = ((10, 10), (13, 13), (0x2028, 0x2029))
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}


class PatternProblem(ValueError):
    """A pattern has no normal form; the message says which part."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How the parts of a pattern are written: a character, the same in a class, what joins parts, and no text."""

    char: Callable[[int], str]
    class_char: Callable[[int], str]
    join: str
    empty: str

    def of(self, ranges: Ranges) -> str:
        """One character of these."""
        if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
            return self.char(ranges[0][0])
        write = self.class_char
        return "[" + "".join(write(a) if a == b else f"{write(a)}-{write(b)}" for a, b in ranges) + "]"

    def group(self, texts: Sequence[str]) -> str:
        """One of these."""
        return f"({'|'.join(text or self.empty for text in texts)})"


EBNF = Dialect(
    char=lambda code: json.dumps(chr(code), ensure_ascii=False),
    class_char=lambda code: (
        chr(code)
        if chr(code).isascii() and chr(code).isalnum()
        else f"\\u{code:04X}"
        if code < 65536
        else f"\\U{code:08X}"
    ),
    join=" ",
    empty='""',
)
PYTHON = Dialect(char=lambda code: re.escape(chr(code)), class_char=lambda code: f"\\U{code:08X}", join="", empty="")


def rewritten(pattern: str, dialect: Dialect, chars: Ranges = TEXT_CHARS, *, search: bool = False) -> str:
    """A pattern that matches whole texts of `chars`.

    Args:
        pattern: in the syntax of ECMA-262 with the flag u; named groups are groups, lazy repetitions are repetitions.
        dialect: of the result.
        chars: code points that the text may have; a class loses all others.
        search: the pattern may match anywhere in the text where it has no anchor, as in JSON Schema.

    Raises:
        PatternProblem: it has look-around, a back-reference, an anchor inside, a syntax error, or a character that is
            not one of `chars`.
    """
    return _Parser(pattern, dialect, chars, search).whole()


def all_but(words: list[str], dialect: Dialect, chars: Ranges) -> str:
    """A pattern for every text of `chars` but these words."""
    trie: dict[str, dict] = {}
    for word in words:
        node = trie
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}
    return _all_but(trie, dialect, chars)


def _all_but(trie: dict[str, dict], dialect: Dialect, chars: Ranges) -> str:
    children = {char: child for char, child in trie.items() if char}
    others = minus(chars, union([(ord(char), ord(char)) for char in children]))
    parts = [f"{dialect.of(others)}{dialect.join}{dialect.of(chars)}*"] + ([] if "" in trie else [""])
    for char, child in children.items():
        if not minus(((ord(char), ord(char)),), chars):
            parts.append(f"{dialect.char(ord(char))}{dialect.join}{_all_but(child, dialect, chars)}")
    return dialect.group(parts)


@dataclass(slots=True)
class _Branch:
    """One alternative, and whether it holds the text's beginning and end."""

    text: str
    begins: bool
    ends: bool


class _Parser:
    """Recursive descent over one pattern."""

    def __init__(self, pattern: str, dialect: Dialect, chars: Ranges, search: bool) -> None:
        self._pattern, self._dialect, self._chars, self._search = pattern, dialect, chars, search
        self._at = 0

    def whole(self) -> str:
        branches = self._branches(top=True)
        if self._at < len(self._pattern):
            raise PatternProblem(f"a ) without ( at {self._at}")
        rest = [f"{self._dialect.of(self._chars)}*"] if self._search else []
        texts = [
            self._dialect.join.join(
                [*([] if b.begins else rest), b.text or self._dialect.empty, *([] if b.ends else rest)]
            )
            for b in branches
        ]
        return texts[0] if len(texts) == 1 else self._dialect.group(texts)

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _take(self) -> str:
        char = self._peek()
        if not char:
            raise PatternProblem("its end comes too early")
        self._at += 1
        return char

    def _branches(self, top: bool) -> list[_Branch]:
        found = [self._branch(top)]
        while self._peek() == "|":
            self._at += 1
            found.append(self._branch(top))
        return found

    def _branch(self, top: bool) -> _Branch:
        begins = top and self._peek() == "^"
        self._at += begins
        parts: list[str] = []
        while self._peek() not in ("", "|", ")"):
            if top and self._peek() == "$" and self._pattern[self._at + 1 : self._at + 2] in ("", "|"):
                self._at += 1
                return _Branch(self._dialect.join.join(parts), begins, True)
            parts.append(self._atom() + self._repetition())
        return _Branch(self._dialect.join.join(parts), begins, False)

    def _atom(self) -> str:
        char = self._take()
        if char == "(":
            return self._group()
        if char == "[":
            return self._class()
        if char == ".":
            return self._ranges(complement(_LINE_ENDS))
        if char in "^$":
            raise PatternProblem(f"the anchor {char} inside it")
        if char in "*+?{}])":
            raise PatternProblem(f"a bare {char} at {self._at - 1}")
        if char == "\\":
            return self._ranges(self._escape(in_class=False))
        return self._ranges(((ord(char), ord(char)),))

    def _ranges(self, ranges: Ranges) -> str:
        allowed = minus(ranges, complement(self._chars))
        if not allowed:
            raise PatternProblem(f"characters that need an escape, at {self._at - 1}")
        return self._dialect.of(allowed)

    def _group(self) -> str:
        if self._peek() == "?":
            self._at += 1
            kind = self._take()
            if kind == "<" and self._peek() not in ("=", "!"):
                while self._take() != ">":
                    pass
            elif kind != ":":
                raise PatternProblem(f"(?{kind}, which begins a look-around or sets a flag")
        texts = [branch.text for branch in self._branches(top=False)]
        if self._take() != ")":
            raise PatternProblem("a ( without )")
        return self._dialect.group(texts)

    def _repetition(self) -> str:
        char = self._peek()
        if char in ("*", "+", "?"):
            self._at += 1
            text = char
        elif char == "{":
            end = self._pattern.find("}", self._at)
            text = self._pattern[self._at : end + 1]
            low, comma, high = text[1:-1].partition(",")
            if not _is_number(low) or (high and not _is_number(high)) or (high and int(high) < int(low)):
                raise PatternProblem(f"the repetition {text or '{'}")
            text = f"{{{int(low)}{comma}{int(high) if high else ''}}}"
            self._at = end + 1
        else:
            return ""
        if self._peek() == "?":
            self._at += 1  # lazy: the same texts match
        if self._peek() in ("*", "+", "{") and self._peek():
            raise PatternProblem(f"a repetition of a repetition at {self._at}")
        return text

    def _class(self) -> str:
        negative = self._peek() == "^"
        self._at += negative
        ranges: list[tuple[int, int]] = []
        while self._peek() != "]":
            low = self._member()
            if self._peek() == "-" and self._pattern[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._member()
                if not (_is_single(low) and _is_single(high)) or low[0][0] > high[0][0]:
                    raise PatternProblem(f"a range of a class before {self._at}")
                ranges.append((low[0][0], high[0][0]))
            else:
                ranges += low
        self._at += 1
        found = union(ranges)
        return self._ranges(complement(found) if negative else found)

    def _member(self) -> Ranges:
        char = self._take()
        return self._escape(in_class=True) if char == "\\" else ((ord(char), ord(char)),)

    def _escape(self, in_class: bool) -> Ranges:
        char = self._take()
        if char.lower() in _CLASSES:
            ranges = _CLASSES[char.lower()]
            return complement(ranges) if char.isupper() else ranges
        if char == "b" and in_class:
            return ((8, 8),)
        if char == "0" and self._peek().isdigit():
            raise PatternProblem(f"\\0{self._peek()}")
        if char in _CONTROL_ESCAPES:
            code = _CONTROL_ESCAPES[char]
        elif char == "x":
            code = self._hex(2)
        elif char == "u":
            code = self._unicode()
        elif char == "c" and self._peek().isascii() and self._peek().isalpha():
            code = ord(self._take()) % 32
        elif char.isalnum():
            raise PatternProblem(f"\\{char}")
        else:
            code = ord(char)
        return ((code, code),)

    def _unicode(self) -> int:
        if self._peek() == "{":
            end = self._pattern.find("}", self._at)
            digits = self._pattern[self._at + 1 : end]
            self._at = end + 1
            if not _is_hex(digits) or int(digits, 16) > LAST:
                raise PatternProblem(f"\\u{{{digits}")
            return int(digits, 16)
        code = self._hex(4)
        if 0xD800 <= code < 0xDC00 and self._pattern.startswith("\\u", self._at):
            self._at += 2
            low = self._hex(4)
            if not 0xDC00 <= low < 0xE000:
                raise PatternProblem(f"half of a surrogate pair before {self._at}")
            return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
        return code

    def _hex(self, digits: int) -> int:
        text = self._pattern[self._at : self._at + digits]
        if len(text) != digits or not _is_hex(text):
            raise PatternProblem(f"an escape with the digits {text!r}")
        self._at += digits
        return int(text, 16)


def _is_single(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _is_hex(text: str) -> bool:
    return bool(text) and all(char in "0123456789abcdefABCDEF" for char in text)
