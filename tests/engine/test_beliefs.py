"""What a waiter may believe comes from its own last command, whatever it was given before, and whatever it is told."""

import time
from typing import Any

import pytest
from pymongo.collection import Collection

from django_mongolock.engine.document import Terms, entry
from django_mongolock.engine.mongo_store import MongoStore
from django_mongolock.engine.session.session import Session
from django_mongolock.engine.step import Step
from django_mongolock.exceptions import LockBackendFailed
from tests.engine.conftest import Document, Here
from tests.engine.overlap import Watch
from tests.support.waiting import eventually

#: A place in the queue is worth a third of a lease: whoever took one for the other is found out.
PLACE = Terms(lease=9.0, margin=0.1, clock_margin=0.0, waiter_lease=3.0)
CALM = Terms(lease=60, margin=1, waiter_lease=60)


def fails(*arguments: Any, **options: Any) -> Any:
    raise LockBackendFailed("the network is cut")


def crowd(store: MongoStore, size: int) -> None:
    """Queue so many others, who live for a minute without any renewal."""
    for number in range(size):
        add = entry(f"crowd.{number}", "crowd", CALM, {}, "crowd")
        store.apply("k", Step(ask=add["grant"], add=add), 5)


@pytest.mark.long
@pytest.mark.parametrize("how", ["removed", "paused"])
def test_a_place_is_worth_what_the_last_command_gave(
    here: Here, store: MongoStore, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """F107: a waiter stood behind 40 others, lost its place (forced, or while it was paused) and got another in a short
    queue. Granted the lock by another's command and cut off, it holds it no longer than that place lasts."""
    holder = here.other(terms=CALM).acquire()
    crowd(store, 40)
    renew, apply = here.session.store.renew, here.session.store.apply
    waiter = here.waiter(here.lock(terms=PLACE, wait=None))
    (grant,) = eventually_one(here.session)
    assert eventually(lambda: grant.lease.until > 0)
    if how == "removed":
        here.collection.update_one({"_id": "k"}, {"$set": {"waiters": []}})
    else:
        here.session.store.renew = fails  # type: ignore[method-assign]
        time.sleep(PLACE.lease + 1)  # the longest that any place of it can last
        here.collection.update_one({"_id": "k"}, {"$pull": {"waiters": {"session": "crowd"}}})
        here.session.store.renew = renew  # type: ignore[method-assign]
    assert eventually(lambda: places(here.collection) == [grant.id], 20)
    before = grant.lease.until
    assert eventually(lambda: grant.lease.until > before, 10)  # its new place is renewed
    here.session.store.renew = here.session.store.apply = here.session.store.read = fails  # type: ignore[method-assign]
    third = here.other(terms=CALM, wait=20)
    with Watch(waiter.lock, third) as watch:
        holder.release()
        assert waiter.end().has_it
        third.acquire()
        time.sleep(0.5)
        third.release()
    assert watch.overlap == 0
    here.session.store.renew, here.session.store.apply = renew, apply  # type: ignore[method-assign]
    waiter.let_go()


def eventually_one(session: Session) -> list[Any]:
    """The only grant that the session knows, once it knows one."""
    assert eventually(lambda: len(session.registry.grants) == 1)
    return list(session.registry.grants.values())


def places(collection: Collection[Document]) -> list[str]:
    """Who stands in the queue."""
    document = collection.find_one({"_id": "k"}) or {"waiters": []}
    return [e["grant"] for e in document["waiters"]]
