"""Recorded events of locks, in a collection of a fixed size. New events push out the oldest.

No lock waits for its history. The process that holds a lock keeps its events in memory. A background thread writes one
second's events at a time. An event that cannot be written is lost. The history is for people, and no lock depends on
it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from queue import Empty, SimpleQueue
from typing import Any, Final

import pymongo
from bson import Int64, ObjectId
from django.apps import AppConfig
from django.core.checks import CheckMessage, Tags, register
from pymongo import IndexModel, WriteConcern
from pymongo.collection import Collection
from pymongo.errors import BulkWriteError, OperationFailure, PyMongoError

from ..backends import MongoBackend, get_backend, mongo_store
from ..conf import LockSettings, get_settings, warning
from ..engine import clock
from ..engine.logs import WARNING, log, log_exception
from ..engine.session.grant import Grant
from ..engine.session.notifications import Observer
from ..engine.session.worker_threads import WorkerThreads
from ..engine.store import layout
from ..engine.store.mongo import MongoStore
from ..inspection.operations import FACTS
from ..inspection.server import BELL_RIGHTS, missing_rights
from ..management.checks import has_wrong_settings
from .models import Happened, events_of

Document = dict[str, Any]

#: The number of events that wait in memory. Further events are lost.
MAX_NOTES: Final = 10_000
#: The number of events in one write, and the seconds for which they are gathered.
WRITE_BATCH: Final = 1_000
GATHER_SECONDS: Final = 1.0
#: The seconds for one write, and for the last write of a process that ends.
WRITE_TIMEOUT: Final = 5.0
LAST_WRITE_TIMEOUT: Final = 1.0

INDEXES: Final = (
    IndexModel([("key", 1), ("at", -1), ("_id", -1)], name="mongolock_key"),
    IndexModel([("at", -1), ("_id", -1)], name="mongolock_at"),
)
_DUPLICATE = 11000


_REPORTED: Final = {"acquired": Happened.GRANTED, "released": Happened.RELEASED, "lost": Happened.LOST}


@dataclass(frozen=True, slots=True)
class EventNote:
    """An event before it is written.

    - at: moment by the server's clock, if known.
    - moment: moment by this machine's clock.
    """

    key: str
    what: str
    moment: float
    at: datetime | None
    entry: Mapping[str, Any]
    facts: Mapping[str, Any]

    def document(self, id_: ObjectId, now: float, server_time: datetime) -> Document:
        """Return the document of this event.

        - now: time of this machine's clock when the server's clock shows *server_time*.
        """
        at = self.at or server_time - timedelta(seconds=now - self.moment)
        facts = {name: self.entry.get(name) for name in FACTS} | dict(self.facts)
        known = {name: value for name, value in facts.items() if value is not None and value != ""}
        return {"_id": id_, "at": at, "key": self.key, "event": str(self.what), **known}


class History:
    """A writer of events. There is one for each store in a process. Its thread starts with the first event.

    - events: function that opens the collection.
    - size: size of the collection in bytes.
    """

    def __init__(self, events: Callable[[], Collection[Document]], size: int) -> None:
        self._events = events
        self._size = size
        self._notes: SimpleQueue[EventNote] = SimpleQueue()
        self._wakeup: SimpleQueue[bool] = SimpleQueue()
        self._writer = WorkerThreads(1)
        self._writing = threading.Lock()
        self._started = self._closed = self._ready = self._failing = False
        self._lost = 0

    def observe(self, event: str, grant: Grant) -> None:
        """Record an event that a session reports about one of its grants. See `notifications.Observer`."""
        what = _REPORTED.get(event)
        if what is None and (event, grant.reason) == ("not_acquired", "deadlock"):
            what = Happened.DEADLOCK
        if what is None:
            return
        facts: Document = {
            "token": Int64(grant.token) if grant.token else None,
            "waited_ms": _ms(grant.reporting.waited if grant.reporting.contended else 0.0),  # else it is a round trip
        }
        at = grant.acquired_at
        if what in (Happened.RELEASED, Happened.LOST):
            held = grant.reporting.held_for
            facts["held_ms"] = _ms(held)
            # A loss is reported when it is noticed. This is later than the end of the lease, or the forced release.
            at = at + timedelta(seconds=held) if at and what is Happened.RELEASED else None
        if what is Happened.LOST:
            facts["reason"] = grant.reason
        if what is Happened.DEADLOCK:
            facts["reason"] = grant.reporting.held_by
        self.note(grant.key, what, grant.acquisition.entry, at=at, **facts)

    def note(self, key: str, what: str, entry: Mapping[str, Any], *, at: datetime | None = None, **facts: Any) -> None:
        """Record an event of *key* and of the holder with that *entry*. This never blocks and never raises.

        - what: value of `Happened`.
        """
        if self._closed or self._notes.qsize() >= MAX_NOTES:
            self._lost += 1
            return
        self._notes.put(EventNote(key, what, clock.now(), at, entry, facts))
        if not self._wakeup.qsize():
            self._wakeup.put(True)
        if not self._started:
            self._started = self._writer.submit(self._run, priority=0)

    def make(self, *, resize: bool = False) -> None:
        """Create the collection with its indexes. See make_capped()."""
        layout.make_capped(self._events(), self._size, resize=resize)
        with contextlib.suppress(OperationFailure):  # without the right to create them, `migrate` does it
            self._events().create_indexes(list(INDEXES))

    def close(self) -> None:
        """Write the remaining events within about `LAST_WRITE_TIMEOUT` seconds."""
        if self._closed:
            return
        self._closed = True
        self._wakeup.put(False)
        self._writer.close()
        if self._writing.acquire(timeout=LAST_WRITE_TIMEOUT):
            try:
                while (batch := self._gather()) and self._write(batch, LAST_WRITE_TIMEOUT):
                    pass
            finally:
                self._writing.release()

    def _run(self) -> None:
        while self._wakeup.get():
            time.sleep(GATHER_SECONDS)
            with self._writing:
                while batch := self._gather():
                    while not self._write(batch) and not self._closed:
                        time.sleep(WRITE_TIMEOUT)

    def _gather(self) -> dict[ObjectId, EventNote]:
        """Take a batch of notes from the queue. Each note has its `_id`, so that a note sent twice is written once."""
        batch: dict[ObjectId, EventNote] = {}
        with contextlib.suppress(Empty):
            while len(batch) < WRITE_BATCH:
                note = self._notes.get_nowait()
                batch[ObjectId()] = note
        return batch

    def _write(self, batch: Mapping[ObjectId, EventNote], timeout: float = WRITE_TIMEOUT) -> bool:
        """Write a batch. Return False if a retry may help."""
        try:
            with pymongo.timeout(timeout):
                self._send(batch)
        except PyMongoError as error:
            if not self._failing:
                log(WARNING, "the history of locks cannot be written", error=type(error).__name__)
            self._failing = True
            return isinstance(error, OperationFailure) and not error.timeout  # a refused write is refused again
        except Exception:  # noqa: BLE001 - it is logged
            log_exception("a part of the history of locks was not written")
        else:
            if self._lost:
                log(WARNING, "a part of the history of locks was lost", events=self._lost)
            self._failing, self._lost = False, 0
        return True

    def _send(self, batch: Mapping[ObjectId, EventNote]) -> None:
        collection = self._events().with_options(write_concern=WriteConcern(w=1))
        if not self._ready:
            self.make()
            self._ready = True
        server_time = collection.database.client.admin.command("hello")["localTime"]
        now = clock.now()
        try:
            collection.insert_many([note.document(id_, now, server_time) for id_, note in batch.items()], ordered=False)
        except BulkWriteError as error:
            failures = (error.details or {}).get("writeErrors", [])
            if any(failure["code"] != _DUPLICATE for failure in failures):
                raise


def observe(store: MongoStore, settings: LockSettings) -> Observer | None:
    """Set up the history of a store, if the settings ask for one. Return the observer for its sessions."""
    if not settings.HISTORY:
        return None
    store.history = history = History(lambda: events_of(store), settings.HISTORY * 1_000_000)
    return history.observe


def _ms(seconds: float) -> Int64:
    return Int64(round(seconds * 1_000))


@register(Tags.database)
def check_history(
    *, app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None, **kwargs: Any
) -> list[CheckMessage]:
    """Check that the collection of the history is there, and may be written."""
    if has_wrong_settings():
        return []
    alias = get_settings().DATABASE
    if alias not in (databases or ()) or not isinstance(get_backend(alias), MongoBackend):
        return []
    store = mongo_store(alias)
    if store.history is None or not (problem := _problem(store)):
        return []
    return [
        warning(
            "W110",
            f"The history of the locks cannot be kept: {problem}.",
            f"Run manage.py migrate --database {alias} as a user who may create collections. Before that, drop a "
            "collection that is not capped. If a right is missing, grant find and insert on the collection.",
        )
    ]


def _problem(store: MongoStore) -> str:
    """Return the reason why the history cannot be kept, "" if it can.

    Another check reports a server that does not answer.
    """
    collection = events_of(store)
    try:
        if not layout.exists(store.collection):
            return ""  # `migrate` makes both, and the check of the locks says so
        if missing := missing_rights(collection, BELL_RIGHTS):
            return f"the user lacks {' and '.join(missing)} on the collection {collection.name}"
        if not layout.exists(collection) or layout.stays_open(collection) is None:
            return f"there is no capped collection {collection.name}"
    except PyMongoError:
        pass
    return ""
