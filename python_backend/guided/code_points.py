"""Sets of code points as ranges. Knows nothing of patterns."""

from __future__ import annotations

from typing import TypeAlias

Ranges: TypeAlias = "tuple[tuple[int, int], ...]"
"""Code points, both ends included, ascending and apart."""

LAST = 0x10FFFF
_SURROGATES = ((0xD800, 0xDFFF),)


def complement(ranges: Ranges) -> Ranges:
    """All other code points."""
    found, start = [], 0
    for low, high in ranges:
        if low > start:
            found.append((start, low - 1))
        start = high + 1
    return (*found, (start, LAST)) if start <= LAST else tuple(found)


def union(ranges: list[tuple[int, int]]) -> Ranges:
    """Sorted, overlaps joined."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return tuple(found)


def minus(ranges: Ranges, other: Ranges) -> Ranges:
    """Code points of the first and not of the second."""
    return complement(union([*complement(ranges), *other]))


# What stands in a JSON string without an escape, and what text may hold at all.
JSON_CHARS = complement(union([(0, 31), (34, 34), (92, 92), *_SURROGATES]))
TEXT_CHARS = complement(union([(0, 0), *_SURROGATES]))
