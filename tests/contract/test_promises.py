"""Short cases for each promise of the library, and for nothing else.

Cases that need times to the second run in memory, where a test moves the clock. The others run on MongoDB, too.
"""

import threading
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from bson.int64 import Int64
from pymongo import MongoClient
from pymongo.collection import Collection

from django_mongolock import LockLost, LockNotAcquired, mongo_lock
from django_mongolock.backends import mongo_store
from django_mongolock.engine import clock
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.rule.document import Step, Terms, entry
from django_mongolock.engine.store.base import Store
from tests.contract.conftest import Elsewhere, MemoryWorld, World
from tests.engine.faces import Face
from tests.engine.waiters import InThread
from tests.support.forking import FORKS, in_child
from tests.support.grants import own
from tests.support.lock_fixtures import WITH_MONGO, Commands
from tests.support.looking import document, holder, new_key
from tests.support.waiting import eventually

WRITES = {"findAndModify", "update"}
#: The margin that the server adds to a lease of ten seconds before it lets others in.
MARGIN = 1


@pytest.fixture
def key() -> str:
    return new_key("promise")


def store_of(lock: MongoLock) -> Store:
    return lock._current_session().store


class TestOneHolder:
    """P1: No two hold a key at once that exclude each other."""

    def test_a_holder_stops_before_the_server_lets_others_in(self, key: str) -> None:
        """P1: The server adds a margin to the lease by which the holder counts."""
        with mongo_lock(key, lease=10) as lock:
            entry = holder(key)
            assert lock.remaining <= 10
            assert entry["until"] - entry["acquired_at"] == timedelta(seconds=10 + MARGIN)

    def test_a_holder_stops_at_the_end_of_its_lease(self, memory: MemoryWorld, key: str) -> None:
        """P1: A holder stops at the end of its lease without any answer. Others get the lock after the margin."""
        lock, other = mongo_lock(key, lease=100, auto_renew=False).acquire(), memory.elsewhere(key)
        memory.let_pass(80)
        assert lock.held
        assert not other.try_acquire()
        memory.let_pass(20)
        assert lock.lost
        assert lock.remaining == 0
        memory.let_pass(11)
        assert other.try_acquire()

    @pytest.mark.parametrize("command", ["acquisition", "renewal", "extension"])
    def test_a_late_answer_makes_no_lease_longer(
        self, memory: MemoryWorld, key: str, monkeypatch: pytest.MonkeyPatch, command: str
    ) -> None:
        """P1, F16: A lease counts from before its command was sent, however long the answer takes."""
        lock = mongo_lock(key, lease=30, auto_renew=command == "renewal")

        def held_up(name: str) -> None:
            call = getattr(store_of(lock), name)

            def late(*arguments: Any) -> Any:
                answer = call(*arguments)
                memory.let_pass(4)
                return answer

            monkeypatch.setattr(store_of(lock), name, late)

        if command == "acquisition":
            for name in ("apply", "take_free"):
                held_up(name)
            lock.acquire()
        else:
            lock.acquire()
            memory.let_pass(9)
            for name in ("apply", "renew"):
                held_up(name)
            if command == "extension":
                lock.extend(30)
            else:
                memory.let_pass(1.1)
        assert 20 < lock.remaining <= 26
        lock.release()

    def test_a_minimum_hold_keeps_others_out_until_its_end(self, memory: MemoryWorld, key: str) -> None:
        """P1: The lock was released at once, and nobody gets it before the hold is over. After the hold, a waiter gets
        it at once."""
        mongo_lock(key, min_hold=20).acquire().release()
        other = memory.elsewhere(key, wait=0)
        with pytest.raises(LockNotAcquired, match="minimum hold"):
            other.acquire()
        memory.let_pass(15)
        assert not other.try_acquire()
        memory.let_pass(5)
        assert other.try_acquire()


class TestOrder:
    """P2: Each grant of a key has a larger token than all before."""

    @pytest.mark.parametrize("end", ["a release", "a forced release", "a lost document", "the end of the lease"])
    def test_the_next_token_is_larger(self, world: World, key: str, elsewhere: Elsewhere, end: str) -> None:
        """P2, F10, F78: The next token is larger, however the earlier grant ended."""
        first = mongo_lock(key, auto_renew=False).acquire()
        token = first.fencing_token
        if end == "a release":
            first.release()
        elif end == "a forced release":
            world.take_away(first)
        elif end == "a lost document":
            world.let_pass(0.002)  # a new document begins at the server's time, in milliseconds
            world.forget(key)
        elif isinstance(world, MemoryWorld):
            world.let_pass(60)
        else:
            mongo_store().collection.update_one(
                {"_id": key}, {"$set": {"holders.0.until": datetime(2000, 1, 1, tzinfo=UTC)}}
            )
        assert elsewhere(key, wait=0).acquire().fencing_token > token

    def test_a_token_is_no_smaller_than_the_time(self, world: World, key: str) -> None:
        """P2: A token is no smaller than the time. A document that is made again therefore continues above all earlier
        tokens."""
        before = time.time()
        with mongo_lock(key) as lock:
            assert lock.fencing_token >= int(before * 1000) - 1000

    def test_a_clock_that_is_behind(self, world: World, key: str) -> None:
        """P2: If the last token is ahead of the clock, each next token is one more."""
        mongo_lock(key).acquire().release()
        ahead = Int64((time.time() + 3_600) * 1000)
        if isinstance(world, MemoryWorld):
            world.backend.server.documents[key]["token"] = ahead
        else:
            mongo_store().collection.update_one({"_id": key}, {"$set": {"token": ahead}})
        for following in (1, 2):
            with mongo_lock(key) as lock:
                assert lock.fencing_token == ahead + following

    def test_readers_have_tokens_of_their_own(self, world: World, key: str, elsewhere: Elsewhere) -> None:
        """P2: Each reader has a token of its own."""
        with mongo_lock(key, mode="shared") as first, elsewhere(key, mode="shared") as second:
            assert second.fencing_token > first.fencing_token


@WITH_MONGO
class TestDurable:
    """P3: A grant is reported when a majority has it in its journals."""

    def test_each_command_that_grants_waits_for_the_majority(self, commands: Commands, key: str) -> None:
        """P3: Each granting command waits for the majority, for a free key, for a key with readers, and for a
        re-entered key."""
        with (
            mongo_lock(key),
            mongo_lock(f"{key}:r", mode="shared"),
            mongo_lock(f"{key}:r", mode="shared", reentrant=True),
        ):
            pass
        concerns = [sent["writeConcern"] for sent in commands.sent if "findAndModify" in sent]
        assert len(concerns) >= 2
        assert all((concern["w"], concern["j"]) == ("majority", True) for concern in concerns)


class TestOneClock:
    """P4: No clock of a client is compared with anything."""

    @pytest.mark.parametrize("ahead", [-1e8, 1e8], ids=["behind", "ahead"])
    def test_a_wrong_clock_changes_nothing(
        self, world: World, key: str, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch, ahead: float
    ) -> None:
        """P4, F25: A wall clock that is years off makes no lease longer or shorter, and lets nobody in."""
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + ahead)
        with mongo_lock(key, lease=20) as lock:
            assert 10 < lock.remaining <= 20
            with pytest.raises(LockNotAcquired) as caught:
                elsewhere(key, wait=0).acquire()
            assert 10 < caught.value.retry_after <= 22
        assert elsewhere(key).try_acquire()

    @WITH_MONGO
    def test_no_command_has_a_time_of_the_client(self, commands: Commands, key: str, in_thread: InThread) -> None:
        """P4: No command has a date or a number that is one, to acquire, wait, extend, renew or release."""
        with mongo_lock(key, lease=600) as lock, mongo_lock(f"{key}:other", lease=600):
            waiter = mongo_lock(key)
            waiting = in_thread(waiter.acquire)
            assert eventually(lambda: own(waiter).wanted is not None)
            lock.extend(700)
            for grant in own(lock).grants:
                grant.lease.renew_at = 0.0
            lock._current_session().heartbeat.wake()
            assert eventually(lambda: {"findAndModify", "update", "find"} <= set(commands.names()))
        waiting.join(10)
        waiter.release()
        assert [found for command in commands.sent for found in times_in(command)] == []

    def test_deadlines_are_by_a_clock_that_cannot_be_set(self) -> None:
        """P4: Deadlines use a clock that cannot be set. Where possible, the clock runs on while the machine sleeps."""
        real = time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
        assert clock.now() == pytest.approx(real, abs=1)


def times_in(value: Any) -> list[Any]:
    """Return the dates in a command, and the numbers that are today's date, in seconds or milliseconds."""
    if isinstance(value, dict):
        return [found for each in value.values() for found in times_in(each)]
    if isinstance(value, (list, tuple)):
        return [found for each in value for found in times_in(each)]
    is_number = isinstance(value, (int, float)) and any(abs(value / unit - time.time()) < 86_400 for unit in (1, 1000))
    return [value] if is_number or isinstance(value, datetime) else []


class TestFair:
    """P5: First come, first served."""

    def test_a_hand_over_goes_to_who_came_first(
        self, world: World, key: str, elsewhere: Elsewhere, in_thread: InThread
    ) -> None:
        """P5: If two waiters of other processes wait, the release grants the lock to the first."""
        holder, order = elsewhere(key).acquire(), []

        def wait(name: str) -> None:
            with elsewhere(key, wait=20):
                order.append(name)

        for number, name in enumerate(("first", "second"), 1):
            in_thread(lambda name=name: wait(name))
            assert eventually(partial(world.is_queued, number))
        holder.release()
        assert eventually(lambda: order == ["first", "second"])

    def test_no_one_overtakes_a_waiter(self, world: World, key: str, elsewhere: Elsewhere, in_thread: InThread) -> None:
        """P5: A caller that asks just after the release stands behind a waiter, even if its command would arrive
        first."""
        holder, leave = elsewhere(key).acquire(), threading.Event()

        def wait() -> None:
            with elsewhere(key, wait=20):
                leave.wait(20)

        in_thread(wait)
        assert eventually(lambda: world.is_queued(1))
        holder.release()
        assert not mongo_lock(key).try_acquire()
        leave.set()

    @pytest.mark.parametrize("expired", [False, True], ids=["granted the lock", "its place has expired"])
    def test_a_dead_waiter_is_passed_over(self, memory: MemoryWorld, key: str, *, expired: bool) -> None:
        """P5, F41, F42: A dead waiter delays the queue by its place, and by no more."""
        holder = memory.elsewhere(key, lease=600).acquire()
        store = memory.new_session().store
        for name, place in (("dead", 10), ("next", 100)):
            terms = Terms(lease=600, margin=MARGIN, waiter_lease=place)
            assert not store.apply(key, Step(ask=name, add=entry(name, "s", terms, {})), 10).held
        if expired:
            memory.let_pass(10 + MARGIN)
        holder.release()
        (granted,) = memory.backend.server.documents[key]["holders"]
        assert granted["grant"] == ("next" if expired else "dead")
        memory.let_pass(10 + MARGIN)
        assert store.apply(key, Step(ask="next"), 10).held


class TestNothingLeaks:
    """P6: After the last client is gone, a key is free again within one lease."""

    def test_a_killed_holder(self, memory: MemoryWorld, key: str) -> None:
        """P6: The lease of a killed holder is not renewed, and ends."""
        dead = memory.elsewhere(key, lease=100).acquire()
        memory.kill(dead)
        memory.let_pass(80)
        assert not mongo_lock(key).try_acquire()
        memory.let_pass(30)  # and its margin
        assert mongo_lock(key).acquire(0).release()

    def test_a_late_command(self, world: World, key: str) -> None:
        """P6, F17: A command that arrives after its sender has given up takes no lock, and no place in the queue."""
        store, terms = world.new_session().store, Terms(lease=60, margin=1, waiter_lease=60)
        store.apply(key, Step(ask="late", remove=("late",), force=True, tombstone_ttl=60_000), 10)
        for trial in (False, True):
            step = Step(ask="late", add=entry("late", "s", terms, {}), trial=trial)
            reply = store.apply(key, step, 10)
            assert (reply.held, reply.place) == (False, None)
        assert mongo_lock(key).acquire(0).release()

    def test_a_session_that_ends(self, world: World, key: str, elsewhere: Elsewhere) -> None:
        """P6: At the end of a process, all of its locks are released at once."""
        elsewhere(key).acquire()
        world.sessions[-1].close()
        assert mongo_lock(key).acquire(0).release()


@pytest.mark.witness
class TestForks:
    """P1, P6: A forked child has everything of its parent except the lock."""

    pytestmark = FORKS

    def test_a_forked_child_holds_nothing(self, key: str) -> None:
        """P1, P6, F30: A forked child holds nothing, releases nothing, and waits for its parent. The parent's lock
        stays as it was."""
        lock = mongo_lock(key).acquire()

        def child() -> None:
            assert not lock.held
            with pytest.raises(LockLost, match="forked"):
                lock.ensure_held()
            assert not lock.release()
            lock.__exit__(None, None, None)
            assert not mongo_lock(key).try_acquire()
            assert mongo_lock(f"{key}:child").acquire(0).release()

        in_child(child)
        assert lock.held
        assert [each["token"] for each in document(key)["holders"]] == [lock.fencing_token]
        assert lock.release()


class TestLosses:
    """P7: A holder that has lost its lock learns of it."""

    def test_a_loss_that_a_renewal_finds(self, world: World, key: str, elsewhere: Elsewhere) -> None:
        """P7, F50: The loss shows long before the lease ends, in `lost`, `held`, `ensure_held`, `on_lost`, and at the
        block's end."""
        heard: list[MongoLock] = []
        lock = mongo_lock(key, lease=60, on_lost=heard.append).acquire()
        world.take_away(lock)
        assert not lock.lost  # it cannot know yet
        world.let_renew(lock)
        assert eventually(lambda: lock.lost)
        assert lock.remaining == 0
        assert eventually(lambda: heard == [lock])
        with pytest.raises(LockLost):
            lock.ensure_held()
        with pytest.raises(LockLost):
            lock.__exit__(None, None, None)
        assert elsewhere(key).try_acquire()

    def test_a_loss_that_the_release_finds(self, world: World, key: str, face: Face) -> None:
        """P7: Between two renewals the holder cannot know of the loss. The end of the block finds it."""
        lock = mongo_lock(key, lease=600)
        with pytest.raises(LockLost), face.block(lock):  # noqa: PT012
            token = lock.fencing_token
            world.take_away(lock)
        assert lock.fencing_token == token  # the facts of a lost lock stay known

    def test_a_loss_that_an_extension_finds(self, world: World, key: str, face: Face) -> None:
        """P7: A lost lock cannot be extended. The error and the report of the loss come at once."""
        heard: list[MongoLock] = []
        lock = face.acquire(mongo_lock(key, lease=600, on_lost=heard.append))
        world.take_away(lock)
        with pytest.raises(LockLost):
            face.extend(lock)
        assert lock.lost
        assert eventually(lambda: heard == [lock])

    def test_a_lease_that_ends(self, memory: MemoryWorld, key: str) -> None:
        """P7: Without a renewal the holder knows of the loss by its own clock."""
        heard: list[MongoLock] = []
        lock = mongo_lock(key, lease=10, auto_renew=False, on_lost=heard.append).acquire()
        memory.let_pass(10.1)
        assert lock.lost
        assert eventually(lambda: heard == [lock])
        assert not lock.release()

    def test_an_error_of_the_block_is_not_hidden(self, world: World, key: str, face: Face) -> None:
        """P7: The error of the block is raised, with a note on the loss."""
        with pytest.raises(ZeroDivisionError) as caught, face.block(mongo_lock(key, lease=600)) as lock:  # noqa: PT012
            world.take_away(lock)
            raise ZeroDivisionError
        assert any("was lost" in note for note in caught.value.__notes__)


@WITH_MONGO
class TestCheap:
    """P8: The number of commands of a lock."""

    def test_a_free_lock(self, commands: Commands, key: str) -> None:
        """P8: A free lock costs one command to acquire, and one to release."""
        mongo_lock(f"{key}:before").acquire().release()
        commands.sent.clear()
        mongo_lock(key, lease=600).acquire().release()
        assert commands.names() == ["findAndModify", "update"]

    def test_a_hand_over(self, commands: Commands, key: str, in_thread: InThread) -> None:
        """P8: A hand-over within a process costs one command. The command releases the lock, and acquires it for the
        next."""
        holder, waiter = mongo_lock(key, lease=600).acquire(), mongo_lock(key, lease=600)
        in_thread(waiter.acquire)
        assert eventually(lambda: own(waiter).wanted is not None)
        commands.sent.clear()
        holder.release()
        assert eventually(lambda: waiter.held)
        assert len([name for name in commands.names() if name in WRITES]) <= 2
        waiter.release()

    def test_renewals_go_together(self, commands: Commands, key: str) -> None:
        """P8, F40: The renewals of ten locks are one update and one read. The read finds the lock that was taken
        away."""
        locks = [mongo_lock(f"{key}:{number}", lease=600).acquire() for number in range(10)]
        mongo_store().collection.update_one({"_id": f"{key}:7"}, {"$set": {"holders": []}})
        session = locks[0]._current_session()
        commands.sent.clear()
        for grant in session.registry.grants.values():
            grant.lease.renew_at = 0.0
        session.heartbeat.wake()
        assert eventually(lambda: locks[7].lost)
        assert commands.names() == ["update", "find"]
        assert [lock.release() for lock in locks].count(True) == 9


class TestNoConsensus:
    """P9: A paused holder may act after its lease. A fenced write of such a holder is refused."""

    def test_the_token_of_a_late_holder_is_smaller(self, memory: MemoryWorld, key: str) -> None:
        """P9: The token of a late holder is smaller. A storage that compares tokens refuses its late writes."""
        late = mongo_lock(key, lease=10, auto_renew=False).acquire()
        memory.let_pass(10)
        now = memory.elsewhere(key).acquire()
        assert late.fencing_token < now.fencing_token

    def test_a_late_holder_that_asks_gets_an_error(self, memory: MemoryWorld, key: str) -> None:
        """P9: After a pause beyond the lease, `ensure_held` raises at once, without a command."""
        late = mongo_lock(key, lease=10, auto_renew=False).acquire()
        late.ensure_held()
        memory.let_pass(10)
        memory.backend.server.away = threading.current_thread()
        with pytest.raises(LockLost):
            late.ensure_held()
        memory.backend.server.away = None

    @WITH_MONGO
    @pytest.mark.parametrize("moment", range(3), ids=["before it", "before its write", "after its write"])
    def test_nothing_is_committed_after_a_loss(
        self, mongo: MongoClient[dict[str, Any]], collection: Collection[dict[str, Any]], key: str, moment: int
    ) -> None:
        """P9: A transaction of `atomic` commits only if the lock is held until then."""
        config = mongo_store().config
        locks = mongo[config.database][config.collection]
        collection.insert_one({"_id": "before"})
        lock = mongo_lock(key, lease=600).acquire()

        def now(this: int) -> None:
            if this == moment:
                locks.update_one({"_id": key}, {"$set": {"holders": []}})

        now(0)
        with pytest.raises(LockLost), lock.atomic(mongo) as session:  # noqa: PT012
            now(1)
            collection.insert_one({"_id": "inside"}, session=session)
            now(2)
        assert [row["_id"] for row in collection.find()] == ["before"]
