"""The bells: small capped collections beside the locks, by which one process tells another of a grant.

A session whose command grants the lock to a waiter of another process inserts a message for that waiter's session, once
the majority has the command. The other session listens with a cursor that waits at the end of one of the collections. A
change of a lock therefore costs the server nothing for the waiters of other locks, and neither does any other write.

A message may get lost, come late, or come twice. A message says that a session holds a lock, never for how long.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Generator, Iterable
from math import inf
from typing import Any, Final

import pymongo
from pymongo import CursorType, ReadPreference, WriteConcern
from pymongo.collection import Collection
from pymongo.errors import OperationFailure, PyMongoError
from pymongo.read_concern import ReadConcern

from .. import clock
from ..logs import WARNING, log
from ..rule.replies import Bell, read_bell
from .layout import LOOK_EVERY, make_capped, stays_open

Document = dict[str, Any]

#: The number of collections. Each message in its own collection wakes a listener.
COLLECTIONS: Final = 8
#: The size of each collection in bytes, enough for some hundred messages.
SIZE: Final = 65_536
#: How long the server keeps a read open while no message comes, in milliseconds. With a short `socketTimeoutMS`
#: or `timeoutMS`, this is half of that.
AWAIT_MS: Final = 1_000
#: The seconds for sending all messages of a command. Messages that take longer are dropped.
RING_TIMEOUT: Final = 0.5


class Bells:
    """The bells beside the collection of the *locks*."""

    def __init__(self, locks: Collection[Document]) -> None:
        names = [f"{locks.name}_bells_{number}" for number in range(COLLECTIONS)]
        #: These read concerns hold whatever the address says, as with the locks.
        options: dict[str, Any] = {"read_preference": ReadPreference.PRIMARY, "read_concern": ReadConcern("local")}
        options["codec_options"] = locks.codec_options
        self.collections = [locks.database.get_collection(name, **options) for name in names]
        self._unconfirmed = [each.with_options(write_concern=WriteConcern(w=0)) for each in self.collections]
        #: The collections that were certainly there, and when.
        self._seen: dict[int, float] = {}

    def ring(self, bells: Iterable[Bell]) -> None:
        """Send the messages, one command for each collection, and wait for no answer."""
        messages: dict[int, list[Document]] = {}
        for bell in bells:
            messages.setdefault(_number(bell.session), []).append(bell.message)
        with pymongo.timeout(RING_TIMEOUT):
            for number, those in messages.items():
                with contextlib.suppress(PyMongoError):
                    if self._is_there(number):
                        self._unconfirmed[number].insert_many(those, ordered=False)

    def _is_there(self, number: int, age: float = LOOK_EVERY) -> bool:
        """Return whether the collection was good at most *age* seconds ago.

        A message to a missing collection would make one without a size limit.
        """
        if clock.now() - self._seen.get(number, -inf) >= age:
            self._seen.pop(number, None)
            if not stays_open(self.collections[number]):
                return False
            self._seen[number] = clock.now()
        return True

    def listen(self, session: str) -> Generator[Bell | None, None, None]:
        """See Store.listen(). Raise PyMongoError."""
        number = _number(session)
        collection = self.collections[number]
        if number not in self._seen:
            make(collection)
            self._seen[number] = clock.now()
        looked, often = -inf, LOOK_EVERY / 2  # often enough that no release of this process has to look
        found = collection.find({"to": session}, cursor_type=CursorType.TAILABLE_AWAIT)
        with found.max_await_time_ms(self._await_ms()) as cursor:
            while (message := next(cursor, None)) is not None or cursor.alive:
                yield read_bell(message)
                if clock.now() - looked >= often:
                    looked = clock.now()
                    for other in range(COLLECTIONS):
                        self._is_there(other, often)
        self._seen.pop(number, None)  # the collection is gone or empty

    def _await_ms(self) -> int:
        """Return how long a read may stay open. Warn if the address makes that short."""
        options = self.collections[0].database.client.options
        limits = [limit for limit in (options.pool_options.socket_timeout, options.timeout) if limit is not None]
        if not limits or min(limits) * 500 >= AWAIT_MS:
            return AWAIT_MS
        log(WARNING, "short socketTimeoutMS or timeoutMS, more reads of the bells", reason=f"{min(limits)} s")
        return max(1, int(min(limits) * 500))


def make(collection: Collection[Document]) -> None:
    """Make the collection, if it is missing. Leave a message to nobody, because a cursor in an empty one ends at once.

    Raise OperationFailure if the rights do not allow to make the collection, or to ring. If somebody dropped the
    collection, a later message has made one that would grow for ever. Such a collection is converted.
    """
    if not stays_open(collection):
        try:
            make_capped(collection, SIZE)
        except OperationFailure:
            collection.database.command("convertToCapped", collection.name, size=SIZE)
    collection.with_options(write_concern=WriteConcern(w=1)).insert_one({"to": ""})


def _number(session: str) -> int:
    return zlib.crc32(session.encode()) % COLLECTIONS
