"""`python -m loadtests`: a load test against an SLO, with a report.

Exit codes: 0 the SLO is met, 1 it is missed, 2 usage, 3 no server or this machine lacks something, 130 interrupted
(with a report of the stages that were over).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from loadtests import files
from loadtests.console import Screen, summary
from loadtests.errors import LoadTestError, UsageFault
from loadtests.options import Options, parse

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a load test and return the exit code."""
    command = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(parse(command), command)
    except LoadTestError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED


def _run(options: Options, command: Sequence[str]) -> int:
    if options.worker is not None:
        host, _, port = options.worker.rpartition(":")
        if not port.isdigit():
            raise UsageFault(f"--worker {options.worker} is no address; give HOST:PORT.")
        from loadtests import worker

        return worker.run(host or "127.0.0.1", int(port))
    if options.render is not None:
        print(files.render(options.render, options.compare))
        return 0
    if options.compare is not None:
        files.read(options.compare)  # known to be readable before minutes are spent
    files.prepare(options.out)
    progress = Console(stderr=True)
    if options.ui is not None:
        from loadtests import web

        web.serve(options, lambda text: progress.print(text, highlight=False, markup=False, soft_wrap=True))
        return 0
    from loadtests.run import perform

    with Screen(progress) as screen:
        screen.plan(options)
        outcome = perform(options, screen, command)
    console = Console(width=None if sys.stdout.isatty() else 160)
    summary(outcome, console)
    directory = files.write(outcome)
    print(f"report: {_short(directory / 'report.html')}")
    if isinstance(outcome.ended_by, LoadTestError):
        raise outcome.ended_by
    if outcome.ended_by is not None:
        return INTERRUPTED
    return 0 if outcome.verdict.passed else 1


def _short(path: Path) -> str:
    """From here when it lies below here, else whole."""
    found = os.path.relpath(path)
    return str(path.resolve()) if found.startswith(os.pardir) else found
