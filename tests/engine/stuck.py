"""Documents that nobody can write to for a while, and clients that the server does not answer."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from pymongo.collection import Collection

from tests.support.failpoints import failpoint

Document = dict[str, Any]

#: What a session sends, and what of it can write.
WRITES = ("update", "findAndModify", "insert", "delete")
EVERYTHING = (*WRITES, "find", "aggregate", "getMore")


@contextlib.contextmanager
def stuck(collection: Collection[Document], key: str) -> Iterator[None]:
    """A transaction has written to the document of *key*, as the fence of `MongoLock.atomic` does, and does not end
    before the block does. Whoever writes to that document waits; its command has been parsed then."""
    client = collection.database.client
    with client.start_session() as session, session.start_transaction():
        assert collection.update_one({"_id": key}, {"$inc": {"fence": 1}}, session=session).matched_count == 1
        yield
        session.abort_transaction()


def running(collection: Collection[Document], **found: object) -> list[Document]:
    """What the server is doing now in *collection*, as far as its operations look like that."""
    match = {"ns": collection.full_name, **found}
    return list(collection.database.client.admin.aggregate([{"$currentOp": {}}, {"$match": match}]))


@contextlib.contextmanager
def cut_off(collection: Collection[Document], appname: str, commands: Sequence[str] = EVERYTHING) -> Iterator[None]:
    """The server carries out none of these *commands* for whoever has that *appname*. It hangs up if all are meant.
    Else it says that time is over, for those on *collection* only: so they still listen for bells."""
    how = {"closeConnection": True} if commands is EVERYTHING else {"errorCode": 50, "namespace": collection.full_name}
    data = {"failCommands": list(commands), "appName": appname, **how}
    with failpoint(collection.database.client, "failCommand", data):
        yield
