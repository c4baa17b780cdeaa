"""The responses of another model to a request of ours (Triton's BLS), in a way that Triton survives.

Before its release 25.01 the Python backend freed the tensors of responses without the interpreter's lock when a thread
of its own was the last to let go of them. That thread does so just after the last response was taken, and now and then
it took the process down. So it must not be the last: responses are kept until it is certainly through.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEEP_S = 2.0  # the thread needs milliseconds


class Kept:
    """Holds what is given to it for at least `keep_s` seconds, and lets go of it when something else comes later."""

    def __init__(self, keep_s: float = KEEP_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._keep_s, self._clock = keep_s, clock
        self._held: deque[tuple[float, Any]] = deque()
        self._lock = threading.Lock()

    def keep(self, value: object) -> None:
        """From any thread."""
        with self._lock:
            now = self._clock()
            self._held.append((now, value))
            ended = []
            while self._held[0][0] < now - self._keep_s:
                ended.append(self._held.popleft())
        ended.clear()  # not under the lock: the last reference may have work to do


_kept = Kept()


def responses_to(request: Any) -> Iterator[Any]:
    """Send a request; its responses as they come, errors among them."""
    responses = request.exec(decoupled=True)
    try:
        yield from responses
    finally:
        _kept.keep(responses)
