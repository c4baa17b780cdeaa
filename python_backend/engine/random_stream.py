"""Random numbers that depend on nothing but a seed and a step, so that any step can be drawn again.

Knows nothing of logits. The mixing function is SplitMix64, which is public domain.
"""

from __future__ import annotations

import os

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class RandomStream:
    """One number per step of one sequence.

    Nothing is remembered between steps: neither the company in a batch nor a preemption can change a draw.
    """

    __slots__ = ("_key",)

    def __init__(self, seed: int | None, index: int = 0) -> None:
        """Sample number `index` of a request behaves like the only sample of `seed + index`; None: from the system."""
        start = int.from_bytes(os.urandom(8), "little") if seed is None else seed + index
        self._key = _mix((start + _GOLDEN) & _MASK)

    def uniform(self, step: int) -> float:
        """A number in [0, 1) with 53 random bits."""
        return (_mix((self._key + (step + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
