"""The records of every process of a run, as one line of JSON per event, in a file of its own, in order.

A line is written by one `write` to a file that is only appended to. A process that is killed therefore leaves whole
lines behind. Times are by the one clock that all processes of the machine share and that nobody sets.

    start    pid, group, kind       a process begins; `group` is its process group, stopped and killed as one
    ask      id, keys, …            an attempt begins: acquire() is about to be called; `kind`: for "lock" or "document"
    got      id, tokens, seen       it returned, at t; the fencing token of each key; `seen`: the count in a document
    refused  id, error              it raised
    see      id, t, u, held, left   between t and u the lock said whether it is held, and its least seconds left
    forked   id                     a child is about to be forked that will leave the block by which it is held
    leave    id                     release() is about to be called
    left     id, was, wrote         it returned: "released", "lost", or "unknown"; `wrote`: the count put in a document
    dropped  id                     nothing is believed from here on: its thread is about to end, its object to go
    told     id                     on_lost was called
    force    key, tokens, ids       somebody is about to take the lock from the holders with these tokens; `ids`: their
                                    attempts, if the documents name them
    starved  t, u                   a thread of this process waited so long for a processor: one that does nothing but
                                    sleep woke late, or Linux says it of another one
    end                             the process ends in order
    run      seed, lock, …          the run begins
                                    timeout: the bound on a command, by which it promises when `acquire` is back
    fault    name, t, u, …          the harness (or a process, to itself) did this, from t until it was healed at u;
                                    order: may it change who comes first? servers: may it stop everybody?
                                    key: the only one that it may touch; clocks: did it set one?
                                    linger: for so much longer than others it may be felt
    stall    t, u                   a plain write to the servers took so long
    stopped  group, t, u            a process group was stopped
    kill     group                  a process group is about to be killed
    hung     group, text            it did not end when it was to, or ended when it was not to
    over                            all that took part have ended
    free     key, since, seen       afterwards, somebody new could take this key; it could be tried from `since` on
"""

import bisect
import contextlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any, Final

Record = dict[str, Any]

#: The seconds between two wake-ups of an idle thread, and the delay from which the thread is starved.
_BEAT: Final = 0.1
#: A number larger than any pid.
_PIDS: Final = 2**23
_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now() -> float:
    """Return the seconds of the machine's clock. All its processes share this clock, and nobody sets it."""
    return time.clock_gettime(_CLOCK)


class Journal:
    """The file of one process. Threads may share it. A forked child needs its own."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self.kind = kind
        self.pid = os.getpid()
        path = folder / f"{kind}-{self.pid}-{time.time_ns()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        # A reused pid makes other names.
        self._began, self._count = int(now()), 0
        self._mutex = threading.Lock()
        self.write("start", pid=self.pid, group=os.getpgrp(), kind=kind)

    def new_id(self) -> str:
        """Return a unique name for an attempt."""
        with self._mutex:
            self._count += 1
            return f"{self.kind}-{self.pid}-{self._began}-{self._count}"

    def write(self, what: str, t: float | None = None, **facts: Any) -> None:
        """Record an event of now, or of *t*."""
        record = {"what": what, "t": now() if t is None else t, **facts}
        os.write(self._file, (json.dumps(record, separators=(",", ":")) + "\n").encode())

    def watch(self) -> None:
        """Record from now on when this process did not get to run, because it was stopped or the machine was busy."""

        def watch() -> None:
            waited = _waits_for_a_processor()
            while True:
                due = now() + _BEAT
                time.sleep(_BEAT)
                woke, before = now(), waited
                waited = _waits_for_a_processor()
                longest = max((seconds - before.get(thread, 0.0) for thread, seconds in waited.items()), default=0.0)
                since = min(due, woke - longest)
                if woke > since + _BEAT:
                    self.write("starved", since, u=woke)

        threading.Thread(target=watch, name="watch", daemon=True).start()


def _waits_for_a_processor() -> dict[str, float]:
    """Return the seconds for which each thread of this process was ready and did not run. Only Linux tells."""
    found = {}
    for task in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # it has ended
            found[task.parent.name] = int(task.read_text().split()[1]) / 1e9
    return found


def read(folder: Path) -> list[Record]:
    """Return all records of a run in the order of their times, each with the `pid` of its writer.

    A reused pid, and its group, get another number for the later process. The last line of a file may be torn by a
    kill. Any other damage raises ValueError.
    """
    files: list[list[Record]] = []
    for path in sorted(folder.glob("*.jsonl")):
        lines = path.read_text().split("\n")
        files += [found] if (found := [json.loads(line) for line in lines[:-1]]) else []
    began: dict[int, list[float]] = {}
    for start in sorted((found[0] for found in files), key=lambda start: float(start["t"])):
        began.setdefault(start["pid"], []).append(start["t"])

    def alone(pid: int, t: float) -> int:
        return pid + max(0, bisect.bisect_right(began.get(pid, []), t) - 1) * _PIDS

    records: list[Record] = []
    for found in files:
        pid = alone(found[0]["pid"], found[0]["t"])
        for record in found:
            group = {"group": alone(record["group"], record["t"])} if "group" in record else {}
            records.append({**record, "pid": pid, **group})
    return sorted(records, key=lambda record: float(record["t"]))
