"""A YAML file as plain data together with the line of every key. Knows nothing of what the keys mean."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from python_backend.errors import BuildError

Location = tuple[str, ...]
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class SpecFile:
    """What a file says and where it says it."""

    path: Path
    data: dict[str, Any]
    lines: dict[Location, int]
    findings: tuple[tuple[Location, str], ...]  # what YAML itself lets pass: keys given twice

    @classmethod
    def read(cls, path: Path) -> SpecFile:
        """Read a YAML mapping.

        Raises:
            BuildError: no such file, not YAML, or not a mapping.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BuildError(f"{path}: the spec cannot be read: {error}.") from error
        try:
            node = yaml.compose(text, _LOADER)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise BuildError(f"{path}:{line}: not YAML: {error.problem}.") from error
        if not isinstance(node, yaml.MappingNode):
            raise BuildError(f"{path}:1: the spec must be a mapping of keys to values.")
        lines: dict[Location, int] = {(): 1}
        findings: list[tuple[Location, str]] = []
        _index(node, (), lines, findings)
        return cls(path, yaml.load(text, _LOADER), lines, tuple(findings))

    def line(self, location: Location) -> int:
        """The line of a key, or of the nearest key around it."""
        while location not in self.lines:
            location = location[:-1]
        return self.lines[location]

    def where(self, location: Location) -> str:
        """`file:line` of a key."""
        return f"{self.path}:{self.line(location)}"

    def section(self, key: str) -> dict[str, Any]:
        """A mapping of the top level, empty when it is missing or no mapping."""
        value = self.data.get(key)
        return value if isinstance(value, dict) else {}


def _index(node: yaml.Node, at: Location, lines: dict[Location, int], findings: list[tuple[Location, str]]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            place = (*at, str(key.value))
            if place in lines:
                findings.append((place, f"given twice (first on line {lines[place]})."))
            lines[place] = key.start_mark.line + 1
            _index(value, place, lines, findings)
    elif isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            place = (*at, str(number))
            lines[place] = item.start_mark.line + 1
            _index(item, place, lines, findings)
