"""Whether a process has ended. Provable only on the same machine, among the same processes.

A pid alone proves nothing. Pids are used again, and every container has its own. For that reason the name of a process
consists of the boot of its kernel, its pid and time namespaces, its pid and the moment of its start. All of these need
Linux. On other systems a process has no such name, and counts as unknown.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal

#: "gone": the process has certainly ended. "alive": the process may run, and its end can be seen from here. "unknown":
#: the process cannot be seen from here.
Fate = Literal["gone", "alive", "unknown"]

#: The name of no process. A lock that is held in this name waits for its owner (see `detached`).
NO_PROCESS: Final = "none"

#: Another name of no process, for a claim. Only its owner's `claims.Claim` extends such a lock, and gives it back.
CLAIM: Final = "claim"

_PROC: Final = Path("/proc")


def this_process() -> str:
    """Return the name of this process, or "" if it has none."""
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
    """Return the boot and the namespaces that this process shares with the processes it can see."""
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    spaces = [(_PROC / "self/ns" / space) for space in ("pid", "time")]
    return " ".join([boot, *(str(space.readlink()) if space.is_symlink() else "-" for space in spaces)])


def _started(pid: int) -> str | None:
    """Return when the process started, in ticks of its kernel. None if it has ended and is still a zombie."""
    stat = (_PROC / str(pid) / "stat").read_text(errors="replace")
    fields = stat.rpartition(")")[2].split()
    # A process whose first thread has ended looks the same, except for its other threads.
    if fields[0] in "ZX" and os.listdir(_PROC / str(pid) / "task") == [str(pid)]:  # noqa: PTH208 - names are enough
        return None
    return fields[19]


def fate(name: str) -> Fate:
    """Return the fate of the process of that name, as far as it can be seen from here."""
    if name == NO_PROCESS:
        return "gone"
    place = this_process().rsplit(" ", 2)[0]
    theirs, _, started = name.rpartition(" ")
    theirs, _, pid = theirs.rpartition(" ")
    if not place or theirs != place or not (pid.isascii() and pid.isdigit()):
        return "unknown"
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return "gone"
    except (PermissionError, OverflowError):
        pass  # the process exists, and belongs to another user
    try:
        return "alive" if _started(int(pid)) == started else "gone"
    except OSError:
        # The process has ended since, or is hidden (hidepid). The next call may know.
        return "alive"
