"""The stub processes of a tritonserver, one for each instance of a Python model. Knows only /proc.

Triton 2.51 does not start a stub again that has ended, calls itself ready all the same, and lets the requests that it
held wait for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_NAME = "triton_python_b"  # as the kernel cuts it off


@dataclass(frozen=True, slots=True)
class Stub:
    """A process and the model that it runs."""

    pid: int
    model: str

    def lives(self) -> bool:
        """False as soon as it has ended, whether Triton has noticed or not."""
        status = _status(self.pid)
        return status is not None and status[0] not in "ZX"


def stubs_of(server_pid: int) -> tuple[Stub, ...]:
    """Those that live now."""
    found = []
    for path in _PROC.glob("[0-9]*"):
        pid = int(path.name)
        status = _status(pid)
        if status is None or status[1] != server_pid or status[0] in "ZX" or status[2] != _NAME:
            continue
        model = _model(pid)
        if model is not None:
            found.append(Stub(pid, model))
    return tuple(found)


def _status(pid: int) -> tuple[str, int, str] | None:
    """State, parent and name of a process; None when there is none."""
    try:
        head, _, fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")
    except OSError:
        return None
    state, parent = fields.split()[:2]
    return state, int(parent), head.partition("(")[2]


def _model(pid: int) -> str | None:
    """By the command line: stub, <repository>/<model>/<version>/model.py, …"""
    try:
        arguments = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    return Path(arguments[1].decode(errors="replace")).parts[-3] if len(arguments) > 1 else None
