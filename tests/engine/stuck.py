"""Documents that nobody can write to for a while, and clients that the server does not answer."""

import contextlib
from collections.abc import Iterator
from typing import Any

from pymongo.collection import Collection

Document = dict[str, Any]

#: What a session sends, and what of it can write.
WRITES = ("update", "findAndModify", "insert", "delete")
EVERYTHING = (*WRITES, "find", "aggregate", "getMore")


@contextlib.contextmanager
def stuck(collection: Collection[Document], *keys: str) -> Iterator[None]:
    """A transaction has written to the documents of *keys*, as the fence of `MongoLock.atomic` does, and does not end
    before the block does. A write to such a document waits; its command has been parsed then."""
    client = collection.database.client
    with client.start_session() as session, session.start_transaction():
        found = collection.update_many({"_id": {"$in": keys}}, {"$inc": {"fence": 1}}, session=session)
        assert found.matched_count == len(keys)
        yield
        session.abort_transaction()


def running(collection: Collection[Document], **found: object) -> list[Document]:
    """What the server is doing now in *collection*, as far as its operations look like that."""
    match = {"ns": collection.full_name, **found}
    return list(collection.database.client.admin.aggregate([{"$currentOp": {}}, {"$match": match}]))
