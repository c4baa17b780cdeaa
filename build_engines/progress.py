"""What a build tells the person who waits: bars on a terminal, plain lines anywhere else.

Knows nothing of what is being built.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO

Advance = Callable[[int], None]
_PLAIN_PERIOD_S = 5.0


class Progress(Protocol):
    """The two things a step may say."""

    def line(self, text: str) -> None:
        """One sentence."""

    def task(self, title: str, total: int, unit: str = "bytes") -> AbstractContextManager[Advance]:
        """A context that gives a function to call with each amount of `total` done."""


class PlainProgress:
    """Lines: one when a task starts, one every few seconds, one when it is done after more than a second."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def line(self, text: str) -> None:
        """One sentence."""
        self._stream.write(text + "\n")
        self._stream.flush()

    @contextmanager
    def task(self, title: str, total: int, unit: str = "bytes") -> Iterator[Advance]:
        """Lines for a long task, nothing for a short one."""
        start = last = time.monotonic()
        done = 0

        def advance(amount: int) -> None:
            nonlocal done, last
            done += amount
            now = time.monotonic()
            if now - last >= _PLAIN_PERIOD_S and done < total:
                last = now
                self.line(f"  {title}: {100 * done // max(total, 1)} %")

        yield advance
        elapsed = time.monotonic() - start
        if elapsed > 1:
            self.line(f"  {title}: done in {elapsed:.1f} s")


class BarProgress(PlainProgress):
    """A rich bar per task, with the time that remains."""

    @contextmanager
    def task(self, title: str, total: int, unit: str = "bytes") -> Iterator[Advance]:
        """A bar while the task runs; none for a task without work."""
        if not total:
            yield lambda _done: None
            return
        from rich.console import Console  # an up-to-date build must not pay for it
        from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        amount = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
        columns = (TextColumn("  {task.description}"), BarColumn(), amount, TimeRemainingColumn())
        with Bars(*columns, console=Console(file=self._stream)) as bars:
            bar = bars.add_task(title, total=total)
            yield lambda done: bars.advance(bar, done)


class Silent:
    """Says nothing; for tests and for callers with a report of their own."""

    def line(self, text: str) -> None:
        """Nothing."""
        del text

    @contextmanager
    def task(self, title: str, total: int, unit: str = "bytes") -> Iterator[Advance]:
        """Nothing."""
        del title, total, unit
        yield lambda _done: None


def progress_for(stream: TextIO) -> Progress:
    """Bars when `stream` is a terminal, lines otherwise."""
    return BarProgress(stream) if stream.isatty() else PlainProgress(stream)
