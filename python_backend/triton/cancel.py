"""Finds out that an answer is no longer wanted: clients that cancelled or hung up, and a server that stops.

Knows nothing of the engine; it calls back.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class CancelWatcher:
    """Asks the response senders of running requests, again and again, whether their clients are gone.

    Triton gives no notice of a cancellation, and one question costs about 0.04 ms, so all of them are asked once in a
    period by one thread. Through an ensemble Triton 2.51 never says yes. A question that reaches the server after the
    final response takes the server down: `forget` a sender before its final response is sent.

    Args:
        period_s: seconds between two rounds.
        on_cancelled: called with the watched key, once, on the watcher's thread.
    """

    def __init__(self, period_s: float, on_cancelled: Callable[[Any], None]) -> None:
        self._period_s = period_s
        self._on_cancelled = on_cancelled
        self._watched: dict[Any, Any] = {}
        self._asking = threading.Lock()
        self._wake = threading.Event()  # something is watched
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cancel-watcher", daemon=True)

    def start(self) -> None:
        """Begin; once."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; takes up to one round."""
        self._stopped.set()
        self._wake.set()
        self._thread.join()

    def watch(self, key: Any, sender: Any) -> None:
        """Ask `sender` (Triton's response sender) from now on; `key` is any hashable."""
        self._watched[key] = sender
        self._wake.set()

    def forget(self, key: Any) -> None:
        """Ask no more, and wait for a question under way; no error when the key is not watched."""
        with self._asking:
            self._watched.pop(key, None)

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._wake.wait()
            if not self._watched:
                self._wake.clear()
                # A request may have come between the two lines above.
                if not self._watched:
                    continue
                self._wake.set()
            self._stopped.wait(self._period_s)
            self._ask_all()

    def _ask_all(self) -> None:
        for key in list(self._watched):
            if self._stopped.is_set():
                return
            with self._asking:
                sender = self._watched.get(key)
                if sender is None or not sender.is_cancelled():
                    continue
                del self._watched[key]
            self._on_cancelled(key)


class ShutdownWatcher:
    """Calls back when this process gets SIGTERM, before Triton itself says anything to the model.

    Triton waits for running requests before it finalizes a model; whoever stops the server sends SIGTERM to the stub
    processes first, so that there is nothing to wait for. The stub's main thread runs no Python code between two
    requests, hence the wake-up pipe instead of a handler.

    Args:
        on_shutdown: at the first signal, on a thread of its own.
        on_deadline: at the second one: what still runs has to end now.
    """

    def __init__(self, on_shutdown: Callable[[], None], on_deadline: Callable[[], None] | None = None) -> None:
        self._callbacks = [on_shutdown, *([on_deadline] if on_deadline is not None else [])]
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)

    def start(self) -> None:
        """Has to be called on the main thread."""
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        threading.Thread(target=self._run, name="shutdown-watcher", daemon=True).start()

    def _run(self) -> None:
        while self._callbacks:
            for _ in range(os.read(self._read_fd, 64).count(signal.SIGTERM)):
                if self._callbacks:
                    self._callbacks.pop(0)()
