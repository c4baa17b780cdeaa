"""How a stream is left before its end: by asking the server to end it, and reading until it has.

A call that is merely cancelled takes Triton 2.51 down when it went through an ensemble over gRPC (a race in its stream
handler), and leaves memory behind over HTTP. Knows nothing of transports.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Iterator

GRACE_S = 1.0  # a step of the engine and the way back; whoever takes longer is cancelled all the same
PERIOD_S = 0.05  # the request may not have reached the engine when the first stop did


@contextlib.contextmanager
def insisting(stop: Callable[[], object], give_up: Callable[[], object]) -> Iterator[None]:
    """Calls stop again and again, on another thread, while the block reads; give_up when it takes too long."""
    over = threading.Event()

    def insist() -> None:
        deadline = time.monotonic() + GRACE_S
        while not over.wait(PERIOD_S):
            if time.monotonic() > deadline:
                give_up()
                return
            stop()

    try:
        threading.Thread(target=insist, name="farewell", daemon=True).start()
    except RuntimeError:  # the interpreter is ending and starts no thread any more
        give_up()
    try:
        yield
    finally:
        over.set()


async def insist(stop: Callable[[], Awaitable[object]], read: Callable[[], Awaitable[object]]) -> None:
    """The same for asyncio: returns when the reading has ended, by itself or by an error, or took too long."""
    reading = asyncio.ensure_future(read())
    deadline = time.monotonic() + GRACE_S
    while not reading.done() and time.monotonic() < deadline:
        await asyncio.wait({reading}, timeout=PERIOD_S)
        if not reading.done():
            await stop()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
