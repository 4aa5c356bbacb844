"""First come, first served: over all threads, tasks and processes, whoever else of a process waits too (F69, P5).

Those who arrive one after the other do so with `GAP` seconds between them, since two processes have no clock in common:
who came first is known as well as a command's way to the server is short.
"""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from pytest_django import Settings

from django_mongolock import mongo_lock
from django_mongolock.backends.base import mongo_store
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.session.session import Session
from django_mongolock.inspection.named_locks import row_of
from django_mongolock.inspection.overview import overview
from django_mongolock.inspection.verdict import judge
from django_mongolock.models import Lock
from tests.engine.conftest import make_lock
from tests.engine.twins import CALM
from tests.engine.waiters import InThread
from tests.support.lock_fixtures import WITH_MONGO
from tests.support.looking import held_elsewhere, new_key
from tests.support.waiting import eventually

#: Seconds between two who arrive.
GAP = 0.15
#: Up to three times: on a busy machine a command may need longer than that to arrive.
pytestmark = [pytest.mark.long, pytest.mark.flaky(reruns=2)]


#: Makes what stands in for a process: a session with a connection of its own.
NewProcess = Callable[[], Session]


@pytest.fixture(params=["mongodb", "memory"])
def new_process(request: pytest.FixtureRequest, new_session: NewProcess, memory: Any) -> NewProcess:
    """Sessions at a MongoDB, or in the memory of this process."""
    made: NewProcess = new_session if request.param == "mongodb" else memory.new_session
    return made


class Queue:
    """Those who ask for the key "k", in threads or in tasks; `served` names them in the order of their tokens."""

    def __init__(self, in_thread: InThread) -> None:
        self.in_thread = in_thread
        self.loop = asyncio.new_event_loop()
        self.tokens: list[tuple[int, str]] = []
        self._asked = 0
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def ask(self, name: str, process: Session, *, in_task: bool) -> None:
        """Have *name* ask for the lock, keep it for a moment and give it back; wait until it has surely asked."""
        lock = make_lock(process, terms=CALM, wait=60)
        self._asked += 1
        if in_task:
            asyncio.run_coroutine_threadsafe(self._work_in_task(name, lock), self.loop)
        else:
            self.in_thread(lambda: self._work(name, lock))
        assert eventually(lambda: lock._own.wanted is not None or lock.held)
        time.sleep(GAP)

    def _work(self, name: str, lock: MongoLock) -> None:
        with lock:
            self.tokens.append((lock.fencing_token, name))
            time.sleep(0.01)

    async def _work_in_task(self, name: str, lock: MongoLock) -> None:
        async with lock:
            self.tokens.append((lock.fencing_token, name))
            await asyncio.sleep(0.01)

    def served(self) -> list[str]:
        """Wait until all have been; return them in order."""
        assert eventually(lambda: len(self.tokens) == self._asked, 40), self.tokens
        return [name for _, name in sorted(self.tokens)]

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


@pytest.fixture
def queue(in_thread: InThread, new_session: object) -> Iterator[Queue]:
    """A queue for the key "k"."""
    queue = Queue(in_thread)
    yield queue
    queue.close()


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("waits_too", [False, True])
def test_threads_and_tasks_of_three_processes_in_turns(
    new_process: NewProcess, queue: Queue, seed: int, waits_too: bool
) -> None:
    """F69: in whatever order they come, they are served in that order; also where they wait for a hand-over within
    their process, since it holds the lock."""
    chance = random.Random(seed)
    processes = [new_process() for _ in range(3)]
    names = []
    with make_lock(processes[0] if waits_too else new_process(), terms=CALM):
        for number in range(15):
            process = chance.randrange(3)
            names.append(f"{'ABC'[process]}{number}")
            queue.ask(names[-1], processes[process], in_task=chance.random() < 0.5)
    assert queue.served() == names


# All who wait are visible


@pytest.fixture
def eight_wait(in_thread: InThread, settings: Settings, locks: object) -> Iterator[str]:
    """A key that eight threads of this process have waited for for some seconds."""
    settings.MONGOLOCK = {**settings.MONGOLOCK, "WAITER_LEASE": 3}
    key = new_key()
    with held_elsewhere(key):
        threads = [in_thread(lambda: mongo_lock(key, wait=60).acquire().release()) for _ in range(8)]
        time.sleep(4)
        yield key
    for thread in threads:
        thread.join(20)


def seen_waiting(key: str) -> int:
    """How many wait for *key*, according to its snapshot."""
    (lock,) = Lock.objects.filter(pk=key).snapshots()
    return lock.waiting


@WITH_MONGO
def test_eight_who_wait_are_eight(eight_wait: str) -> None:
    """F69, P5: in the snapshot, in the overview of the dashboard, in JSON, and in the list of the command."""
    assert eventually(lambda: seen_waiting(eight_wait) == 8, 5), f"{seen_waiting(eight_wait)} are seen"
    (lock,) = Lock.objects.filter(pk=eight_wait).snapshots()
    assert row_of(judge(lock)).as_json()["waiting"] == 8
    assert overview(mongo_store()).waiting == 8
    out = StringIO()
    call_command("list_locks", "--waiting", "--wide", stdout=out)
    lines = [line.replace(eight_wait, "").split() for line in out.getvalue().splitlines() if eight_wait in line]
    assert any("8" in line for line in lines), out.getvalue()
    assert Lock.objects.get(pk=eight_wait).waiting == 8
