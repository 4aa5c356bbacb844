"""`EditLock` is the lock of one tab, in MongoDB and in memory, blocking and awaited."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
from django.contrib.auth.models import User
from pytest_django import Settings

from django_mongolock import mongo_lock
from django_mongolock.backends import mongo_store
from django_mongolock.editing import EditLock, EditLockStatus, Editor, Person, edit_key
from django_mongolock.inspection import operations
from django_mongolock.testing import override_locks
from testproject.shop.models import Order
from tests.editing.conftest import set_locks
from tests.support.forking import FORKS, in_child
from tests.support.lock_documents import Locks
from tests.support.lock_fixtures import WITH_MONGO, Commands
from tests.support.waiting import eventually

pytestmark = [WITH_MONGO, pytest.mark.usefixtures("locks")]

ANNA, BEN = Person("1", "anna", "session:a"), Person("2", "ben", "session:b")
Do = Callable[..., EditLockStatus]


def editor(status: EditLockStatus) -> Editor:
    """Return the only editor."""
    assert status.editor
    return status.editor


def test_one_at_a_time(do: Do, key: str) -> None:
    """A lock is taken, kept, released, and taken by the next. Tokens grow."""
    anna, ben = EditLock(key, ANNA), EditLock(key, BEN)
    first = do(anna, "take")
    assert (first.held, editor(first).who, editor(first).name) == (True, "mine", "anna")
    busy = do(ben, "take")
    assert (busy.held, busy.free, editor(busy).who) == (False, False, "other")
    assert do(anna, "beat").held
    assert not do(ben, "beat").held
    assert editor(do(ben, "release")).name == "anna"
    assert do(anna, "release").free
    second = do(EditLock(key, BEN), "take")
    assert second.held
    assert editor(second).token > editor(first).token


def test_what_a_tab_released_it_does_not_take_again(do: Do, key: str) -> None:
    """A late command cannot bring back a released lock."""
    anna = EditLock(key, ANNA)
    do(anna, "take")
    do(anna, "release")
    assert do(anna, "take").free
    assert do(anna, "beat").free
    assert do(EditLock(key, ANNA), "take").held


def test_taking_over(do: Do, key: str) -> None:
    """A take-over is one command, from that editor only. The loser's commands change nothing."""
    anna, ben, carla = (EditLock(key, person) for person in (ANNA, BEN, Person("3", "carla")))
    token = editor(do(anna, "take")).token
    assert do(ben, "take_over", token).held
    assert not do(carla, "take_over", token).held
    assert [editor(do(anna, name)).name for name in ("beat", "release")] == ["ben", "ben"]
    do(ben, "release")
    assert do(carla, "take_over", token).held  # nobody holds it any more


def test_succeeding(do: Do, key: str) -> None:
    """The next page of a tab takes the place of the one before, once. Another user's page does not."""
    first, second, third, ben = EditLock(key, ANNA), EditLock(key, ANNA), EditLock(key, ANNA), EditLock(key, BEN)
    do(first, "take")
    assert not do(ben, "take", first.tab).held
    assert do(second, "take", first.tab).held
    assert editor(do(third, "take", first.tab)).who == "mine-elsewhere"
    do(second, "release")
    assert do(third, "take", second.tab).held


def until_let_in(do: Do, other: EditLock) -> None:
    """Wait until *other* is let in."""
    assert eventually(lambda: do(other, "take").held, 20)


@pytest.mark.long
def test_without_a_beat_it_ends(do: Do, key: str, settings: Settings) -> None:
    """The lease ends by the server's clock, without any cleaning up. F62: a tab that goes on for longer than its lease
    knows the end earlier, by its own clock."""
    set_locks(settings, EDIT_LEASE=2)
    anna, ben = EditLock(key, ANNA), EditLock(key, BEN)
    mine = do(anna, "take")
    assert mine.held
    assert not do(ben, "take").held
    until_let_in(do, ben)
    assert editor(do(anna, "beat")).name == "ben"
    assert not mine.held


@pytest.mark.long
def test_taken_twice(do: Do, key: str, settings: Settings) -> None:
    """F62: A tab that takes its own lock keeps it for another lease from then on, and believes no more than that."""
    set_locks(settings, EDIT_LEASE=2)
    anna = EditLock(key, ANNA)
    first = do(anna, "take")
    time.sleep(1.9)
    again = do(EditLock(key, ANNA, anna.tab), "take")
    assert again.held
    assert editor(again).token == editor(first).token
    until_let_in(do, EditLock(key, BEN))
    assert not again.held


@pytest.mark.long
def test_a_look_makes_no_belief_longer(do: Do, key: str, settings: Settings, locks: Locks) -> None:
    """F62: A read does not extend a tab's belief, even if another primary's clock makes the lock look longer. A tab
    that has not renewed gains nothing, either."""
    set_locks(settings, EDIT_LEASE=2)
    anna = EditLock(key, ANNA)
    assert do(anna, "take").held
    locks.collection.update_one({"_id": key}, [{"$set": {"holders": _AN_HOUR_LATER}}])
    stranger = do(EditLock(key, ANNA, anna.tab), "read")
    assert (editor(stranger).who, stranger.held) == ("mine", False)
    time.sleep(2.1)
    looked = do(anna, "read")
    assert (editor(looked).who, looked.held) == ("mine", False)
    assert do(anna, "beat").held


#: The holders of a document as a primary may have left them whose clock was an hour ahead.
_AN_HOUR_LATER = {
    "$map": {
        "input": "$holders",
        "as": "e",
        "in": {"$mergeObjects": ["$$e", {"until": {"$add": ["$$e.until", 3_600_000]}}]},
    }
}


class TestForks:
    """An edit lock belongs to the tab for the time of a request. Forked children of the request have no part in it."""

    pytestmark: ClassVar = FORKS

    @pytest.mark.parametrize("name", ["take", "beat", "read", "release", "take_over"])
    def test_a_child(self, do: Do, key: str, locks: Locks, name: str) -> None:
        """F63: Nothing is sent for the parent's tab, and the child is told that the state is unknown."""
        anna, ben = EditLock(key, ANNA), EditLock(key, BEN)
        mine = do(anna, "take")
        arguments: dict[str, tuple[Any, ...]] = {"take_over": (editor(mine).token,)}
        before = locks.collection.find_one({"_id": key})

        def go_on() -> None:
            assert not mine.held
            for lock in (anna, ben):
                status = do(lock, name, *arguments.get(name, ()))
                assert "forked child" in status.problem
                assert (status.held, status.free) == (False, False)

        in_child(go_on)
        assert locks.collection.find_one({"_id": key}) == before
        assert do(anna, "beat").held

    def test_a_child_with_locks_of_its_own(self, do: Do, key: str) -> None:
        """F63: A fresh lock object is the child's. The object works for the tab that has the lock as well, if the child
        knows its name."""
        anna = EditLock(key, ANNA)
        do(anna, "take")

        def go_on() -> None:
            assert not do(EditLock(key, BEN), "take").held
            assert do(EditLock(key, ANNA, anna.tab), "beat").held

        in_child(go_on)
        assert do(anna, "release").free


@pytest.mark.long
def test_away(do: Do, key: str, away: None) -> None:
    """No error is raised, and the password of the connection is shown nowhere."""
    status = do(EditLock(key, ANNA), "take")
    assert (status.held, status.free, status.editor) == (False, False, None)
    assert "did not answer" in status.problem
    assert "hunter2" not in status.problem


def test_a_damaged_document(do: Do, key: str, locks: Locks) -> None:
    """A damaged document is a problem of its own object. No user is told that the lock is free."""
    locks.collection.insert_one({"_id": key, "holders": "nonsense"})
    status = do(EditLock(key, ANNA), "take")
    assert (bool(status.problem), status.held, status.free) == (True, False, False)


def test_one_command(key: str, locks: Locks, commands: Commands) -> None:
    """Each method is one command. A take-over reads first."""
    anna, ben = EditLock(key, ANNA), EditLock(key, BEN)
    token = editor(anna.take()).token
    for lock, name, args in ((anna, "beat", ()), (anna, "read", ()), (ben, "take", ()), (ben, "take_over", (token,))):
        commands.sent.clear()
        getattr(lock, name)(*args)
        assert len(commands.sent) == (2 if name == "take_over" else 1)
    for command in commands.sent:
        if "findAndModify" in command:
            assert command["writeConcern"] == {"w": "majority", "j": True}


def test_a_crowd(key: str, locks: Locks) -> None:
    """If many tabs come at the same moment, one gets the lock. If many take it over, one succeeds."""
    tabs = [EditLock(key, Person(str(number), f"user{number}")) for number in range(16)]
    with ThreadPoolExecutor(16) as pool:
        (winner,) = [status for status in pool.map(EditLock.take, tabs) if status.held]
        others = [tab for tab in tabs if tab.person.name != editor(winner).name]
        assert sum(status.held for status in pool.map(lambda tab: tab.take_over(editor(winner).token), others)) == 1


def test_the_work_on_a_row_does_not_wait_for_people(locks: Locks) -> None:
    """The lock of the row is another one."""
    order = Order.objects.create(buyer=User.objects.create(username="buyer"), item="bike", price=1)
    assert EditLock(edit_key(order), ANNA).take().held
    with mongo_lock(order, wait=0) as lock:
        assert lock.held


def test_clearing_stale_locks_leaves_a_living_editor(key: str, locks: Locks) -> None:
    """A living editor keeps the lock. The lock of an editor that is gone is cleared, like any lock."""
    anna = EditLock(key, ANNA)
    anna.take()
    assert operations.clear_stale(mongo_store(), [key]) == (0, 0)
    assert anna.beat().held


def test_in_memory(key: str) -> None:
    """The backend for tests knows edit locks as well."""
    with override_locks():
        anna, ben = EditLock(key, ANNA), EditLock(key, BEN)
        token = editor(anna.take()).token
        assert not ben.take().held
        assert ben.take_over(token).held
        assert not anna.beat().held
        assert ben.release().free
