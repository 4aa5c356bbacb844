"""The short form of the command that acquires a lock which is probably free, and when it is tried."""

import threading
from collections.abc import Callable

import pytest
from pymongo.errors import AutoReconnect

from django_mongolock.engine.free_keys import MOST, PENALTY, FreeKeys
from django_mongolock.engine.session import Session
from django_mongolock.engine.step import TAKE_FREE
from django_mongolock.exceptions import LockNotAcquired
from tests.engine.conftest import Commands, Document, LockMaker, store_of
from tests.waiting import eventually


def forms(commands: Commands) -> list[str]:
    """Which form of the command was sent, in order; and forget them."""
    asked = [document for document in commands.documents if "findAndModify" in document]
    found = ["short" if document["update"] == TAKE_FREE else "whole" for document in asked]
    commands.clear()
    return found


def test_a_key_that_was_left_free_is_taken_in_the_short_form(lock: LockMaker, commands: Commands) -> None:
    """P8: one command each; the first one makes the document."""
    tokens = []
    for _ in range(4):
        with lock() as mine:
            assert mine.held
            tokens.append(mine.fencing_token)
    assert tokens == list(range(tokens[0], tokens[0] + 4))
    assert forms(commands) == ["whole", "short", "short", "short"]


def test_a_wrong_guess_costs_one_command_and_is_not_made_again_soon(
    lock: LockMaker, other: LockMaker, commands: Commands
) -> None:
    """Nobody is let in who should not be; and who waits gets the lock as ever."""
    with lock():
        pass
    theirs = other().acquire()
    commands.clear()
    with pytest.raises(LockNotAcquired):
        lock(wait=0).acquire()
    assert forms(commands) == ["short", "whole"]
    theirs.release()
    for _ in range(PENALTY + 1):
        with lock():
            pass
    assert set(forms(commands)) == {"whole"}
    with lock():
        pass
    assert forms(commands) == ["short"]


def test_a_wrong_guess_queues_whoever_waits(
    lock: LockMaker,
    other: LockMaker,
    entries: Callable[..., list[Document]],
    in_thread: Callable[..., threading.Thread],
) -> None:
    """P5: and it is granted by the release of whoever was quicker."""
    with lock():
        pass
    theirs, mine = other().acquire(), lock()
    thread = in_thread(lambda: mine.acquire(10))
    assert eventually(lambda: len(entries()) == 2)
    theirs.release()
    thread.join()
    assert mine.held
    assert mine.release()


def test_a_key_that_somebody_waited_for_is_not_guessed(
    lock: LockMaker, other: LockMaker, commands: Commands, entries: Callable[..., list[Document]],
    in_thread: Callable[..., threading.Thread],
) -> None:  # fmt: skip
    """Whose release lets somebody in has not left a free key."""
    mine, theirs = lock().acquire(), other()
    thread = in_thread(lambda: theirs.acquire(10).release())
    assert eventually(lambda: len(entries()) == 2)
    mine.release()
    thread.join()
    commands.clear()
    with lock():
        pass
    assert forms(commands)[0] == "whole"


def test_an_answer_that_is_lost_is_settled_as_ever(
    lock: LockMaker, session: Session, monkeypatch: pytest.MonkeyPatch, entries: Callable[..., list[Document]]
) -> None:
    """F17: the short command has taken the lock and nobody knows: the whole one finds the grant; its id is buried."""
    with lock():
        pass
    store = store_of(session)
    take_free = store.take_free

    def lose_the_answer(*arguments: object) -> None:
        monkeypatch.setattr(store, "take_free", take_free)
        assert take_free(*arguments) is not None  # type: ignore[arg-type]
        raise store._problem(AutoReconnect("gone"), "k", 1.0)

    monkeypatch.setattr(store, "take_free", lose_the_answer)
    with lock(terms=lock().options.terms) as mine:
        assert mine.held
        assert len(entries()) == 1
    found = store.collection.find_one({"_id": "k"})
    assert found is not None
    assert found["holders"] == []
    assert len(found["graves"]) == 1


def test_a_damaged_document_is_told_all_the_same(lock: LockMaker, session: Session) -> None:
    """F55: the short form does not see what is wrong, the whole one does."""
    with lock():
        pass
    store_of(session).collection.update_one({"_id": "k"}, {"$set": {"changes": "many"}})
    with pytest.raises(Exception, match="changes"):
        lock().acquire()


def test_a_guess_is_made_once_for_each_release() -> None:
    keys = FreeKeys()
    assert not keys.guess("k")
    keys.given_back("k")
    keys.given_back("k")
    assert keys.guess("k")
    assert not keys.guess("k")


def test_those_that_were_given_back_last_are_remembered() -> None:
    keys = FreeKeys()
    for number in range(MOST + 1):
        keys.given_back(f"k{number}")
    assert not keys.guess("k0")
    assert keys.guess("k1")
    assert keys.guess(f"k{MOST}")
