"""The life of one server: checks, build if asked, start, READY, and an end that leaves nothing behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from python_backend.errors import BuildError, EnvironmentFault, StackError
from python_backend.server import preflight, readiness, traces
from python_backend.server.addresses import Addresses
from python_backend.server.log_reader import (
    LogReader,
    for_a_person,
    load_failures,
    reason_of_a_model,
    told_to_stop,
    unloaded_models,
)
from python_backend.server.triton_process import TritonProcess
from python_backend.server.workspace import Workspace, sweep

_KEPT_LOGS = 10
_PERIOD_S = 0.1
_ONE_STOP_S = 1.0  # signals so close together are one: make and timeout pass on what the whole group got already
_UNLOAD_S = 5.0
_GAVE_UP_S = 2.0  # for the errors to reach the clients; a server with a model that gave up answers nothing else
_MORE_FAILURES_S = 0.5  # models that fail for the same reason do so at about the same time
_EVERY_ANSWER = {"tensorrt_llm", "postprocessing"}  # no answer can go on without these


@dataclass(frozen=True, slots=True)
class Options:
    """What to serve and where."""

    model_repository: Path | None  # None: the one that spec builds
    spec: Path
    engines_dir: Path
    addresses: Addresses
    model: str  # must answer before READY
    log_file: Path | None
    exit_timeout_s: int
    exit_with_parent: bool


class Launcher:
    """Runs one server in the foreground.

    Args:
        say: shows a line of progress or trouble.
        ready: shows the READY line.
    """

    def __init__(self, options: Options, say: Callable[[str], None], ready: Callable[[str], None]) -> None:
        self._options = options
        self._say = say
        self._ready = ready
        self._parent = os.getppid()
        self._log_lines: list[str] = []
        nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._stop_signals = {signal.SIGINT, signal.SIGTERM, *(() if nohup else (signal.SIGHUP,))}

    def run(self) -> int:
        """Serves until a signal, the parent's end or a failure; returns the exit code 0 when it ended as asked.

        Raises:
            BuildError: the repository is wrong, a model did not load, or Triton ended by itself.
            EnvironmentFault: this machine lacks something.
        """
        preflight.check_machine()
        sweep()
        preflight.check_shared_memory()
        addresses = self._options.addresses.settled()
        repository = self._repository()
        preflight.check_repository(repository, self._options.model)
        log_file = self._log_file(repository)
        addresses = addresses.settled()  # a build may have taken minutes
        signal.pthread_sigmask(signal.SIG_BLOCK, self._stop_signals)  # from here on they are waited for, not handled
        self._say(f"starting Triton; its log is {_short(log_file)}")
        started = time.monotonic()
        server = TritonProcess(Workspace.create(), repository, addresses, log_file, self._options.exit_timeout_s)
        try:
            self._log = LogReader(log_file)
            if self._await_ready(server, addresses):
                server.watch_models()
                self._ready(f"READY {addresses} after {time.monotonic() - started:.1f} s")
                patience_s = self._serve(server)
                self._stop(server, patience_s)
            else:
                self._say("stopping")  # by the kill below: nobody was told to send requests, and Triton would load on
        finally:
            server.clean_up()
        return 0

    def _repository(self) -> Path:
        if self._options.model_repository is not None:
            return self._options.model_repository.resolve()
        import sys

        from build_engines.build import Build
        from build_engines.progress import progress_for
        from build_engines.spec import load_spec

        build = Build(load_spec(self._options.spec), self._options.engines_dir, progress_for(sys.stderr))
        return build.run().root / "model_repo"

    def _log_file(self, repository: Path) -> Path:
        if self._options.log_file is not None:
            path = self._options.log_file.resolve()
        else:
            path = repository.parent / "logs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            for old in sorted(path.parent.glob("2*-*-*.log"))[: -_KEPT_LOGS + 1]:
                old.unlink()
            path.touch()
        except OSError as error:
            raise EnvironmentFault(f"the log {path} cannot be written ({error.strerror}): choose --log-file.") from None
        preflight.check_disk(path.parent)
        return path

    def _await_ready(self, server: TritonProcess, addresses: Addresses) -> bool:
        """True when a request succeeded, False when the server is to stop before that."""
        ended = threading.Event()
        failures: list[StackError] = []

        def probe() -> None:
            try:
                if readiness.wait_until_loaded(addresses, lambda: not ended.is_set()):
                    readiness.check_request(addresses, self._options.model)
                    traces.leave_out("health", addresses)
                    readiness.wait_until_healthy(addresses, lambda: not ended.is_set())
            except StackError as error:
                failures.append(error)

        prober = threading.Thread(target=probe, name="readiness", daemon=True)
        prober.start()
        lost_since: float | None = None
        try:
            while prober.is_alive():
                if self._asked_to_stop():
                    return False
                self._check_alive(server)
                if lost_since is None and load_failures(self._read_log()):
                    lost_since = time.monotonic()
                if lost_since is not None and time.monotonic() > lost_since + _MORE_FAILURES_S:
                    self._check_loaded()
        finally:
            ended.set()
        if failures:
            raise BuildError(f"{failures[0]} Log: {_short(self._log.path)}")
        return True

    def _serve(self, server: TritonProcess) -> float:
        """Until the server is to stop; shows errors of Triton and the models as they come, a repeated one once.

        Returns:
            How many seconds running requests may still take: somebody who presses Ctrl-C does not want to wait.
        """
        shown = ""
        while not (asked := self._asked_to_stop()):
            self._check_alive(server)
            self._check_models(server)
            lines = self._read_log()
            for text in filter(None, map(for_a_person, lines)):
                if text != shown:
                    self._say(text)
                shown = text
            if told_to_stop(lines):
                self._await_end(server)
        return 0 if asked == signal.SIGINT else self._options.exit_timeout_s

    def _await_end(self, server: TritonProcess) -> None:
        """Gives a Triton that somebody else has told to stop its time; by itself it may wait for ever.

        Raises:
            BuildError: always.
        """
        told, living = time.monotonic(), server.living_models()
        while server.exit_code() is None and not self._all_unloaded(living) and not self._asked_to_stop():
            reason = reason_of_a_model(self._log_lines)
            if time.monotonic() > told + (_GAVE_UP_S if reason else self._options.exit_timeout_s + _UNLOAD_S):
                break
        reason = reason_of_a_model(self._log_lines) or "It got a signal that was not the launcher's."
        raise BuildError(f"Triton has stopped while it was serving: {reason} Log: {_short(self._log.path)}")

    def _stop(self, server: TritonProcess, patience_s: float) -> None:
        """Ends the server once what runs has finished, or patience_s is over; a second signal ends it at once."""
        self._say("stopping; once more to force it")
        asked = time.monotonic()
        again = False

        def forced(wait_s: float = 0) -> bool:
            nonlocal again
            got = signal.sigtimedwait(self._stop_signals, wait_s)
            again = again or (got is not None and time.monotonic() > asked + _ONE_STOP_S)
            return again

        living = server.living_models()
        idle = server.terminate(patience_s, forced)
        # An ensemble's request whose client has gone counts as running in Triton 2.51 for ever.
        deadline = time.monotonic() + (_UNLOAD_S if idle else self._options.exit_timeout_s + 5)
        while server.exit_code() is None and time.monotonic() < deadline:
            if forced(_PERIOD_S) or self._all_unloaded(living):
                server.kill()

    def _all_unloaded(self, models: set[str]) -> bool:
        """Whether Triton has only its next look at the clock to wait for, or for the end of a model that has ended."""
        self._read_log()
        return bool(models) and not traces.trace_options() and models <= unloaded_models(self._log_lines)

    def _asked_to_stop(self) -> int:
        """Waits a moment for a signal and gives its number, 0 for none; SIGHUP for a parent's end, if that counts."""
        got = signal.sigtimedwait(self._stop_signals, _PERIOD_S)
        if got:
            return got.si_signo
        return signal.SIGHUP if self._options.exit_with_parent and os.getppid() != self._parent else 0

    def _check_models(self, server: TritonProcess) -> None:
        """Ends the server when the process of a model has: what waits for it would wait for ever.

        Raises:
            BuildError: always in that case, after running requests have finished where they can.
        """
        ended = server.ended_models()
        if not ended:
            return
        self._say(f"the process of model {', '.join(sorted(ended))} has ended, which Triton cannot start again")
        if not ended & _EVERY_ANSWER:
            self._stop(server, self._options.exit_timeout_s)
        raise BuildError(
            f"A model ended while it was serving: {', '.join(sorted(ended))}. Log: {_short(self._log.path)}"
        )

    def _check_alive(self, server: TritonProcess) -> None:
        code = server.exit_code()
        if code is None:
            return
        self._check_loaded()
        errors = [text for text in map(for_a_person, self._log_lines) if text]
        last = f" Its last error: {errors[-1]}." if errors else ""
        raise BuildError(f"Triton ended by itself with exit code {code}.{last} Log: {_short(self._log.path)}")

    def _check_loaded(self) -> None:
        """Raises BuildError with every model that did not load; Triton itself would load all others and unload them."""
        self._read_log()
        failures = load_failures(self._log_lines)
        if failures:
            reasons = " ".join(f"Model {failure.model} did not load: {failure.reason}." for failure in failures)
            raise BuildError(f"{reasons} Log: {_short(self._log.path)}")

    def _read_log(self) -> list[str]:
        lines = self._log.new_lines()
        self._log_lines = (self._log_lines + lines)[-2000:]
        return lines


def _short(path: Path) -> str:
    """Relative to the current directory when it lies below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
