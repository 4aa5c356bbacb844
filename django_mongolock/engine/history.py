"""What has happened to locks: events, kept in a collection of a fixed size, in which new ones push out the oldest.

Nothing here may hold a lock up. The process that holds a lock notes in its memory what happens to it; a thread in the
background writes the notes, a second's worth at a time. A note that cannot be written is lost: the history is for
people who look back, and no lock depends on it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final

import pymongo
from bson import Int64, ObjectId
from pymongo import CursorType, IndexModel, WriteConcern
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import BulkWriteError, OperationFailure, PyMongoError

from . import clock
from .logs import WARNING, log, log_exception
from .session.worker_threads import WorkerThreads

if TYPE_CHECKING:
    from .grant import Grant
    from .store import MongoStore

Document = dict[str, Any]

#: How many events wait in memory at most; later ones are lost.
MAX_NOTES: Final = 10_000
#: How many are written at once, and for how many seconds they are gathered.
WRITE_BATCH: Final = 1_000
GATHER_SECONDS: Final = 1.0
#: Seconds that one write may take, and that a process which ends may spend on its last one.
WRITE_TIMEOUT: Final = 5.0
LAST_WRITE_TIMEOUT: Final = 1.0

INDEXES: Final = (
    IndexModel([("key", 1), ("at", -1), ("_id", -1)], name="mongolock_key"),
    IndexModel([("at", -1), ("_id", -1)], name="mongolock_at"),
)
#: What an event takes over from the entry of a holder.
FACTS: Final = ("mode", "owner", "label", "place", "user", "host", "pid", "thread")
_EXISTS, _UNAUTHORIZED, _DUPLICATE = 48, 13, 11000


class Happened(StrEnum):
    """What an event tells. The first three come from the process that holds the lock, `DEADLOCK` from the one that gave
    up, the others from whoever did it."""

    GRANTED = "granted"
    RELEASED = "released"
    LOST = "lost"
    DEADLOCK = "deadlock"
    ASKED = "asked"
    FORCED = "forced"
    CLEARED = "cleared"


_REPORTED: Final = {"acquired": Happened.GRANTED, "released": Happened.RELEASED, "lost": Happened.LOST}


@dataclass(frozen=True, slots=True)
class Note:
    """An event before it is written. at: by the server's clock, if that is known; moment: by this machine's."""

    key: str
    what: Happened
    moment: float
    at: datetime | None
    entry: Mapping[str, Any]
    facts: Mapping[str, Any]

    def document(self, id_: ObjectId, now: float, server_time: datetime) -> Document:
        """The document of this event, at the time *now* here, which is *server_time* there."""
        at = self.at or server_time - timedelta(seconds=now - self.moment)
        facts = {name: self.entry.get(name) for name in FACTS} | dict(self.facts)
        known = {name: value for name, value in facts.items() if value is not None and value != ""}
        return {"_id": id_, "at": at, "key": self.key, "event": self.what.value, **known}


class History:
    """Writes what happens to locks. One per store, and so per process; no thread until something has happened."""

    def __init__(self, store: MongoStore, now: Callable[[], float] = clock.now) -> None:
        self._store = store
        self._now = now
        self._notes: SimpleQueue[Note] = SimpleQueue()
        self._wakeup: SimpleQueue[bool] = SimpleQueue()
        self._writer = WorkerThreads(1)
        self._writing = threading.Lock()
        self._started = self._closed = self._ready = self._failing = False
        self._lost = 0

    def observe(self, event: str, grant: Grant) -> None:
        """Note what a session tells of one of its grants: see `session.Observer`."""
        what = _REPORTED.get(event)
        if what is None and (event, grant.reason) == ("not_acquired", "deadlock"):
            what = Happened.DEADLOCK
        if what is None:
            return
        facts: Document = {"token": Int64(grant.token) if grant.token else None, "waited_ms": _ms(grant.waited)}
        at = grant.acquired_at
        if what in (Happened.RELEASED, Happened.LOST):
            held = grant.held_for
            facts["held_ms"] = _ms(held)
            # A loss is reported when it is found out: that is later than the end of the lease, or the force release.
            at = at + timedelta(seconds=held) if at and what is Happened.RELEASED else None
        if what is Happened.LOST:
            facts["reason"] = grant.reason
        if what is Happened.DEADLOCK:
            facts["reason"] = grant.held_by
        self.note(grant.key, what, grant.acquisition.entry, at=at, **facts)

    def note(
        self, key: str, what: Happened, entry: Mapping[str, Any], *, at: datetime | None = None, **facts: Any
    ) -> None:
        """Note what happened to *key*, or rather to the holder with that *entry*. Waits for nothing, raises nothing."""
        if self._closed or self._notes.qsize() >= MAX_NOTES:
            self._lost += 1
            return
        self._notes.put(Note(key, what, self._now(), at, entry, facts))
        if not self._wakeup.qsize():
            self._wakeup.put(True)
        if not self._started:
            self._started = self._writer.submit(self._run)

    def close(self) -> None:
        """Write what is left, within `LAST_WRITE_TIMEOUT` seconds or so."""
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

    def _gather(self) -> dict[ObjectId, Note]:
        """Some that are to be written. They have their names before they are sent: what is sent twice is there once."""
        batch: dict[ObjectId, Note] = {}
        with contextlib.suppress(Empty):
            while len(batch) < WRITE_BATCH:
                note = self._notes.get_nowait()
                batch[ObjectId()] = note
        return batch

    def _write(self, batch: Mapping[ObjectId, Note], timeout: float = WRITE_TIMEOUT) -> bool:
        """Write these; return whether that was worth no other try."""
        try:
            with pymongo.timeout(timeout):
                self._send(batch)
        except PyMongoError as error:
            if not self._failing:
                log(WARNING, "the history of locks cannot be written", error=type(error).__name__)
            self._failing = True
            return isinstance(error, OperationFailure) and not error.timeout  # refused: it would be so again
        except Exception:  # noqa: BLE001 - it is logged
            log_exception("a part of the history of locks was not written")
        else:
            if self._lost:
                log(WARNING, "a part of the history of locks was lost", events=self._lost)
            self._failing, self._lost = False, 0
        return True

    def _send(self, batch: Mapping[ObjectId, Note]) -> None:
        collection = events(self._store).with_options(write_concern=WriteConcern(w=1))
        if not self._ready:
            make(collection.database, collection.name, self._store.config.history)
            self._ready = True
        server_time = self._store.client.admin.command("hello")["localTime"]
        now = self._now()
        _insert(collection, [note.document(id_, now, server_time) for id_, note in batch.items()])


def _insert(collection: Collection[Document], documents: list[Document]) -> None:
    try:
        collection.insert_many(documents, ordered=False)
    except BulkWriteError as error:
        failures = (error.details or {}).get("writeErrors", [])
        if any(failure["code"] != _DUPLICATE for failure in failures):
            raise


def _ms(seconds: float) -> Int64:
    return Int64(round(seconds * 1_000))


def events(store: MongoStore) -> Collection[Document]:
    """The collection of the events, beside that of the locks."""
    return store.collection.database.get_collection(
        f"{store.config.collection}_history", codec_options=store.collection.codec_options
    )


def make(database: Database[Document], name: str, size: int, *, resize: bool = False) -> None:
    """Make the collection of *size* bytes, if it is not there; with *resize* give it that size if it is.

    Raises OperationFailure where it is not there and may not be made, or is there without a limit to its size: written
    to, that would grow for ever.
    """
    collection = database[name]
    try:
        database.create_collection(name, check_exists=False, capped=True, size=size)
    except OperationFailure as error:
        if error.code == _UNAUTHORIZED and not is_there(collection):
            raise
        if error.code not in (_EXISTS, _UNAUTHORIZED) or not is_bounded(collection):
            raise
        if resize:
            database.command("collMod", name, cappedSize=size)
    with contextlib.suppress(OperationFailure):  # no right to make them: whoever migrates has it
        collection.create_indexes(list(INDEXES))


def is_there(collection: Collection[Document]) -> bool:
    """Is there such a collection? Needs no right but one to something in it."""
    mine = {"name": collection.name}
    return bool(collection.database.list_collection_names(filter=mine, authorizedCollections=True))


def is_bounded(collection: Collection[Document]) -> bool:
    """Is it capped? A cursor that waits for more is refused where it is not; to ask so needs no right but find."""
    try:
        list(collection.find({"_id": None}, cursor_type=CursorType.TAILABLE).limit(1))
    except OperationFailure:
        return False
    return True


def read(
    store: MongoStore,
    query: Document,
    sort: Mapping[str, int],
    *,
    skip: int = 0,
    limit: int = 100,
    timeout: float = 5.0,
) -> list[Document]:
    """Events that *query* finds, in that order, each with the server's time in `now`. Raises LockBackendFailed."""
    with store.bounded(timeout):
        found = events(store).aggregate(
            [
                {"$match": query},
                {"$sort": dict(sort)},
                {"$skip": skip},
                {"$limit": limit},
                {"$addFields": {"now": "$$NOW"}},
            ]
        )
        return list(found)


def count(store: MongoStore, query: Document, limit: int, timeout: float = 5.0) -> int:
    """How many events *query* finds, at most *limit*. Raises LockBackendFailed."""
    with store.bounded(timeout):
        return events(store).count_documents(query, limit=limit)
