"""Streams still open when the program ends: they are cancelled while there are threads left to do it.

Knows nothing of transports.
"""

from __future__ import annotations

import atexit
import weakref
from typing import Protocol


class Cancellable(Protocol):
    """An open stream."""

    def cancel(self) -> None:
        """End it on the server; nothing when it is over."""
        ...


_open: weakref.WeakSet[Cancellable] = weakref.WeakSet()


def track(stream: Cancellable) -> None:
    """Have the stream cancelled when the program ends before it does."""
    _open.add(stream)


@atexit.register
def _cancel_all() -> None:
    for stream in list(_open):
        stream.cancel()
