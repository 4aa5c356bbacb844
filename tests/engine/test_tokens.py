"""Tokens grow wherever the server can know: also where the document was removed, or restored from an older copy (F78).

The limit: where the document is gone, or an older one, *and* the server's clock is behind the last token that was
given, nobody is left who knows that token. docs/explanation/promises.md says so.
"""

import datetime as dt
import re
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from bson.int64 import Int64
from pymongo.collection import Collection

from django_mongolock.engine.document import UNLIMITED, Terms, entry
from django_mongolock.engine.memory_server import MemoryServer, MemoryStore
from django_mongolock.engine.mongo_store import MongoStore
from django_mongolock.engine.step import Limits, Step
from django_mongolock.engine.store import Store
from tests.engine.conftest import Document, LockMaker
from tests.engine.faces import Face

ROOT = Path(__file__).parents[2]
TERMS = Terms(lease=60, margin=1, waiter_lease=60)
READER = Terms("shared", UNLIMITED, lease=60, margin=1, waiter_lease=60)
OWNED = Terms(lease=60, margin=1, waiter_lease=60, owner="$bob")
TIMEOUT = 10.0

_numbers = count(1)


class Key:
    """The key "k" in one of the two that carry the rule out.

    read, write: its document, by hand; None: there is none.
    """

    def __init__(self, store: Store, read: Callable[[], Document], write: Callable[[Document | None], object]) -> None:
        self.store, self.read, self.write = store, read, write

    def apply(self, **step: Any) -> int:
        """Apply a step; return the token of the grant that it asks about, 0 if that holds nothing."""
        return self.store.apply("k", Step(**step), TIMEOUT).token

    def add(self, grant: str, terms: Terms = TERMS, **step: Any) -> int:
        return self.apply(ask=grant, add=entry(grant, "s", terms, {}), **step)

    def remove(self, grant: str) -> None:
        self.apply(remove=(grant,))

    def tokens(self) -> list[int]:
        """Those of its holders."""
        return [int(holder["token"]) for holder in self.read()["holders"]]


def in_mongodb(store: MongoStore) -> Key:
    """The key in MongoDB."""
    locks = store.collection

    def write(document: Document | None) -> None:
        locks.delete_one({"_id": "k"})
        if document is not None:
            locks.insert_one(document)

    return Key(store, lambda: dict(locks.find_one({"_id": "k"}) or {}), write)


def in_memory() -> Key:
    """The key in the memory of this process."""
    documents = (server := MemoryServer()).documents

    def write(document: Document | None) -> None:
        documents.pop("k")
        if document is not None:
            documents["k"] = document

    return Key(MemoryStore(server, Limits()), lambda: dict(documents["k"]), write)


@pytest.fixture(params=["mongodb", "memory"])
def key(request: pytest.FixtureRequest, store: MongoStore) -> Key:
    """Both twins of the rule."""
    return in_mongodb(store) if request.param == "mongodb" else in_memory()


# How the lock may come to somebody; each prepares the document that is copied, and then gives it away.


def _free(key: Key) -> None:
    key.add("g0")
    key.remove("g0")


def _held(key: Key) -> None:
    key.add("g0", OWNED)


def _queued(key: Key) -> None:
    key.add("g0")
    key.add("g1")


def _readers_queued(key: Key) -> None:
    key.add("g0")
    for name in ("g1", "g2", "g3"):
        key.add(name, READER)


def _add(key: Key) -> None:
    key.add("new")


def _try(key: Key) -> None:
    key.add("new", trial=True)


def _take_free(key: Key) -> None:
    assert key.store.take_free("k", Step(ask="new", add=entry("new", "s", TERMS, {})), TIMEOUT)


def _hand_over(key: Key) -> None:
    key.add("new", remove=("g0",), force=True, given="g0")


def _resume(key: Key) -> None:
    key.add("new", OWNED, remove=("g0",), force=True, resumes=True)


def _release(key: Key) -> None:
    assert key.store.apply("k", Step(remove=("g0",), given="g0"), TIMEOUT).found


Act = Callable[[Key], None]
WAYS: dict[str, tuple[Act, Act]] = {
    "asked for": (_free, _add),
    "tried": (_free, _try),
    "short form": (_free, _take_free),
    "handed over": (_held, _hand_over),
    "resumed": (_held, _resume),
    "from the queue": (_queued, _release),
    "three readers from the queue": (_readers_queued, _release),
}


def use(key: Key) -> int:
    """Empty the key, and give it to somebody a few times more; return the last token."""
    token = 0
    for e in (*key.read()["holders"], *key.read()["waiters"]):
        key.apply(remove=(e["grant"],), force=True)
    for _ in range(5):
        grant = f"more{next(_numbers)}"
        token = key.add(grant)
        key.remove(grant)
    return token


@pytest.mark.parametrize("way", WAYS)
def test_an_older_copy_of_the_document(key: Key, way: str) -> None:
    """F78, P2: a backup is restored: the next tokens are larger than all that were given since it was made."""
    prepare, give = WAYS[way]
    prepare(key)
    copy = key.read()
    last = use(key)
    time.sleep(0.02)  # in memory, more than one grant fits into a millisecond
    key.write(copy)
    give(key)
    tokens = key.tokens()
    assert tokens
    assert [last, *tokens] == sorted({last, *tokens})
    assert key.read()["token"] == tokens[-1]


@pytest.mark.long
def test_a_document_that_was_removed(key: Key) -> None:
    """F78, P2: as often as somebody removes it, in use or not."""
    tokens = []
    for number in range(12):
        tokens.append(key.add(f"g{number}"))
        tokens.append(use(key))
        if number % 2:
            key.add("held")
        time.sleep(0.02)
        key.write(None)
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("way", WAYS)
def test_a_clock_that_is_behind(key: Key, way: str) -> None:
    """F78, P2: the last token is an hour ahead of the clock, which was set back: the next are one more each."""
    prepare, give = WAYS[way]
    prepare(key)
    ahead = round(time.time() * 1000) + 3_600_000
    key.write({**key.read(), "token": Int64(ahead)})
    give(key)
    tokens = key.tokens()
    assert tokens == list(range(ahead + 1, ahead + 1 + len(tokens)))
    assert tokens


def test_of_a_lock_object(lock: LockMaker, collection: Collection[Document], face: Face) -> None:
    """F78, P2: seen by a program: a free lock is taken with the short form, over a document that has been restored."""
    mine = lock(terms=TERMS)
    with face.block(mine):
        pass
    copy = collection.find_one({"_id": "k"})
    assert copy is not None
    tokens = []
    for _ in range(4):
        with face.block(lock(terms=TERMS)) as again:
            tokens.append(again.fencing_token)
        collection.replace_one({"_id": "k"}, copy)
    assert tokens == sorted(set(tokens))


def test_a_holder_learns_that_somebody_has_the_key_since(
    lock: LockMaker, other: LockMaker, collection: Collection[Document]
) -> None:
    """F78, P2: a copy from before it had the lock is restored, and the next gets a larger token than it has."""
    other().acquire().release()
    copy = collection.find_one({"_id": "k"})
    assert copy is not None
    for _ in range(3):
        other().acquire().release()
    mine = lock(terms=TERMS).acquire()
    collection.replace_one({"_id": "k"}, copy)
    with other() as theirs:
        assert theirs.fencing_token > mine.fencing_token


def test_the_first_token_is_the_server_s_time(key: Key) -> None:
    """F78, P2: from which all others follow: in milliseconds, so it needs no memory of its own."""
    before = dt.datetime.now(dt.UTC).timestamp() * 1000
    token = key.add("g1")
    after = dt.datetime.now(dt.UTC).timestamp() * 1000
    assert before - 1_000 <= token <= after + 1_000


def test_the_limit_is_said() -> None:
    """F78: in the promise itself: what is removed or restored while the clock is behind starts again lower."""
    promises = (ROOT / "docs/explanation/promises.md").read_text()
    (section,) = re.findall(r"## Order \(P2\)\n(.*?)\n## ", promises, re.DOTALL)
    limit = section.partition("*The limit.*")[2]
    assert "clock" in limit
    assert re.search(r"removed|restored", limit)
