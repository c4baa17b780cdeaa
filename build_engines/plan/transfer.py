"""Seconds to move bytes: a prefill's KV cache to the machine that decodes, weights from disk to the cards."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HandOver:
    """The KV cache of one prompt on its way to another machine."""

    tokens: int
    payload_bytes: int
    network_gbit_per_s: float

    @property
    def seconds(self) -> float:
        """At the network's full speed, without set-up."""
        return self.payload_bytes * 8 / (self.network_gbit_per_s * 1e9)


@dataclass(frozen=True, slots=True)
class ColdStart:
    """From an empty machine to loaded weights; compiling and warming up come on top."""

    disk_bytes: int  # read by each machine
    card_bytes: int  # onto each card
    disk_bytes_per_s: float
    host_bytes_per_s: float

    @property
    def seconds(self) -> float:
        """Disk and copy to the cards, one after the other."""
        return self.disk_bytes / self.disk_bytes_per_s + self.card_bytes / self.host_bytes_per_s
