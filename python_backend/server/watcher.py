"""Ends a server whose launcher was killed. A process of its own, standard library only, run by file name.

Reads `group NUMBER`, `shm PREFIX`, `folder PATH`, `triton_folder PATH` lines from stdin. A last line `done` means that
the launcher has cleaned up; an end of file without it means that the launcher is dead: then the group is killed and the
files removed.
"""

from __future__ import annotations

import glob
import os
import shutil
import signal
import sys
import time


def main() -> None:
    """Waits for the end of stdin, then cleans up unless told not to."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    owned: dict[str, str] = {}
    for line in sys.stdin:
        key, _, value = line.rstrip("\n").partition(" ")
        if key == "done":
            return
        owned[key] = value
    if "group" in owned:
        end_group(int(owned["group"]))
    if "shm" in owned:
        for path in glob.glob(f"/dev/shm/{glob.escape(owned['shm'])}*"):
            os.unlink(path)
    if "folder" in owned:
        shutil.rmtree(owned["folder"], ignore_errors=True)
    if "triton_folder" in owned:
        remove_empty(owned["triton_folder"])


def remove_empty(folder: str) -> None:
    """Removes a folder unless something is in it."""
    try:
        os.rmdir(folder)
    except OSError:
        return


def end_group(group: int) -> None:
    """Kills a process group and waits until nobody of it lives, at most 5 seconds."""
    deadline = time.monotonic() + 5
    while living(group) and time.monotonic() < deadline:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            return
        time.sleep(0.02)


def living(group: int) -> list[int]:
    """Process ids of the group, without zombies: an init that does not reap would keep those for ever."""
    found = []
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()  # state, parent, group, …
        except OSError:
            continue  # ended while we looked
        if int(fields[2]) == group and fields[0] not in "ZX":
            found.append(int(path.split("/")[2]))
    return found


if __name__ == "__main__":
    main()
