"""What the host of a virtual machine took of its processors, and the repetition of what was measured meanwhile.

Knows nothing of load tests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

LIMIT = 0.03  # share of all processors' time
_ATTEMPTS = 4
_PAUSE_S = 10.0  # before the second; twice as long before each later one


class Stolen:
    """The share of the processors' time that went to others, by the kernel's own account (`steal` in /proc/stat)."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._last = self._read()

    def share(self) -> float:
        """Since the last call, 0 to 1; 0 where nobody says."""
        before, self._last = self._last, self._read()
        stolen, total = (now - then for now, then in zip(self._last, before, strict=True))
        return stolen / total if total > 0 else 0.0

    def _read(self) -> tuple[int, int]:
        try:
            # cpu user nice system idle iowait irq softirq steal …; guests are part of user and nice
            ticks = [int(field) for field in self._stat.read_text().split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):
            return 0, 0
        return (ticks[7], sum(ticks)) if len(ticks) == 8 else (0, 0)


def undisturbed(
    measure: Callable[[], T],
    share: Callable[[], float],
    say: Callable[[str], None],
    attempts: int = _ATTEMPTS,
    pause: Callable[[float], None] = time.sleep,
) -> T:
    """What `measure` gives, anew while the host took more than LIMIT meanwhile: that says nothing of the server.

    Args:
        measure: may be called again.
        share: see Stolen.share.
        say: told why it takes longer.
        attempts: after so many the last one counts, whatever the host did.
        pause: waits so many seconds, for whoever disturbs to be done.
    """
    pause_s = _PAUSE_S
    while True:
        share()
        found, attempts, taken = measure(), attempts - 1, share()
        if taken <= LIMIT or attempts <= 0:
            return found
        say(f"the host took {taken:.0%} of this machine's processors meanwhile: once more in {pause_s:.0f} s")
        pause(pause_s)
        pause_s *= 2
