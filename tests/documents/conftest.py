"""Documents to lock, of a model and of a collection, under their usual names and under others."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from bson import ObjectId
from django.db import connections
from pymongo import MongoClient
from pymongo.collection import Collection

from django_mongolock import LockBackendFailed
from django_mongolock.documents import DocumentLock, declared
from django_mongolock.documents.document_lock import declare, undeclare
from django_mongolock.engine.session.background import Background
from django_mongolock.other_collections.courier import Courier
from django_mongolock.other_collections.field_paths import get_path, set_path
from tests.documents.models import Advert
from tests.support import failpoints

Document = dict[str, Any]
PENDING = {"exporting": "failed", "withdrawing": "withdraw_failed"}
FINAL = ["exported", "withdrawn"]
USUAL = {"holder": "lockedBy", "state": "exportStatus", "version": "documentVersion", "time": "lockTimestamp"}
OTHERS = {"holder": "lock.by", "state": "s", "version": "v", "time": "lock.at"}


@dataclass
class Ground:
    """A lock, and the raw collection under it."""

    lock: DocumentLock[Any]
    collection: Collection[Document]
    names: dict[str, str]
    ids: Iterator[Any] = field(repr=False)

    def __post_init__(self) -> None:
        self.names = {**self.names, "token": f"{self.names['holder']}Token"}

    def add(self, version: Any = 1, **values: Any) -> Any:
        """Add a document with these values in the fields of the lock, and with other fields. Return its id."""
        document: Document = {self.lock.rules.fields.key: next(self.ids), "price": 5}
        for role, value in {"version": version, **values}.items():
            set_path(document, self.names.get(role, role), value)
        self.collection.insert_one(document)
        return document[self.lock.rules.fields.key]

    def change(self, id_: Any, **values: Any) -> None:
        """Change a document as a program does that knows nothing of locks."""
        changes = {self.names.get(role, role): value for role, value in values.items()}
        assert self.collection.update_one({self.lock.rules.fields.key: id_}, {"$set": changes}).matched_count

    def age(self, id_: Any, seconds: float) -> None:
        """Set since when a document is held, by the server's clock."""
        time = {self.names["time"]: {"$subtract": ["$$NOW", round(seconds * 1000)]}}
        self.collection.update_one({self.lock.rules.fields.key: id_}, [{"$set": time}])

    def raw(self, id_: Any) -> Document:
        """The whole document."""
        found = self.collection.find_one({self.lock.rules.fields.key: id_})
        assert found is not None
        return found

    def read(self, id_: Any, *roles: str) -> Any:
        """Return the values of some fields. Fields of the lock are named by their roles."""
        found = self.raw(id_)
        values = tuple(get_path(found, self.names.get(role, role)) for role in roles)
        return values if len(values) > 1 else values[0]


@pytest.fixture
def forget() -> Iterator[None]:
    """Remove the declarations of the test afterwards."""
    before = declared()
    yield
    for lock in declared():
        if lock not in before:
            undeclare(lock)
    for lock in before:
        declare(lock)


@pytest.fixture(autouse=True)
def _leave_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stop background retries at the end of a test. Otherwise the next test might count or strike their commands."""
    over, repeat = threading.Event(), Background.repeat

    def repeat_own(background: Background, call: Callable[[], object], pauses: Sequence[float], *within: float) -> None:
        repeat(background, lambda: over.is_set() or call(), pauses, *within)

    monkeypatch.setattr(Background, "repeat", repeat_own)
    yield
    over.set()


def new_ids(make: Callable[[], Any]) -> Iterator[Any]:
    while True:
        yield make()


@pytest.fixture
def appname() -> str:
    """Return the client's name at the server. A failpoint can be aimed at that name."""
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
def make(
    db: None, forget: None, mongo: MongoClient[Document], collection: Collection[Document], appname: str
) -> Iterator[Callable[..., Ground]]:
    """Return a function that makes a ground of a model, of a "collection", or of one with "other names"."""
    client: MongoClient[Document] = MongoClient(os.environ["MONGODB_URI"], appname=appname, heartbeatFrequencyMS=500)

    def make(kind: Any = "collection", ids: Callable[[], Any] | None = None, **options: Any) -> Ground:
        given: dict[str, Any] = {"pending": PENDING, "final": FINAL, "stale_after": 60, "name": "test", **options}
        if not isinstance(kind, str):
            roles = {role: role for role in USUAL}
            lock: DocumentLock[Any] = DocumentLock(kind, using="mongo", **{**roles, **given})
            raw = mongo[str(connections["mongo"].settings_dict["NAME"])][kind._meta.db_table]
            raw.delete_many({})
            return Ground(lock, raw, USUAL, new_ids(ids or ObjectId))
        names = OTHERS if kind == "other names" else USUAL
        place = client[collection.database.name][collection.name]
        lock = DocumentLock[Document](place, **{**names, **given})
        return Ground(lock, collection, names, new_ids(ids or (lambda: uuid.uuid4().hex)))

    yield make
    client.close()


@pytest.fixture(params=[Advert, "collection", "other names"], ids=["model", "collection", "other names"])
def ground(request: pytest.FixtureRequest, make: Callable[..., Ground]) -> Ground:
    """Each kind of place in turn."""
    return make(request.param)


@pytest.fixture
def plain(make: Callable[..., Ground]) -> Ground:
    """A collection."""
    return make()


@pytest.fixture
def adverts(make: Callable[..., Ground]) -> Ground:
    """A model."""
    return make(Advert)


@pytest.fixture
def failpoint(mongo: MongoClient[Document], appname: str) -> Iterator[Callable[..., None]]:
    """Return a function that makes the server fail commands of the collection's client, such as failpoint("find",
    times=1, errorCode=91)."""

    def set_failpoint(*names: str, times: int | None = None, **data: Any) -> None:
        mode: Any = "alwaysOn" if times is None else {"times": times}
        point = {"failCommands": list(names), "appName": appname, **data}
        mongo.admin.command({"configureFailPoint": "failCommand", "mode": mode if names else "off", "data": point})

    with failpoints.failpoint(mongo, "failCommand", {}, "off"):
        yield set_failpoint


@pytest.fixture
def strike(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Return a function that raises errors in place of the answers to the commands of some numbers, or to all later
    ones as well.

    The commands are carried out unless they are *lost*. *before* is called with the number of each command. The
    function returns the list of sent commands. Background commands of earlier tests do not count.
    """
    mine, make = list[Courier](), Courier.__init__

    def made(courier: Courier, *arguments: Any, **options: Any) -> None:
        make(courier, *arguments, **options)
        mine.append(courier)

    monkeypatch.setattr(Courier, "__init__", made)

    def strike(
        ground: Ground,
        *numbers: int,
        error: BaseException | None = None,
        rest: bool = False,
        lost: bool = False,
        before: Callable[[int], object] = lambda _number: None,
    ) -> list[Any]:
        sent: list[Any] = []
        send = Courier.send

        def struck(courier: Courier, command: Any, *left: float) -> Any:
            if courier not in mine or courier._collection.name != ground.collection.name:
                return send(courier, command, *left)
            sent.append(lambda: send(courier, command, *left))
            number = len(sent)
            before(number)
            strikes = number in numbers or (rest and number >= max(numbers))
            answer = None if strikes and lost else send(courier, command, *left)
            if strikes:
                raise error or LockBackendFailed("MongoDB did not answer")
            return answer

        monkeypatch.setattr(Courier, "send", struck)
        return sent

    return strike
