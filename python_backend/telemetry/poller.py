"""A thread that calls something again and again; knows nothing of what."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)


class Poller:
    """Calls `action` every `period_s` seconds until it is stopped; a call that fails is logged, once in a row.

    With `until`, what it waits for may not be there yet: at first it calls every `eager_s` seconds, until that is true.
    """

    def __init__(
        self,
        name: str,
        period_s: float,
        action: Callable[[], None],
        until: Callable[[], bool] | None = None,
        eager_s: float = 0.05,
    ) -> None:
        self._period_s, self._eager_s, self._until = period_s, eager_s, until
        self._action = action
        self._stopped = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin; once."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after a last call."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._wait_s()):
            self._call()
        self._call()

    def _wait_s(self) -> float:
        if self._until is not None and self._until():
            self._until = None
        return self._period_s if self._until is None else self._eager_s

    def _call(self) -> None:
        try:
            self._action()
            self._failing = False
        except Exception:
            if not self._failing:
                _log.exception("%s failed; it is tried again every %s s", self._thread.name, self._wait_s())
            self._failing = True
