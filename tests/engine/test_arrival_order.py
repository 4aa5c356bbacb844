"""First come, first served, over all threads, tasks and processes, with any number of other waiters (F69, P5).

Attempts arrive `GAP` seconds apart, because two processes have no clock in common. The order of arrival is therefore
known if a command's way to the server is short.
"""

import asyncio
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.session.session import Session
from tests.engine.conftest import make_lock
from tests.engine.twins import CALM
from tests.engine.waiters import InThread
from tests.support.waiting import eventually

#: Seconds between two who arrive.
GAP = 0.15
#: Run up to three times. On a busy machine a command may need longer than the gap to arrive.
pytestmark = [pytest.mark.long, pytest.mark.flaky(reruns=2)]


@pytest.fixture(params=["mongodb", "memory"])
def new_process(request: pytest.FixtureRequest, new_session: Callable[[], Session], memory: Any) -> Any:
    """Return a function that makes the substitute of a process. The substitute is a session at a MongoDB, or in the
    memory of this process."""
    return new_session if request.param == "mongodb" else memory.new_session


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("waits_too", [False, True])
def test_threads_and_tasks_of_three_processes_in_turns(
    new_process: Callable[[], Session], in_thread: InThread, seed: int, waits_too: bool
) -> None:
    """F69: Attempts are served in the order of their arrival, even if they wait for a hand-over within a holding
    process.
    """
    chance = random.Random(seed)
    processes = [new_process() for _ in range(3)]
    tokens: list[tuple[int, str]] = []

    def in_its_thread(name: str, lock: MongoLock) -> None:
        with lock:
            tokens.append((lock.fencing_token, name))

    async def in_its_task(name: str, lock: MongoLock) -> None:
        async with lock:
            tokens.append((lock.fencing_token, name))

    names, asking = [], []
    with make_lock(processes[0] if waits_too else new_process(), terms=CALM):
        for number in range(15):
            process = chance.randrange(3)
            names.append(f"{'ABC'[process]}{number}")
            lock = make_lock(processes[process], terms=CALM, wait=60)
            if chance.random() < 0.5:
                asking.append(in_thread(partial(asyncio.run, in_its_task(names[-1], lock))))
            else:
                asking.append(in_thread(partial(in_its_thread, names[-1], lock)))
            assert eventually(lambda lock=lock: lock._own.wanted is not None)  # type: ignore[misc]
            time.sleep(GAP)
    for each in asking:
        each.join(40)
    assert [name for _, name in sorted(tokens)] == names
