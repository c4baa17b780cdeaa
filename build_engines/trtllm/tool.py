"""Command lines of TensorRT-LLM's tools, checked flag by flag against what release 1.2.1 takes.

`flags.json` is that table. Knows nothing of specs.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from python_backend.errors import BuildError

Value = str | int | float | bool | tuple[str, ...]
_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "flag": (bool,),
    "switch": (bool,),
}


@cache
def flag_table() -> dict[str, Any]:
    """The tools and their flags."""
    table: dict[str, Any] = json.loads((Path(__file__).parent / "flags.json").read_text())
    return table


@dataclass(frozen=True, slots=True)
class Command:
    """One run of a tool; a flag that is False is left out, True stands alone."""

    tool: str
    flags: dict[str, Value]
    prefix: str = ""  # directory the tool's path is relative to, as the shell sees it

    def findings(self) -> list[str]:
        """What the tool would refuse, or silently take for something else."""
        known = flag_table()["tools"][self.tool]["flags"]
        found = [f"{self.tool}: {name} is missing." for name, flag in known.items() if self._lacks(name, flag)]
        for name, value in self.flags.items():
            flag = known.get(name)
            if flag is None:
                found.append(f"{self.tool} {flag_table()['version']} has no flag {name}.{_hint(name)}")
            else:
                found += [f"{self.tool}: {name} {text}" for text in _wrong(flag, value)]
        return found

    def checked(self) -> Command:
        """Itself.

        Raises:
            BuildError: all findings.
        """
        found = self.findings()
        if found:
            raise BuildError("\n".join(found))
        return self

    def shell(self) -> str:
        """A line for a script, a flag on each line; values that hold $ are left to the shell."""
        program = flag_table()["tools"][self.tool]["program"]
        if self.prefix:
            interpreter, path = program.split(" ")
            program = f'{interpreter} "{self.prefix}/{path}"'
        return " \\\n    ".join(
            [program, *(_words(name, value) for name, value in self.flags.items() if value is not False)]
        )

    def _lacks(self, name: str, flag: dict[str, Any]) -> bool:
        return bool(flag.get("required")) and name not in self.flags


def _wrong(flag: dict[str, Any], value: Value) -> list[str]:
    values: tuple[Any, ...] = value if isinstance(value, tuple) else (value,)
    if isinstance(value, tuple) and not flag.get("many"):
        return ["takes one value."]
    found = []
    for one in values:
        if not isinstance(one, _TYPES[flag["type"]]) or (
            isinstance(one, bool) and flag["type"] not in ("flag", "switch")
        ):
            found.append(f"is {one!r}; it takes {flag['type']}.")
        elif flag.get("choices") and one not in flag["choices"]:
            found.append(f"is {one!r}; allowed: {', '.join(flag['choices'])}.")
        elif isinstance(one, (int, float)) and one < 0:
            found.append(f"is {one}; it must not be negative.")
    return found


def _hint(name: str) -> str:
    gone = {
        "--max_output_len": " Write --max_seq_len, the sum of prompt and answer.",
        "--use_inflight_batching": " Paged KV cache and packed input are what it was for; leave it out.",
        "--paged_kv_cache": " Write --kv_cache_type paged.",
        "--auto_parallel": " It was removed; cut the checkpoint with tp and pp.",
        "--gpus_per_node": " It was removed; the checkpoint's mapping decides.",
    }
    return gone.get(name, "")


def _words(name: str, value: Value) -> str:
    if value is True:
        return name
    values = value if isinstance(value, tuple) else (value,)
    return " ".join([name, *(_quoted(str(one)) for one in values)])


def _quoted(text: str) -> str:
    return f'"{text}"' if text.startswith("$") else shlex.quote(text)
