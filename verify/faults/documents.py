"""Locks of documents in the form of the harness: a `DocumentLock` on a collection. Each holder adds one to a count."""

import asyncio
import contextlib
import os
import random
from collections.abc import Coroutine, Iterator, Mapping
from functools import partial
from typing import Any, Final, TypeVar

import pymongo
from pymongo import MongoClient, ReadPreference, WriteConcern
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import PyMongoError

from django_mongolock.documents import Batch, DocumentLock, HeldDocument, Hold, Swept
from django_mongolock.exceptions import DocumentRefused, LockBackendFailed

T = TypeVar("T")
Document = dict[str, Any]

COLLECTION: Final = "documents"
#: The documents, each with a lock in it.
DOCUMENTS: Final = ("d0", "d1", "d2")
#: Seconds after which a document is stale. Some work here takes longer.
STALE: Final = 3.0
#: The field with the count.
FIELD: Final = "count"
#: The count from which the server refuses writes.
REFUSED: Final = 1_000_000


def make_documents(database: Database[Document]) -> None:
    """Create the documents before the first worker locks them."""
    collection = database.get_collection(COLLECTION, write_concern=WriteConcern("majority"))
    for name in DOCUMENTS:
        new = {"state": "done", "documentVersion": 0, FIELD: 0}
        collection.update_one({"_id": name}, {"$setOnInsert": new}, upsert=True)
    collection.create_index("state")
    database.command("collMod", COLLECTION, validator={FIELD: {"$lt": REFUSED}}, validationLevel="strict")


class Documents:
    """The documents from the view of one process, and of each process forked from it."""

    def __init__(self, database: str, options: Mapping[str, Any], timeout: float) -> None:
        self._database = database
        self._options = options
        self._timeout = timeout
        self._pid = 0
        self._client: MongoClient[Document]
        self.lock: DocumentLock[Document] = DocumentLock(
            self.collection,
            state="state",
            pending={"working": "failed"},
            final=["done"],
            stale_after=STALE,
            name="faults",
        )

    def collection(self) -> Collection[Document]:
        """Return the collection, by a client of this process."""
        if self._pid != os.getpid():
            self._client, self._pid = MongoClient(**self._options), os.getpid()
        return self._client[self._database][COLLECTION]

    def read(self, name: str) -> Document:
        """Read a document in order to lock it. Raises LockBackendFailed."""
        with _our_errors(), pymongo.timeout(self._timeout):
            collection = self.collection().with_options(read_preference=ReadPreference.PRIMARY)
            return collection.find_one({"_id": name}) or {"_id": name, "documentVersion": 0}

    def sweep(self) -> Swept:
        """Clear the stale locks."""
        return self.lock.clear_stale()


def at_once(steps: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never really waits."""
    try:
        steps.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("it waited")


@contextlib.contextmanager
def _our_errors() -> Iterator[None]:
    try:
        yield
    except PyMongoError as error:
        raise LockBackendFailed(type(error).__name__) from None


class OurDocument:
    """One acquisition of one document, by itself or as one of a batch.

    The release adds one to the count that was found. Sometimes it comes after a count that the server refuses, or after
    another change.
    """

    def __init__(self, documents: Documents, name: str, owner: str | None) -> None:
        self._documents = documents
        self._name = name
        self._owner = owner
        self._block: Hold[Document] | Batch[Document]
        self._held: HeldDocument[Document]
        self._version = 0
        self._in_batch, self._tries, self._touches = (random.random() < chance for chance in (0.3, 0.3, 0.3))
        #: The count as found, and as written.
        self.seen = 0
        self.wrote: int | None = None

    async def acquire(self, awaits: bool) -> None:
        """Acquire the lock. Raises the error of a refusal."""
        read = partial(self._documents.read, self._name)
        document = await asyncio.to_thread(read) if awaits else read()
        if self._in_batch:
            batch = await _call(self._documents.lock, "acquire_many", awaits, [document], owner=self._owner)
            for error in batch.refused.values():
                raise error
            self._block, self._held = batch, batch.held[0]
        else:
            self._block = self._documents.lock.hold(document, owner=self._owner)
            self._held = await _call(self._block, "acquire", awaits)
        self._version, self.seen = self._held.version, int(self._held.document.get(FIELD, 0))

    @property
    def tokens(self) -> Mapping[str, int | None]:
        return {self._name: self._version}

    def look(self) -> tuple[bool, float]:
        left = self._held.remaining
        return left > 0, left

    async def extend(self, awaits: bool) -> None:
        await _call(self._held, "renew", awaits)

    async def release(self, awaits: bool) -> bool:
        """Write the count and release the lock. Raises DocumentLockLost, or the error for an unknown outcome."""
        if self._tries:
            with contextlib.suppress(DocumentRefused, LockBackendFailed):
                await _call(self._held, "finish", awaits, changes={FIELD: REFUSED})
        if self._touches:
            with contextlib.suppress(LockBackendFailed):
                await _call(self._held, "update", awaits, {"touched": self._version})
        await _call(self._held, "finish", awaits, changes={FIELD: self.seen + 1})
        self.wrote = self.seen + 1
        return True

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the block, as `with` does."""
        self._block.__exit__(type(error) if error else None, error, None)


async def _call(target: Any, name: str, awaits: bool, *arguments: Any, **options: Any) -> Any:
    """Call a method, or await its twin."""
    if awaits:
        return await getattr(target, f"a{name}")(*arguments, **options)
    return getattr(target, name)(*arguments, **options)
