"""Reads Triton's growing log file: what a person should see of it, and why a model did not load.

Knows the shape of Triton's lines and nothing of processes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

# E1201 12:49:05.156318 22715 server.cc:241] "text"
_LINE = re.compile(r'^(?P<level>[IWEF])\d{4} [\d:.]+ \d+ \S+\] "?(?P<text>.*?)"?$')
_LOAD_FAILURE = re.compile(r"failed to load '(?P<model>[^']+)'(?: version \d+)?: (?P<reason>.*)", re.DOTALL)
_POLL_FAILURE = re.compile(r"Poll failed for model directory '(?P<model>[^']+)': (?P<reason>.*)", re.DOTALL)
_MISFIT = re.compile(r"Invalid argument: in ensemble (?P<model>[^,]+), (?P<reason>.*)", re.DOTALL)
_WITHOUT_STEP = re.compile(
    r"Invalid argument: ensemble (?P<model>\S+) (?P<reason>contains models that are not .*)", re.DOTALL
)
_FAILURES = (_LOAD_FAILURE, _POLL_FAILURE, _MISFIT, _WITHOUT_STEP)
_CONSEQUENCES = ("depends on", "contains models that are not available")  # of another model's failure, if there is one
_UNLOADED = re.compile(r"successfully unloaded '(?P<model>[^']+)'")
_TOLD_TO_STOP = re.compile(r"^Signal \(\d+\) received\.$")
_GAVE_UP = "; the server stops."  # how a model of ours says that it has told Triton to stop, and why
_STATUS_CODE = re.compile(r"^(Internal|Invalid argument|Not found|Unavailable|Unsupported|Unknown|Already exists): ")
_EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*(Exception|Error)): (?!$)")

# What Triton says on every machine without a GPU, and at every stop; nothing to act on.
NOISE = (
    "CudaDriverHelper has not been initialized",
    "CUDA driver version is insufficient",
    "Unable to allocate pinned system memory",
    "Failed to initialize NVML",
    "DCGM unable to start",
    "CUDA memory pool disabled",
    "failed to load all models",  # repeats, as a table, what the model's own line says
)


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """A model that did not load, and Triton's reason in one line."""

    model: str
    reason: str


class LogReader:
    """The lines that were added to a log file since the last look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._half = ""

    def new_lines(self) -> list[str]:
        """Whole lines only; a line that is still being written comes with a later call."""
        with self.path.open("rb") as log:
            log.seek(self._offset)
            added = log.read()
        self._offset += len(added)
        *lines, self._half = (self._half + added.decode(errors="replace")).split("\n")
        return lines


def for_a_person(line: str) -> str | None:
    """The text of an error line that is worth a place on the screen; None for everything else."""
    found = _LINE.match(line)
    if found is None or found["level"] not in "EF" or any(noise in found["text"] for noise in NOISE):
        return None
    return found["text"]


def load_failures(lines: list[str]) -> list[LoadFailure]:
    """Models that did not load, in order, each once, with a reason without Triton's and Python's decoration.

    An ensemble that fails because one of its steps did is left out as long as the step itself is there.
    """
    failures: dict[str, LoadFailure] = {}
    for at, line in enumerate(lines):
        found = _LINE.match(line)
        if found is None or found["level"] not in "EF":
            continue
        match = next(filter(None, (pattern.search(found["text"]) for pattern in _FAILURES)), None)
        if match:
            reason = match["reason"].strip()
            if not reason or reason.endswith(":"):  # the message goes on in the next line
                reason = f"{reason} {_continued(lines[at + 1 :])}"
            failures.setdefault(match["model"], LoadFailure(match["model"], _plain(reason)))
    causes = [failure for failure in failures.values() if not any(text in failure.reason for text in _CONSEQUENCES)]
    return causes or list(failures.values())


def unloaded_models(lines: list[str]) -> set[str]:
    """Models that Triton has let go, with the processes that they had."""
    found = (_UNLOADED.search(line) for line in lines)
    return {match["model"] for match in found if match}


def told_to_stop(lines: list[str]) -> bool:
    """Whether somebody has sent Triton a signal to stop."""
    return any(_TOLD_TO_STOP.match(line) for line in lines)


def reason_of_a_model(lines: list[str]) -> str | None:
    """Why a model of ours has told Triton to stop; None when none has."""
    return next((text for text in map(for_a_person, lines) if text and text.endswith(_GAVE_UP)), None)


def _continued(lines: list[str]) -> str:
    for line in lines:
        if _LINE.match(line):
            return ""
        if line.strip():
            return line.strip()
    return ""


def _plain(reason: str) -> str:
    reason = reason.partition(r"\n\nAt:")[0].replace(r"\n", " ")  # Triton escapes the line ends of a Python traceback
    for decoration in (_STATUS_CODE, _EXCEPTION):
        reason = decoration.sub("", reason)
    return reason.strip().rstrip(";.").strip('"')
