"""Adapters in host memory by task id: least recently used ones make room, those in use stay. Safe from any thread.

Error texts are upstream's. Knows nothing of names or files.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from python_backend.errors import LimitExceeded, NotFound, Overloaded

if TYPE_CHECKING:
    from python_backend.lora.adapter import Adapter


@dataclass(slots=True)
class _Entry:
    adapter: Adapter
    uses: int = 0


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Totals since the start, and what is held now."""

    adapters: int
    nbytes: int
    hits: int
    misses: int
    evictions: int


class AdapterCache:
    """Holds up to `limit_bytes` of matrices.

    An adapter that is replaced or removed while requests use it lives on with them, outside of the limit.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._entries: dict[int, _Entry] = {}  # the least recently used first
        self._hits = self._misses = self._evictions = 0

    def acquire(self, task_id: int) -> Adapter:
        """The adapter, marked as in use until `release`.

        Raises:
            NotFound: it is not here.
        """
        with self._lock:
            entry = self._entries.pop(task_id, None)
            if entry is None:
                self._misses += 1
                raise NotFound(f"LoRA task {task_id} not found in cache. Please send LoRA weights with request")
            self._hits += 1
            self._entries[task_id] = entry
            entry.uses += 1
            return entry.adapter

    def release(self, adapter: Adapter) -> None:
        """One use has ended."""
        with self._lock:
            entry = self._entries.get(adapter.task_id)
            if entry is not None and entry.adapter is adapter:
                entry.uses -= 1

    def put(self, adapter: Adapter) -> None:
        """Store an adapter, in the place of one with the same id.

        Raises:
            LimitExceeded: it is larger than the whole cache.
            Overloaded: all that would have to go is in use.
        """
        text = f"PEFT Cache is full. Could not store taskId={adapter.task_id}"
        if adapter.nbytes > self.limit_bytes:
            raise LimitExceeded(
                f"{text}: it takes {adapter.nbytes} bytes, the cache {self.limit_bytes}. Raise lora.host_cache_bytes."
            )
        with self._lock:
            others = {task_id: entry for task_id, entry in self._entries.items() if task_id != adapter.task_id}
            excess = sum(e.adapter.nbytes for e in others.values()) + adapter.nbytes - self.limit_bytes
            evicted = []
            for task_id, entry in others.items():
                if excess <= 0:
                    break
                if not entry.uses:
                    evicted.append(task_id)
                    excess -= entry.adapter.nbytes
            if excess > 0:
                raise Overloaded(f"{text} (Cache is full. There are no done tasks to evict)")
            for task_id in evicted:
                del self._entries[task_id]
            self._evictions += len(evicted)
            self._entries.pop(adapter.task_id, None)
            self._entries[adapter.task_id] = _Entry(adapter)

    def remove(self, task_id: int) -> None:
        """Forget an adapter; requests that use it keep it."""
        with self._lock:
            self._entries.pop(task_id, None)

    def __contains__(self, task_id: int) -> bool:
        return task_id in self._entries

    def stats(self) -> CacheStats:
        """What gauges show."""
        with self._lock:
            nbytes = sum(entry.adapter.nbytes for entry in self._entries.values())
            return CacheStats(len(self._entries), nbytes, self._hits, self._misses, self._evictions)
