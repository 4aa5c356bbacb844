"""Locks of documents, in the harness' words: `DocumentLock` on a collection, where each holder counts one up."""

import asyncio
import contextlib
import os
import random
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pymongo
from pymongo import MongoClient, ReadPreference, WriteConcern
from pymongo.collection import Collection
from pymongo.database import Database
from pymongo.errors import PyMongoError

from django_mongolock.documents import Batch, DocumentLock, HeldDocument, Hold, Swept
from django_mongolock.exceptions import DocumentRefused, LockBackendFailed

Document = dict[str, Any]

COLLECTION: Final = "documents"
#: The documents, each with a lock in it.
DOCUMENTS: Final = ("d0", "d1", "d2")
#: After how many seconds one is stale: some work here takes longer.
STALE: Final = 3.0
#: The field that every holder counts up.
FIELD: Final = "count"
#: From here on the server refuses the count.
REFUSED: Final = 1_000_000


def make_documents(database: Database[Document]) -> None:
    """Have the documents there, before the first one locks them."""
    collection = database.get_collection(COLLECTION, write_concern=WriteConcern("majority"))
    for name in DOCUMENTS:
        new = {"state": "done", "documentVersion": 0, FIELD: 0}
        collection.update_one({"_id": name}, {"$setOnInsert": new}, upsert=True)
    collection.create_index("state")
    database.command("collMod", COLLECTION, validator={FIELD: {"$lt": REFUSED}}, validationLevel="strict")


class Documents:
    """The documents as one process, and each that is forked from it, reaches them."""

    def __init__(self, database: str, options: Mapping[str, Any], timeout: float) -> None:
        self._database = database
        self._options = options
        self._timeout = timeout
        self._pid = 0
        self._client: MongoClient[Document]
        self._lock: DocumentLock[Document] = DocumentLock(
            self.collection,
            state="state",
            pending={"working": "failed"},
            final=["done"],
            stale_after=STALE,
            name="faults",
        )

    def collection(self) -> Collection[Document]:
        """The collection, by a client of this process."""
        if self._pid != os.getpid():
            self._client, self._pid = MongoClient(**self._options), os.getpid()
        return self._client[self._database][COLLECTION]

    def read(self, name: str) -> Document:
        """A document as whoever wants to lock it has read it. Raises LockBackendFailed."""
        with _our_errors(), pymongo.timeout(self._timeout):
            collection = self.collection().with_options(read_preference=ReadPreference.PRIMARY)
            return collection.find_one({"_id": name}) or {"_id": name, "documentVersion": 0}

    def hold(self, document: Document, owner: str | None) -> Hold[Document]:
        return self._lock.hold(document, owner=owner)

    def hold_in_batch(self, document: Document, owner: str | None) -> Batch[Document]:
        """Acquire a document as one of several. Raises why it was refused."""
        return _only(self._lock.acquire_many([document], owner=owner))

    async def ahold_in_batch(self, document: Document, owner: str | None) -> Batch[Document]:
        return _only(await self._lock.aacquire_many([document], owner=owner))

    def sweep(self) -> Swept:
        """Free what is stale."""
        return self._lock.clear_stale()


def _only(batch: Batch[Document]) -> Batch[Document]:
    for error in batch.refused.values():
        raise error
    return batch


@contextlib.contextmanager
def _our_errors() -> Iterator[None]:
    try:
        yield
    except PyMongoError as error:
        raise LockBackendFailed(type(error).__name__) from None


class OurDocument:
    """One acquisition of one document, by itself or as one of a batch. It is given back with a count that is one higher
    than it was found; sometimes after a count that the server refuses, or after another change."""

    def __init__(self, documents: Documents, name: str, owner: str | None) -> None:
        self._documents = documents
        self._name = name
        self._owner = owner
        self._block: Hold[Document] | Batch[Document]
        self._held: HeldDocument[Document]
        self._version = 0
        self._in_batch, self._tries, self._touches = (random.random() < chance for chance in (0.3, 0.3, 0.3))
        #: The count as it was found, and as it is given back.
        self.seen = 0
        self.wrote: int | None = None

    def acquire(self) -> None:
        document = self._documents.read(self._name)
        if self._in_batch:
            self._block = batch = self._documents.hold_in_batch(document, self._owner)
            self._keep(batch.held[0])
        else:
            self._block = hold = self._documents.hold(document, self._owner)
            self._keep(hold.acquire())

    async def aacquire(self) -> None:
        document = await asyncio.to_thread(self._documents.read, self._name)
        if self._in_batch:
            self._block = batch = await self._documents.ahold_in_batch(document, self._owner)
            self._keep(batch.held[0])
        else:
            self._block = hold = self._documents.hold(document, self._owner)
            self._keep(await hold.aacquire())

    def _keep(self, held: HeldDocument[Document]) -> None:
        self._held = held
        self._version, self.seen = held.version, int(held.document.get(FIELD, 0))

    @property
    def tokens(self) -> Mapping[str, int | None]:
        return {self._name: self._version}

    def look(self) -> tuple[bool, float]:
        left = self._held.remaining
        return left > 0, left

    def extend(self) -> None:
        self._held.renew()

    async def aextend(self) -> None:
        await self._held.arenew()

    def release(self) -> bool:
        """Write the count and let go. Raises DocumentLockLost, and what says that nobody knows."""
        if self._tries:
            with contextlib.suppress(DocumentRefused, LockBackendFailed):
                self._held.finish(changes={FIELD: REFUSED})
        if self._touches:
            with contextlib.suppress(LockBackendFailed):
                self._held.update({"touched": self._version})
        self._held.finish(changes={FIELD: self.seen + 1})
        self.wrote = self.seen + 1
        return True

    async def arelease(self) -> bool:
        if self._tries:
            with contextlib.suppress(DocumentRefused, LockBackendFailed):
                await self._held.afinish(changes={FIELD: REFUSED})
        if self._touches:
            with contextlib.suppress(LockBackendFailed):
                await self._held.aupdate({"touched": self._version})
        await self._held.afinish(changes={FIELD: self.seen + 1})
        self.wrote = self.seen + 1
        return True

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the block, as `with` does."""
        self._block.__exit__(type(error) if error else None, error, None)
