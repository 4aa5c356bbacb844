"""Every call ends in its time, however many others are made, or are given up, and whatever the server does (F67)."""

import asyncio
import contextlib
import gc
import logging
import tracemalloc
from collections.abc import Iterator

import pytest

from django_mongolock.engine import clock
from django_mongolock.engine.document import Terms
from django_mongolock.exceptions import LockError, LockNotAcquired
from testproject.servers import Mongod, ReplicaSet
from tests.engine.parties import Parties, Party
from tests.engine.waiters import InThread

pytestmark = pytest.mark.long

_log = logging.getLogger(__name__)

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
def parties(
    replica_set: ReplicaSet, mongod: Mongod, in_thread: InThread, request: pytest.FixtureRequest
) -> Iterator[Parties]:
    """Makes processes, over a collection of this test."""
    name = "".join(letter if letter.isalnum() else "_" for letter in request.node.name)[:60]
    parties = Parties(replica_set.uri, name, in_thread, COMMAND)
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


@pytest.mark.parametrize("same", [True, False], ids=["one key", "a key each"])
def test_the_server_stops_and_all_threads_are_back_in_time(
    process: Party, mongod: Mongod, in_thread: InThread, same: bool
) -> None:
    """F67: the same for threads."""
    took: list[float] = []

    def ask_once(number: int) -> None:
        began = clock.now()
        with contextlib.suppress(LockError):
            process.lock(TERMS, "k" if same else f"k{number}", wait=1).acquire()
        took.append(clock.now() - began)

    mongod.pause()
    threads = [in_thread(lambda number=number: ask_once(number)) for number in range(200)]
    for thread in threads:
        thread.join(25)
    assert len(took) == 200
    assert max(took) < 1 + COMMAND + BUSY


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


async def test_after_a_storm_while_the_server_has_stopped(process: Party, mongod: Mongod) -> None:
    """F67: whoever asks next is told in time that the server does not answer, and is served when it does again."""
    mongod.pause()
    await cancel_many(process, 5)
    took = await ask_all([asyncio.create_task(ask(process, "next", 1))], 25)
    mongod.resume()
    assert took[-1] < 1 + COMMAND + BUSY
    again, error = await ask(process, "next", 5)
    assert error == ""
    assert again < 5 + BUSY / 2


async def test_a_release_goes_before_what_others_ask_for(process: Party) -> None:
    """F67: three thousand coroutines ask at once; a lock that is given back then is free long before they are done."""
    mine = await process.lock(TERMS, "mine").aacquire()
    asking = [asyncio.create_task(ask(process, f"k{number}", 30)) for number in range(3000)]
    await asyncio.sleep(0)
    served = sum(task.done() for task in asking)
    assert await mine.arelease()
    served = sum(task.done() for task in asking) - served
    await asyncio.gather(*asking)
    assert served < 1000


async def wait_in_vain(process: Party, mine: Party, count: int, wait: float) -> tuple[list[float], float]:
    """So many coroutines wait for what *mine* holds. Returns how long each was late, and the bytes that each takes."""
    async with mine.lock(TERMS), process.lock(Terms(lease=12, margin=1), "other") as other:
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        asking = [asyncio.create_task(ask(process, "k", wait)) for _ in range(count)]
        await asyncio.sleep(wait * 0.75)
        size = (tracemalloc.get_traced_memory()[0] - before) / count
        late = [took - wait for took in await ask_all(asking, 40)]
        assert {task.result()[1] for task in asking if not task.cancelled()} == {LockNotAcquired.__name__}
        assert other.held
    return late, size


@pytest.mark.timeout(180)
async def test_ten_thousand_coroutines_are_refused_in_time(process: Party, parties: Parties) -> None:
    """F67: they wait eight seconds for a lock that is held, and each is told within two seconds after that."""
    late, _ = await wait_in_vain(process, parties.new(), 10_000, 8)
    _log.info("the last was %.2f s late, the median %.2f s", late[-1], late[5_000])
    assert late[-1] < 2 + BUSY


async def test_what_a_waiting_coroutine_takes(process: Party, parties: Parties) -> None:
    """F67: its memory, for whoever wants to know (--log-cli-level=INFO)."""
    tracemalloc.start()
    try:
        _, size = await wait_in_vain(process, parties.new(), 2_000, 8)
    finally:
        tracemalloc.stop()
    _log.info("%.1f KB for each", size / 1024)
    assert size > 0
