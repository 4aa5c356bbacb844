"""Fixtures of the tests that read locks through Django, with model, admin, commands and checks."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connections
from pymongo import MongoClient, monitoring
from pymongo.collection import Collection
from pytest_django import Settings

from django_mongolock.backends import close_backends
from django_mongolock.engine.store.layout import ensure_indexes
from tests.engine.faces import ASYNC, BLOCKING, Face
from tests.support.lock_documents import Document, Locks, clock

WITH_MONGO = pytest.mark.django_db(databases=["default", "mongo"])
#: A port on which nobody listens.
NOBODY = "mongodb://user:hunter2@127.0.0.1:9/?directConnection=true"


class Commands(monitoring.CommandListener):
    """The commands that a client sends, except those of every connection."""

    def __init__(self) -> None:
        self.sent: list[Document] = []

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        if event.command_name not in ("hello", "ismaster", "endSessions", "ping", "killCursors"):
            self.sent.append(dict(event.command))

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        pass

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        pass

    def names(self) -> list[str]:
        """Return the names of the sent commands."""
        return [next(iter(command)) for command in self.sent]

    def clear(self) -> None:
        """Forget the recorded commands."""
        self.sent.clear()


@pytest.fixture
def locks(db: None, mongo: MongoClient[Document]) -> Iterator[Locks]:
    """Return the empty locks collection of the test's database, with its indexes. The collection is emptied again
    afterwards."""
    collection = mongo[str(connections["mongo"].settings_dict["NAME"])]["mongolock_locks"]
    collection.delete_many({})
    ensure_indexes(collection)
    yield Locks(collection, clock(mongo))
    collection.delete_many({})


@pytest.fixture
def history(locks: Locks, settings: Settings) -> Iterator[Collection[Document]]:
    """Turn the history on, and provide its collection. The collection does not exist yet."""
    collection = locks.collection.database[f"{locks.collection.name}_history"]
    collection.drop()
    settings.MONGOLOCK = {**settings.MONGOLOCK, "HISTORY": 1}
    yield collection
    close_backends()
    collection.drop()


@pytest.fixture
def connect(db: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that gives the engine another connection for the rest of the test."""

    def connect(host: str | None = None, **options: Any) -> None:
        settings = connections["mongo"].settings_dict
        if host is not None:
            monkeypatch.setitem(settings, "HOST", host)
        monkeypatch.setitem(settings, "OPTIONS", {**settings["OPTIONS"], **options})
        close_backends()

    yield connect
    monkeypatch.undo()
    close_backends()


@pytest.fixture
def commands(connect: Callable[..., None]) -> Commands:
    """Record the commands of the engine from now on."""
    listener = Commands()
    connect(event_listeners=[listener])
    return listener


@pytest.fixture
def away(connect: Callable[..., None], settings: Settings) -> None:
    """MongoDB does not answer."""
    settings.MONGOLOCK = {**settings.MONGOLOCK, "COMMAND_TIMEOUT": 0.1}
    connect(NOBODY)


@pytest.fixture(params=[BLOCKING, ASYNC], ids=lambda face: face.name)
def face(request: pytest.FixtureRequest) -> Face:
    """Return the blocking or the async methods of a lock."""
    chosen: Face = request.param
    return chosen


@pytest.fixture
def do(face: Face) -> Callable[..., Any]:
    """Return a function that calls a method of any object by its name, either the method itself or its awaited twin."""
    return face.call


@pytest.fixture
def in_thread() -> Iterator[Callable[..., threading.Thread]]:
    """Return a function that starts daemon threads. The threads have ended when the test has."""
    started: list[threading.Thread] = []

    def in_thread(call: Callable[[], object]) -> threading.Thread:
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        started.append(thread)
        return thread

    yield in_thread
    for thread in started:
        thread.join(15)
        assert not thread.is_alive()
