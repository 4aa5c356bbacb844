"""Every call ends in its time, however many others are made, or are given up, and whatever the server does (F67)."""

import asyncio
from collections.abc import Iterator

import pytest

from django_mongolock.engine import clock
from django_mongolock.engine.rule.document import Terms
from django_mongolock.exceptions import LockError
from testproject.servers import Mongod, ReplicaSet
from tests.engine.parties import Parties, Party
from tests.engine.waiters import InThread

pytestmark = pytest.mark.long


TERMS = Terms(lease=30, margin=1)
#: How long a command may take, in seconds.
COMMAND = 5.0
#: What a busy machine may add, in seconds: calls that wait for one another take more than all of this.
BUSY = 14.0
#: For a call that never came back.
NEVER = 1e9


@pytest.fixture(scope="module")
def replica_set() -> Iterator[ReplicaSet]:
    """One member, which can be stopped."""
    with ReplicaSet() as replica_set:
        yield replica_set


@pytest.fixture
def mongod(replica_set: ReplicaSet) -> Iterator[Mongod]:
    """The server; it runs again after the test."""
    (mongod,) = replica_set.members
    yield mongod
    if mongod.paused:
        mongod.resume()


@pytest.fixture
def parties(replica_set: ReplicaSet, mongod: Mongod, in_thread: InThread, test_name: str) -> Iterator[Parties]:
    """Makes processes, over a collection of this test."""
    parties = Parties(replica_set.uri, test_name, in_thread, COMMAND)
    yield parties
    if mongod.paused:
        mongod.resume()
    parties.close()


@pytest.fixture
def process(parties: Parties) -> Party:
    """A process that has been at work already."""
    process = parties.new()
    with process.lock(TERMS, "warm"):
        pass
    return process


async def ask(process: Party, key: str, wait: float) -> tuple[float, str]:
    """Take the lock and give it back; returns how long it took to get it, or to be told that it is not to be had, and
    the name of the error."""
    began, lock = clock.now(), process.lock(TERMS, key, wait=wait)
    try:
        await lock.aacquire()
    except LockError as error:
        return clock.now() - began, type(error).__name__
    took = clock.now() - began
    await lock.arelease()
    return took, ""


async def ask_all(asking: list[asyncio.Task[tuple[float, str]]], seconds: float) -> list[float]:
    """How long each took; `NEVER` for those who are not back after so many seconds."""
    done, late = await asyncio.wait(asking, timeout=seconds)
    for task in late:
        task.cancel()
    return sorted(task.result()[0] for task in done) + [NEVER] * len(late)


@pytest.mark.parametrize("same", [True, False], ids=["one key", "a key each"])
async def test_the_server_stops_and_all_coroutines_are_back_in_time(process: Party, mongod: Mongod, same: bool) -> None:
    """F67: two hundred ask with `wait=1`: they are back within their wait and one command."""
    mongod.pause()
    asking = [asyncio.create_task(ask(process, "k" if same else f"k{number}", 1)) for number in range(200)]
    took = await ask_all(asking, 25)
    assert took[-1] < 1 + COMMAND + BUSY


async def cancel_many(process: Party, rounds: int) -> None:
    """Three hundred ask, each for a key of its own, and are cancelled; this again and again."""
    for turn in range(rounds):
        asking = [asyncio.create_task(ask(process, f"k{turn}.{number}", 5)) for number in range(300)]
        await asyncio.sleep(0.05)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def test_after_a_storm_of_cancellations_the_next_one_is_served(process: Party) -> None:
    """F67: what nobody awaits any more is not sent: whoever asks next gets a free lock within its `wait=5`."""
    await cancel_many(process, 40)
    took, error = await asyncio.wait_for(ask(process, "next", 5), 60)
    assert error == ""
    assert took < 5 + BUSY / 2
