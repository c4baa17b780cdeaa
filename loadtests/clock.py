"""Moments that can be compared between processes and never run backwards: seconds since 1970 by a monotonic clock."""

from __future__ import annotations

import time

_OFFSET = time.time() - time.perf_counter()


def now() -> float:
    """Seconds since 1970."""
    return _OFFSET + time.perf_counter()
