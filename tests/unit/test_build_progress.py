"""Who waits for a build sees bars on a terminal and plain lines anywhere else."""

from __future__ import annotations

import io
import time

import pytest

from build_engines import progress
from build_engines.progress import BarProgress, PlainProgress, Progress, Silent, progress_for


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_bars_and_a_file_gets_lines() -> None:
    assert isinstance(progress_for(Terminal()), BarProgress)
    assert type(progress_for(io.StringIO())) is PlainProgress


def test_a_bar_shows_what_is_done() -> None:
    stream = Terminal()
    with BarProgress(stream).task("weights", 2_000_000) as advance:
        advance(1_000_000)
        advance(1_000_000)
    assert "weights" in stream.getvalue()
    assert "2.0/2.0 MB" in stream.getvalue()


def test_a_task_without_work_shows_no_bar() -> None:
    stream = Terminal()
    with BarProgress(stream).task("hashing the source", 0) as advance:
        advance(0)
    assert stream.getvalue() == ""


def test_lines_have_no_control_characters_and_short_tasks_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 6.0, 7.0, 12.0, 12.0])
    monkeypatch.setattr(progress, "time", type("Clock", (), {"monotonic": staticmethod(lambda: next(clock))}))
    stream = io.StringIO()
    with PlainProgress(stream).task("weights", 10) as advance:
        for _ in range(4):
            advance(2)
    assert stream.getvalue() == "  weights: 40 %\n  weights: 80 %\n  weights: done in 12.0 s\n"
    monkeypatch.setattr(progress, "time", time)
    with PlainProgress(stream).task("short", 10) as advance:
        advance(10)
    assert "short" not in stream.getvalue()


@pytest.mark.parametrize("kind", [PlainProgress(io.StringIO()), BarProgress(Terminal()), Silent()])
def test_a_task_that_fails_passes_its_error_on(kind: Progress) -> None:
    with pytest.raises(ValueError, match="broken"), kind.task("t", 1, "texts"):
        raise ValueError("broken")
