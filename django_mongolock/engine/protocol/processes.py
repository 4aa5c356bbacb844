"""Whether a process has ended, if that can be proven: on the same machine, among the same processes.

A pid alone proves nothing: pids are used again, and every container has its own. So the name of a process consists of
the boot of its kernel, its pid and time namespaces, its pid and the moment of its start. All of that is Linux; on other
systems a process has no such name, and counts as unknown.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal

#: gone: it has certainly ended. alive: it may run, and its end can be seen. unknown: it cannot be seen from here.
Fate = Literal["gone", "alive", "unknown"]

#: The name of no process: a lock that is held in this name waits for its owner (see `detached`).
NO_PROCESS: Final = "none"

#: Also the name of no process, for a claim: only by its owner's `claims.Claim` is it extended and given back.
CLAIM: Final = "claim"

_PROC: Final = Path("/proc")


def this_process() -> str:
    """The name of this process; "" if it has none."""
    return _name(os.getpid())


@lru_cache(maxsize=1)
def _name(pid: int) -> str:
    try:
        started = _started(pid)
        if (_PROC / "self").readlink().name != str(pid) or started is None:
            return ""  # /proc shows the processes of another namespace
        return f"{_place()} {pid} {started}"
    except OSError:
        return ""


def _place() -> str:
    """Among which processes this one lives."""
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    spaces = [(_PROC / "self/ns" / space) for space in ("pid", "time")]
    return " ".join([boot, *(str(space.readlink()) if space.is_symlink() else "-" for space in spaces)])


def _started(pid: int) -> str | None:
    """When the process started, in ticks of its kernel; None if it has ended and its parent has not waited for it
    yet."""
    stat = (_PROC / str(pid) / "stat").read_text(errors="replace")
    fields = stat.rpartition(")")[2].split()
    # A process whose first thread has ended looks the same, except for its other threads.
    if fields[0] in "ZX" and os.listdir(_PROC / str(pid) / "task") == [str(pid)]:  # noqa: PTH208 - names are enough
        return None
    return fields[19]


def fate(name: str) -> Fate:
    """What became of the process of that name, as far as it can be seen from here."""
    if name == NO_PROCESS:
        return "gone"
    place = this_process().rpartition(" ")[0].rpartition(" ")[0]
    theirs, _, started = name.rpartition(" ")
    theirs, _, pid = theirs.rpartition(" ")
    if not place or theirs != place or not (pid.isascii() and pid.isdigit()):
        return "unknown"
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return "gone"
    except (PermissionError, OverflowError):
        pass  # it exists, and belongs to another user
    try:
        return "alive" if _started(int(pid)) == started else "gone"
    except OSError:
        # It has ended since, or it is hidden (hidepid): the next call may know.
        return "alive"
