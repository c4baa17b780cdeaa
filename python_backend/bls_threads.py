"""Threads of Triton's Python backend for what a model asks of other models (its BLS).

One is taken by each question until its last response. With all of them taken by answers that stream for seconds, no
further question gets through, a `stop` least of all.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

DEFAULT = 32  # thread-pool-size of the backend when nobody says
KEPT_FREE = 4  # for stops, and for questions that are answered at once
_WAITING = 16  # beside a full batch: the engine's next sequences are there when one ends
_OPTION = re.compile(rb"(?:^|=)python,thread-pool-size=(\d+)$")


def option(max_batch_size: int) -> str:
    """The option of tritonserver with which a model can fill a batch of this many sequences."""
    return f"--backend-config=python,thread-pool-size={max(DEFAULT, max_batch_size + _WAITING + KEPT_FREE)}"


def for_long_answers(command: Path | None = None) -> int:
    """How many questions of seconds a model of this server may have under way.

    Args:
        command: where the server's command line is to be read; the server is the parent of a stub.
    """
    try:
        words = (command or Path(f"/proc/{os.getppid()}/cmdline")).read_bytes().split(b"\0")
    except OSError:
        words = []
    found = [int(match[1]) for word in words if (match := _OPTION.search(word))]
    return max(1, (found[-1] if found else DEFAULT) - KEPT_FREE)
