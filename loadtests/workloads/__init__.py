"""What the users ask for: seeded workloads, by name."""

from __future__ import annotations

from loadtests.errors import UsageFault
from loadtests.workloads.adapters import Adapters
from loadtests.workloads.base import Item, Setting, Workload
from loadtests.workloads.burst import Burst
from loadtests.workloads.chat import Chat
from loadtests.workloads.code import Code
from loadtests.workloads.extraction import Extraction
from loadtests.workloads.mixed import Mixed
from loadtests.workloads.rag import Rag
from loadtests.workloads.replay import Replay

__all__ = ["WORKLOADS", "Item", "Replay", "Setting", "Workload", "make"]

WORKLOADS: dict[str, type[Workload]] = {
    kind.name: kind for kind in (Chat, Code, Rag, Extraction, Adapters, Mixed, Burst, Replay)
}


def make(name: str, setting: Setting) -> Workload:
    """The workload of a name.

    Raises:
        UsageFault: there is none of this name, or it lacks something.
    """
    if name not in WORKLOADS:
        raise UsageFault(f"There is no workload {name!r}; there are {', '.join(WORKLOADS)}.")
    return WORKLOADS[name](setting)
