"""Clones of a process: a virtual machine that was paused, copied, and goes on twice (F79).

Everything in memory is the same in both: the session's id, its counter, the process's id, the state of `random`. What
the system gives (`os.urandom`) is not. That a clone goes on believing in what it held when the copy was made is the
limit that P9 names.
"""

import asyncio
import random
import secrets
from collections.abc import Callable
from typing import Any

import pytest

from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.session.session import Session
from tests.engine.conftest import Here, make_lock
from tests.engine.faces import Face
from tests.engine.twins import CALM
from tests.support.waiting import eventually

Entries = Callable[..., list[Any]]
Clones = tuple[Session, Session]


@pytest.fixture
def clones(new_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch) -> Clones:
    """Two sessions with the same id and counter, as two clones of a machine have them."""
    with monkeypatch.context() as patch:
        patch.setattr(secrets, "token_hex", lambda length=32: "5a" * length)
        first, second = new_session(), new_session()
    assert first.id == second.id
    return first, second


def take(session: Session, *keys: str, **options: Any) -> MongoLock:
    """A lock of a clone, which is asked for in the state that `random` has in both."""
    random.seed(79)
    return make_lock(session, *keys, **{"terms": CALM, **options})


def test_their_grants_have_different_ids(clones: Clones, face: Face, entries: Entries) -> None:
    """F79: the first grant after the copy was made, and those after it."""
    ids: list[set[str]] = []
    for session in clones:
        ids.append(set())
        for _ in range(5):
            with face.block(take(session)):
                ids[-1] |= {e["grant"] for e in entries()}
    assert [len(found) for found in ids] == [5, 5]
    assert ids[0] & ids[1] == set()


def test_they_exclude_each_other(clones: Clones, face: Face) -> None:
    """F79, P1: who asks for what its clone holds is refused, rather than being taken for the same one."""
    mine, theirs = (take(session) for session in clones)
    face.acquire(mine)
    token = mine.fencing_token
    assert not face.try_acquire(theirs), f"both hold it: {mine}, {theirs}"
    assert mine.held
    assert face.release(mine)
    assert face.try_acquire(theirs)
    assert theirs.fencing_token > token
    assert face.release(theirs)


async def test_what_one_gave_up_is_not_refused_to_the_other(here: Here, clones: Clones) -> None:
    """F79, F17: the tombstone of a clone's command that was given up does not lie on the other one's."""
    first, second = clones

    def field(name: str) -> list[Any]:
        return list((here.collection.find_one({"_id": "k"}) or {})[name])

    async with here.other(terms=CALM):
        task = asyncio.create_task(take(first, wait=None).aacquire())
        assert await asyncio.to_thread(eventually, lambda: field("waiters"))
        task.cancel()
        assert await asyncio.to_thread(eventually, lambda: field("tombstones") and not field("waiters"))
    async with take(second, wait=2) as mine:
        assert mine.held
