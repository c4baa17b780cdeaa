"""Who waits for whom when the cores are busy: the engine's step needs all of them at once, everything else can wait.

A thread that wakes up takes the core of one that computes, and the step is as late as its latest thread. Under
SCHED_BATCH a woken thread waits for its turn instead, with the same share of the time. Both directions need no rights.
"""

from __future__ import annotations

import os


def give_way() -> None:
    """This thread, and all threads and processes it makes from now on, take no core away from others."""
    _set("SCHED_BATCH")


def compute() -> None:
    """The contrary, for the engine below a server that gives way."""
    _set("SCHED_OTHER")


def _set(policy: str) -> None:
    try:
        os.sched_setscheduler(0, getattr(os, policy), os.sched_param(0))
    except (AttributeError, OSError):  # no Linux, or a sandbox that forbids it: only slower
        return
