"""One worker process seen from the server: started when needed, asked one thing at a time, ended when it fails.

Knows nothing of caches or of grammars.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import selectors
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from python_backend import errors
from python_backend.errors import EngineFailure, LimitExceeded, Overloaded, RequestError
from python_backend.guided.backend import Grammar

if TYPE_CHECKING:
    from python_backend.guided.limits import GuideLimits
    from python_backend.request import Guide

_ROOT = Path(__file__).resolve().parents[2]
_START_TIMEOUT_S = 60.0  # a busy machine may need long to load a tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker needs to make the backend and the tokenizer that the server has."""

    backend: str
    tokenizer_file: str
    vocab_size: int
    end_ids: tuple[int, ...]
    special_tokens: tuple[str, ...]


class WorkerProcess:
    """Not for more than one thread at a time."""

    def __init__(self, settings: WorkerSettings, limits: GuideLimits) -> None:
        self._settings, self._limits = settings, limits
        self._process: subprocess.Popen[bytes] | None = None
        self._fresh = True

    def start(self) -> None:
        """Start the process, if it does not run; it gets ready while the caller does something else."""
        if self._process is not None and self._process.poll() is None:
            return
        self.stop()
        python = Path(sys.prefix) / "bin" / "python3"  # sys.executable is Triton's stub inside a server
        self._process = subprocess.Popen(
            [str(python), "-m", "python_backend.guided.worker"],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a stack overflow writes there
            bufsize=0,
        )
        self._fresh = True
        self._send({**dataclasses.asdict(self._settings), "limits": dataclasses.asdict(self._limits)})

    def kill(self) -> None:
        """End the process from another thread; whoever waits for it is told so."""
        process = self._process
        if process is not None:
            process.kill()

    def stop(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def try_out(self, guide: Guide) -> Grammar:
        """The grammar of a guide that is known to compile.

        Raises:
            RequestError: the guide is refused, or took the process down.
        """
        self.start()
        timeout_s = self._limits.compile_wall_s + (_START_TIMEOUT_S if self._fresh else 0)
        try:
            self._send(dataclasses.asdict(guide))
            reply = self._receive(timeout_s)
        except TimeoutError:
            self.stop()
            raise Overloaded(
                f"The structure could not be compiled within {timeout_s:g} s on this busy machine; try again later."
            ) from None
        except OSError:  # the process has ended
            self.stop()
            raise LimitExceeded(
                f"The structure is too complex: compiling it takes more than {self._limits.compile_cpu_s:g} s, more "
                "memory than allowed, or nests too deep. Simplify it, or split it over several requests."
            ) from None
        self._fresh = False
        if "error" in reply:
            raise _error(reply)
        return Grammar(reply["text"], tuple(reply["warnings"]))

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        data = memoryview((json.dumps(message) + "\n").encode())
        while data:
            data = data[self._process.stdin.write(data) :]

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        """One reply.

        Raises:
            TimeoutError: the time is over.
            OSError: the process has ended.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                part = self._process.stdout.read(1 << 20)
                if not part:
                    raise BrokenPipeError
                line += part
        reply: dict[str, Any] = json.loads(line)
        return reply


def _error(reply: dict[str, Any]) -> RequestError:
    kind = getattr(errors, reply["error"], EngineFailure)
    error: RequestError = kind(reply["message"])
    return error
