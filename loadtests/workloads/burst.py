"""Everybody at once: chat requests that arrive in groups. The arrivals make the difference, see loadtests.arrivals."""

from __future__ import annotations

from loadtests.workloads.chat import Chat

BURST_SIZE = 8


class Burst(Chat):
    """Chat in groups of eight that start at the same moment."""

    name = "burst"
    about = f"The chat workload, arriving in groups of {BURST_SIZE} at the same moment, groups at random times."
    rates = (0.5, 1.0, 2.0)
