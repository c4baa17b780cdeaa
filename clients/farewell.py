"""How a stream is left before its end: by asking the server to end it, and reading until it has.

A call that is merely cancelled takes Triton 2.51 down when it went through an ensemble over gRPC (a race in its stream
handler), and leaves memory behind over HTTP. Knows nothing of transports.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

GRACE_S = 1.0  # a step of the engine and the way back; whoever takes longer is cancelled all the same


@contextmanager
def within_grace(give_up: Callable[[], object]) -> Iterator[None]:
    """Calls give_up, on another thread, when the block takes longer than the grace."""
    timer = threading.Timer(GRACE_S, give_up)
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError:  # the interpreter is ending and starts no thread any more
        give_up()
    try:
        yield
    finally:
        timer.cancel()
