"""Who asks for an owner that holds the lock already: waits while the former holder lives, resumes once it is gone."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo.collection import Collection

from django_mongolock.engine.protocol import processes
from django_mongolock.engine.rule.document import Terms
from django_mongolock.exceptions import LockNotAcquired
from tests.engine.conftest import Here, LockMaker
from tests.engine.faces import Face
from tests.engine.processes import Process
from tests.engine.processes import processes as started
from tests.support.waiting import eventually

Document = dict[str, Any]
TERMS = Terms(lease=60, margin=1, owner="task 5")
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux names processes so that others can judge")


@pytest.fixture
def former(collection: Collection[Document]) -> Iterator[Process]:
    """A process that holds the lock "k" for the owner."""
    with started(1, "hold", collection.name, 60, TERMS.owner) as (process,):
        yield process


def take(lock: Any) -> Callable[[], int]:
    """Take the lock once in a thread; tells with which token, 0 while it waits."""
    tokens: list[int] = []

    def run() -> None:
        with lock:
            tokens.append(lock.fencing_token)

    threading.Thread(target=run, daemon=True).start()
    return lambda: sum(tokens)


@pytest.mark.long
@linux
def test_an_owner_resumes_at_once_when_its_process_was_killed(here: Here, face: Face, former: Process) -> None:
    """F49: it goes before everybody who waits, with a new fencing token, and needs no more than a single try."""
    token = former.hear()["token"]
    waiting = take(here.other(wait=30))
    assert eventually(lambda: here.collection.find_one({"waiters.0": {"$exists": True}}))
    assert not face.try_acquire(here.lock(terms=TERMS))
    former.send(signal.SIGKILL)
    former.popen.wait()
    again = face.acquire(here.lock(terms=TERMS, wait=0))
    assert again.fencing_token > token
    assert again.held
    assert not waiting()
    resumed = again.fencing_token
    face.release(again)
    assert eventually(waiting)
    assert waiting() > resumed


@pytest.mark.long
def test_a_process_of_unknown_fate_is_waited_for(here: Here, face: Face, former: Process) -> None:
    """F49: on another machine or in another container a pid proves nothing: then only the end of the lease counts."""
    former.hear()
    former.send(signal.SIGKILL)
    former.popen.wait()
    for name in ("", "another-boot pid:[1] time:[1] 1 1"):
        here.collection.update_one({"_id": "k"}, {"$set": {"holders.0.process": name}})
        with pytest.raises(LockNotAcquired):
            face.acquire(here.lock(terms=TERMS, wait=0.7))


def test_a_minimum_hold_is_no_former_run(lock: LockMaker, other: LockMaker, face: Face) -> None:
    terms = Terms(lease=60, margin=1, min_hold=30, owner="task 5")
    face.release(face.acquire(lock(terms=terms)))
    assert not face.try_acquire(other(terms=terms))


@linux
def test_the_name_of_a_process() -> None:
    """It stays the same, is another one for each process, and tells whether that runs: F49."""
    assert processes.this_process() == processes.this_process()
    assert processes.fate(processes.this_process()) == "alive"
    assert processes.fate(_with(4, "1")) == "gone"  # the pid was given again
    assert processes.fate(_with(3, str(2**22 + 1))) == "gone"  # no such pid
    assert processes.fate(_with(3, "1", 4, "x")) in ("alive", "gone")  # somebody else's: we may look, not touch
    assert processes.fate(processes.NO_PROCESS) == "gone"
    for unknown in ("", "x", _with(0, "another boot"), _with(1, "pid:[1]"), _with(2, "time:[1]"), _with(3, "x")):
        assert processes.fate(unknown) == "unknown"


@pytest.mark.long
@linux
def test_a_process_whose_parent_has_not_asked_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed child of a container's first process may stay in the list for ever: it runs no more."""
    code = "from django_mongolock.engine.protocol.processes import *; print(this_process(), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        name = child.stdout.readline().decode().strip()
        assert processes.fate(name) == "alive"
        os.kill(child.pid, signal.SIGKILL)
        assert eventually(lambda: processes.fate(name) == "gone")
        assert Path(f"/proc/{child.pid}").exists()
        child.wait()
        assert processes.fate(name) == "gone"


@linux
def test_what_is_hidden_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /proc shows only one's own processes (hidepid), those of others count as living."""
    name = processes.this_process()
    monkeypatch.setattr(processes, "_started", _hidden)
    assert processes.fate(name) == "alive"


def _hidden(pid: int) -> str:
    raise FileNotFoundError


def _with(*changes: Any) -> str:
    """The name of this process with other parts."""
    parts = processes.this_process().split(" ")
    for index, part in zip(changes[::2], changes[1::2], strict=True):
        parts[index] = part
    return " ".join(parts)


@linux
def test_a_child_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: of the parent's name, it would be gone when the parent is, and its lock would be taken over."""
    before = processes.this_process()
    monkeypatch.setattr(os, "getpid", os.getppid)
    assert processes.this_process() != before
