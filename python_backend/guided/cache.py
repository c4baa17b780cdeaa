"""Compiled guides by what they were compiled from, the least recently used leaving first.

Knows nothing of what it holds beyond an estimated size.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot; hits, misses and evictions since the start."""

    entries: int = 0
    size_bytes: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0


class GuideCache(Generic[Value]):
    """Bounded by entries and bytes; safe from any thread."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._lock = threading.Lock()
        self._values: OrderedDict[str, tuple[Value, int]] = OrderedDict()
        self._size = self._hits = self._misses = self._evictions = 0

    def get(self, key: str) -> Value | None:
        """The value, which thereby becomes the most recently used."""
        with self._lock:
            found = self._values.get(key)
            if found is None:
                self._misses += 1
                return None
            self._hits += 1
            self._values.move_to_end(key)
            return found[0]

    def put(self, key: str, value: Value, size: int) -> None:
        """Store a value of so many bytes; one that is larger than the whole cache is not kept."""
        with self._lock:
            self._remove(key)
            if size > self._max_bytes or self._max_entries < 1:
                return
            self._values[key] = (value, size)
            self._size += size
            while len(self._values) > self._max_entries or self._size > self._max_bytes:
                self._remove(next(iter(self._values)))
                self._evictions += 1

    def remove(self, key: str) -> None:
        """Forget a value; no error when there is none."""
        with self._lock:
            self._remove(key)

    def stats(self) -> CacheStats:
        """The state now."""
        with self._lock:
            return CacheStats(len(self._values), self._size, self._hits, self._misses, self._evictions)

    def _remove(self, key: str) -> None:
        found = self._values.pop(key, None)
        if found is not None:
            self._size -= found[1]
