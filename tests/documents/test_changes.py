"""F81: changes mean what MongoDB's own `$set` means, for every function that takes them; or nothing is written."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pymongo.collection import Collection
from pymongo.errors import PyMongoError

from django_mongolock import DocumentLock, LockError, fenced_update
from tests.documents.conftest import FINAL, PENDING, Document, Ground
from tests.support.lock_fixtures import WITH_MONGO

pytestmark = WITH_MONGO

#: What the lock writes beside the changes.
OWN = {
    *("_id", "lockedBy", "exportStatus", "documentVersion", "lockTimestamp", "lockAttempt"),
    *("fencing_token", "fencing_token_write"),
}
_ids = itertools.count(1)

names = st.sampled_from(["a", "b", "0", "1", "tags", "lines"])
scalars = st.sampled_from([None, 0, 1.5, "x", "$a", "$$NOW", True, b"b"])
values = st.recursive(
    scalars, lambda more: st.lists(more, max_size=3) | st.dictionaries(names, more, max_size=3), max_leaves=6
)
documents = st.dictionaries(names, values, max_size=4)
paths = st.lists(names, min_size=1, max_size=3).map(".".join)
changes = st.dictionaries(paths, values, min_size=1, max_size=3)


class Ways:
    """Each function that takes changes, on a document of its own."""

    def __init__(self, lock: DocumentLock[Document], collection: Collection[Document]) -> None:
        self.lock, self.collection = lock, collection

    def acquire(self, id_: int, changes: Document) -> None:
        self.lock.acquire((id_, 1), "exporting", changes=changes).finish("exported")

    def acquire_many(self, id_: int, changes: Document) -> None:
        batch = self.lock.acquire_many([(id_, 1)], "exporting", changes=changes, final="exported")
        with batch:
            for error in batch.refused.values():
                raise error

    def update(self, id_: int, changes: Document) -> None:
        with self.lock.hold((id_, 1), "exporting", final="exported") as held:
            held.update(changes)

    def finish(self, id_: int, changes: Document) -> None:
        self.lock.acquire((id_, 1), "exporting").finish("exported", changes)

    def fenced_update(self, id_: int, changes: Document) -> None:
        fenced_update(self.collection, 5, changes, filter={"_id": id_})

    @classmethod
    def all(cls) -> dict[str, Callable[[Ways, int, Document], None]]:
        return {name: way for name, way in vars(cls).items() if name[0] != "_" and name != "all"}


@pytest.fixture
def ways(plain: Ground) -> Ways:
    """The functions, on the test's collection."""
    return Ways(plain.lock, plain.collection)


def assert_as_set(ways: Ways, name: str, document: Document, changes: Document) -> None:
    """The document looks as after a plain `$set`; or nothing was written, as there."""
    ours, plain = next(_ids), next(_ids)
    for id_ in (ours, plain):
        ways.collection.insert_one({**document, "_id": id_, "documentVersion": 1})
    refused = wrong = False
    try:
        ways.collection.update_one({"_id": plain}, {"$set": changes})
    except PyMongoError:
        refused = True
    try:
        Ways.all()[name](ways, ours, changes)
    except (LockError, ValueError, TypeError):
        wrong = True
    rest = {id_: _rest(ways.collection.find_one({"_id": id_}) or {}) for id_ in (ours, plain)}
    assert wrong == refused
    assert rest[ours] == rest[plain]
    assert not refused or rest[ours] == document


def _rest(document: Mapping[str, Any]) -> Document:
    return {name: value for name, value in document.items() if name not in OWN}


@pytest.mark.long
@pytest.mark.parametrize("name", Ways.all())
def test_generated(ways: Ways, name: str) -> None:
    """F81: whatever is in the document, and whatever is to be changed in it."""

    @settings(
        max_examples=40, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    @given(documents, changes)
    def compare(document: Document, changes: Document) -> None:
        assert_as_set(ways, name, document, changes)

    compare()


@pytest.mark.parametrize("name", Ways.all())
@pytest.mark.parametrize(
    ("document", "changes"),
    [
        ({"tags": ["x", "y"]}, {"tags.1": "Y"}),
        ({"lines": [{"price": 1}, {"price": 2}]}, {"lines.0.price": 9}),
        ({"a": 5}, {"a.b": 1}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}),
        ({"a": None}, {"a.b": 1}),
        ({}, {"a.0.b": 1}),
        ({"tags": []}, {"tags.2": "z"}),
    ],
    ids=str,
)
def test_known(ways: Ways, name: str, document: Document, changes: Document) -> None:
    """F81: those that went wrong: the element of an array, a field in one, a path through a scalar."""
    assert_as_set(ways, name, document, changes)


def test_fields_of_the_lock(make: Callable[..., Ground], collection: Collection[Document]) -> None:
    """F81: the lock replaces nothing either, where the path of one of its fields leads through another value."""
    lock = DocumentLock[Document](
        collection, state="lock.state", pending=PENDING, final=FINAL, stale_after=60, holder="lock.by", name="nested"
    )
    collection.insert_one({"_id": 1, "documentVersion": 1, "lock": 5})
    with pytest.raises(LockError):
        lock.acquire((1, 1), "exporting")
    assert collection.find_one() == {"_id": 1, "documentVersion": 1, "lock": 5}
