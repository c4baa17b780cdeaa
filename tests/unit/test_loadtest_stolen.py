"""Time that the host took: read as the kernel writes it, and what was measured meanwhile is measured again."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtests.stolen import LIMIT, Stolen, undisturbed


def write(path: Path, user: int, idle: int, steal: int) -> None:
    path.write_text(f"cpu  {user} 0 0 {idle} 0 0 0 {steal} 0 0\ncpu0 {user} 0 0 {idle} 0 0 0 {steal} 0 0\n")


def test_the_share_is_of_the_time_since_the_last_call(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    write(stat, 1000, 1000, 500)
    stolen = Stolen(stat)
    assert stolen.share() == 0
    write(stat, 1060, 1030, 510)
    assert stolen.share() == pytest.approx(0.1)
    write(stat, 1160, 1030, 510)
    assert stolen.share() == 0


@pytest.mark.parametrize("text", ["", "cpu 1 2 3\n", "cpu a b c d e f g h\n"], ids=["empty", "short", "words"])
def test_where_nobody_says_nothing_was_taken(tmp_path: Path, text: str) -> None:
    stat = tmp_path / "stat"
    stat.write_text(text)
    assert Stolen(stat).share() == 0
    assert Stolen(tmp_path / "missing").share() == 0


@pytest.mark.parametrize(
    ("shares", "found", "said"),
    [
        ([LIMIT], 1, 0),
        ([0.2, 0.0], 2, 1),
        ([0.2, 0.04, 0.01], 3, 2),
        ([0.2, 0.2, 0.2, 0.2], 4, 3),  # the last one counts
    ],
)
def test_a_disturbed_measurement_is_made_again_three_times_at_most(shares: list[float], found: int, said: int) -> None:
    told: list[str] = []
    waited: list[float] = []
    numbers = iter(range(1, 10))
    left = iter(value for share in shares for value in (0.9, share))  # 0.9: before it began, which does not count
    assert undisturbed(lambda: next(numbers), lambda: next(left), told.append, pause=waited.append) == found
    assert len(told) == said
    assert waited == [10.0, 20.0, 40.0][:said], "longer each time, for whoever disturbs to be done"
    assert all("the host took" in text for text in told)
