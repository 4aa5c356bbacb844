"""Documents to lock: of a model and of a collection, under their usual names and under others."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from bson import ObjectId
from django.db import connections
from pymongo import MongoClient
from pymongo.collection import Collection

from django_mongolock import DocumentLock
from django_mongolock.documents import declared
from django_mongolock.documents.document_lock import undeclare
from django_mongolock.documents.sender import Background, Task
from testproject.shop.models import Ad
from tests.support import failpoints

Document = dict[str, Any]
PENDING = {"exporting": "failed", "withdrawing": "withdraw_failed"}
FINAL = ["exported", "withdrawn"]
USUAL = {
    "holder": "lockedBy",
    "state": "exportStatus",
    "version": "documentVersion",
    "time": "lockTimestamp",
    "attempt": "lockAttempt",
}
OTHERS = {"holder": "by", "state": "s", "version": "v", "time": "lock.at", "attempt": "lock.id"}


@dataclass
class Ground:
    """A lock, and the raw collection under it."""

    lock: DocumentLock[Any]
    collection: Collection[Document]
    names: dict[str, str]
    ids: Iterator[Any] = field(repr=False)

    def add(self, version: Any = 1, **values: Any) -> Any:
        """Add a document, with these values in the fields of the lock, and others; return its id."""
        id_ = next(self.ids)
        document: Document = {"_id": id_, "price": 5}
        for role, value in {"version": version, **values}.items():
            self._put(document, self.names.get(role, role), value)
        self.collection.insert_one(document)
        return id_

    def change(self, id_: Any, **values: Any) -> None:
        """Change a document as somebody does who knows nothing of locks."""
        changes = {self.names.get(role, role): value for role, value in values.items()}
        assert self.collection.update_one({"_id": id_}, {"$set": changes}).matched_count

    def raw(self, id_: Any) -> Document:
        """The whole document."""
        found = self.collection.find_one({"_id": id_})
        assert found is not None
        return found

    def read(self, id_: Any, *roles: str) -> Any:
        """The values of some fields: of those of the lock by their roles."""
        found = self.raw(id_)
        values = []
        for role in roles:
            value: Any = found
            for part in self.names.get(role, role).split("."):
                value = value.get(part) if value else None
            values.append(value)
        return tuple(values) if len(values) > 1 else values[0]

    @staticmethod
    def _put(document: Document, path: str, value: Any) -> None:
        *parents, last = path.split(".")
        for parent in parents:
            document = document.setdefault(parent, {})
        document[last] = value


@pytest.fixture
def forget() -> Iterator[None]:
    """Take back what the test declares."""
    before = declared()
    yield
    for lock in declared():
        if lock not in before:
            undeclare(lock)


@pytest.fixture(autouse=True)
def _leave_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test leaves to the background is not tried again after it: the next test may count or strike commands."""
    over, add = threading.Event(), Background.add

    def add_own(background: Background, task: Task) -> None:
        attempt = task.attempt
        task.attempt = lambda: over.is_set() or attempt()
        add(background, task)

    monkeypatch.setattr(Background, "add", add_own)
    yield
    over.set()


def objects() -> Iterator[ObjectId]:
    while True:
        yield ObjectId()


def texts() -> Iterator[str]:
    while True:
        yield uuid.uuid4().hex


@pytest.fixture
def appname() -> str:
    """The name that the client of a collection gives to the server: a failpoint can be aimed at it."""
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
def make(
    db: None, forget: None, mongo: MongoClient[Document], collection: Collection[Document], appname: str
) -> Iterator[Callable[..., Ground]]:
    """Makes a ground: of a "model", of a "collection", or of one with "other names"."""
    client: MongoClient[Document] = MongoClient(os.environ["MONGODB_URI"], appname=appname, heartbeatFrequencyMS=500)

    def make(kind: str = "collection", **options: Any) -> Ground:
        given: dict[str, Any] = {"pending": PENDING, "final": FINAL, "stale_after": 60, "name": "test", **options}
        if kind == "model":
            roles = {"holder": "locked_by", "state": "export_status", "version": "document_version"}
            lock: DocumentLock[Any] = DocumentLock(Ad, **{**roles, "time": "lock_timestamp", **given})
            raw = mongo[str(connections["mongo"].settings_dict["NAME"])]["shop_ad"]
            return Ground(lock, raw, USUAL, objects())
        names = OTHERS if kind == "other names" else USUAL
        place = client[collection.database.name][collection.name]
        lock = DocumentLock[Document](place, **{**names, **given})
        return Ground(lock, collection, names, texts())

    yield make
    client.close()


@pytest.fixture(params=["model", "collection", "other names"])
def ground(request: pytest.FixtureRequest, make: Callable[..., Ground]) -> Ground:
    """Each kind of place in turn."""
    return make(request.param)


@pytest.fixture
def plain(make: Callable[..., Ground]) -> Ground:
    """A collection."""
    return make()


@pytest.fixture
def failpoint(mongo: MongoClient[Document], appname: str) -> Iterator[Callable[..., None]]:
    """Makes the server fail commands of the collection's client: failpoint("find", times=1, errorCode=91)."""

    def set_failpoint(*names: str, times: int | None = None, **data: Any) -> None:
        mode: Any = "alwaysOn" if times is None else {"times": times}
        point = {"failCommands": list(names), "appName": appname, **data}
        mongo.admin.command({"configureFailPoint": "failCommand", "mode": mode if names else "off", "data": point})

    with failpoints.failpoint(mongo, "failCommand", {}, "off"):
        yield set_failpoint
