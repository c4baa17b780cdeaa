"""A value that takes seconds to make and may never be needed. Knows nothing of what it is."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class OnDemand(Generic[T]):
    """Makes its value once, on a thread of its own, when somebody asks for it."""

    def __init__(self, make: Callable[[], T], name: str) -> None:
        self._make, self._name = make, name
        self._lock = threading.Lock()
        self._future: Future[T] | None = None

    def ask(self) -> Future[T]:
        """The value, when it is made; the first call begins to make it. From any thread."""
        with self._lock:
            if self._future is None:
                self._future = Future()
                threading.Thread(target=self._run, args=(self._future,), name=self._name, daemon=True).start()
            return self._future

    def _run(self, future: Future[T]) -> None:
        try:
            value = self._make()
        except BaseException as failure:
            future.set_exception(failure)
        else:
            future.set_result(value)
