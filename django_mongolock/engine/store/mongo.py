"""The store of locks in MongoDB, by PyMongo: send one step, read one lock, renew many. All calls block.

Whatever the client's URI says, every command goes to the primary, and every command that a caller waits for has a time
limit. The majority has confirmed all data that is written or read. Except a release without a waiter (`UNNOTICED`),
reads of the latest state (`latest`), and the bells. A store knows no lock object.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import pymongo
from bson.codec_options import CodecOptions, DatetimeConversion
from pymongo import MongoClient, ReadPreference, WriteConcern
from pymongo.collection import Collection
from pymongo.errors import ConfigurationError, InvalidName, InvalidURI, OperationFailure, PyMongoError, WriteError
from pymongo.read_concern import ReadConcern

from ...exceptions import LockBackendFailed, LockDocumentDamaged
from ..rule.deadlock import Cycle, chain_pipeline, cycle_of
from ..rule.document import LAST_TOKEN, Limits, Step, find_damage
from ..rule.expressions import IS_WHOLE
from ..rule.pipeline import pipeline
from ..rule.replies import (
    BELL_MESSAGES,
    REPLY,
    REPLY_TAKEN,
    REPLY_TO_OWNER,
    Bell,
    Found,
    Reply,
    read_bells,
    read_found,
    read_reply,
    read_taken,
)
from ..rule.short_forms import IS_FREE, IS_UNCONTENDED, RELEASE_UNCONTENDED, TAKE_FREE
from .base import Notes, is_heard_here
from .bells import Bells
from .election import CLOCK, CLUSTER_TIME, ClockEncoder
from .errors import bare, forget_frames, is_refusal, translate
from .layout import IndexKeeper

Document = dict[str, Any]

#: A release without a waiter waits for nothing. If a failover undoes it, the session repeats it (see `releases`).
UNNOTICED: Final = WriteConcern(w=1, j=False)
#: The majority, with the journal, even if the replica set is configured to confirm by memory alone.
MAJORITY: Final = WriteConcern(w="majority", j=True)

#: The most connections of this client, unless the project sets `maxPoolSize` in OPTIONS or in the URI. A session keeps
#: some of them free for the renewals: see `SessionCore`.
MAX_POOL_SIZE: Final = 160
#: The findings of a renewal if there was no document. The token is so large that no later grant is found either.
GONE: Final = Found(LAST_TOKEN, {}, {})
#: The driver closes a connection that was not used for this time. A process has more than one only while it waits, or
#: while several of its threads take locks.
MAX_IDLE_MS = 60_000


@dataclass(frozen=True)
class StoreConfig:
    """The collection, and how to reach it. The arguments of MongoClient in `client` may include a password."""

    client: Mapping[str, Any] = field(repr=False)
    database: str
    collection: str = "mongolock_locks"
    limits: Limits = Limits()  # noqa: RUF009 - it is frozen


class MongoStore:
    """The lock documents of one collection. There is one store per process. The client is made on first use.

    The store has a client of its own, so that an application with an exhausted pool cannot stop the renewals.
    """

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self._clock = ClockEncoder()
        # See Store.
        self.limits = config.limits
        self.sent_to = self._clock.sent_to
        self.primary = self._clock.primary
        self._opening = threading.Lock()
        self.hearers: dict[str, Callable[[Bell], object]] = {}
        #: The writer of the history of the locks. None if the history is off.
        self.history: Notes | None = None
        self.indexes = IndexKeeper()

    @cached_property
    def client(self) -> MongoClient[Document]:
        try:
            # No variable here holds the settings, because error reports show the local variables of each frame.
            client: MongoClient[Document] = MongoClient(**self._client_options())
        except (ConfigurationError, InvalidURI, ValueError, TypeError, OSError) as error:
            # The text of a URI error may quote the URI.
            problem = f"the connection settings are wrong ({type(error).__name__})"
            cure = "look at HOST, PORT, USER, PASSWORD and OPTIONS"
            raise LockBackendFailed(f"{problem}: {cure}", passing=False) from None
        self._clock.client = client
        return client

    def _client_options(self) -> Document:
        options: Document = {"appname": "django_mongolock", "serverSelectionTimeoutMS": 10_000}
        options |= {"maxIdleTimeMS": MAX_IDLE_MS, **self.config.client}
        # `retryWrites` is for `release_uncontended`, because the protocol does not repeat that. The protocol repeats
        # steps, because they are idempotent. The driver does not, because steps are plain commands.
        options |= {"server_selector": self._clock.select, "retryWrites": True, "tz_aware": True}
        return options | {"maxPoolSize": self.connections}

    @property
    def connections(self) -> int:
        """See Store. As in PyMongo, an option of the client overrides the URI. No name is resolved here."""
        options = {name.lower(): value for name, value in self.config.client.items()}
        in_uri = re.search(r"[?&]maxPoolSize=(\d+)", str(options.get("host", "")), re.IGNORECASE)
        found = options.get("maxpoolsize", MAX_POOL_SIZE if in_uri is None else in_uri[1])
        return int(found or 0)

    @cached_property
    def collection(self) -> Collection[Document]:
        """The collection, with the read and write concerns that a lock needs."""
        with self._opening:
            # A date outside of Python's range comes as another type, and is found as damage. Invalid text comes with
            # replacements. Both are no errors, because one such document must not cost the others their renewal.
            options: CodecOptions[Document] = CodecOptions(
                tz_aware=True,
                type_registry=self._clock.registry(),
                datetime_conversion=DatetimeConversion.DATETIME_AUTO,
                unicode_decode_error_handler="replace",
            )
            try:
                database = self.client.get_database(self.config.database, options)
            except InvalidName:
                raise LockBackendFailed(
                    "the database has no name, or a wrong one: look at NAME", passing=False
                ) from None
            return database.get_collection(
                self.config.collection,
                read_preference=ReadPreference.PRIMARY,
                write_concern=MAJORITY,
                read_concern=ReadConcern("majority"),
            )

    @property
    def latest(self) -> Collection[Document]:
        """The collection for reads of the latest state, even if the majority has not confirmed it yet."""
        return self.collection.with_options(read_concern=ReadConcern("local"))

    @contextlib.contextmanager
    def bounded(self, timeout: float, key: str | None = None) -> Iterator[None]:
        """Limit the commands inside to *timeout* seconds, and raise the driver's errors as LockBackendFailed.

        - key: only key of the commands, if there is one. If its document explains the error, LockDocumentDamaged is
          raised.
        """
        try:
            with pymongo.timeout(max(0.001, timeout)):  # 0 would be no limit
                yield
        except PyMongoError as error:
            raise self._problem(error, key, timeout) from bare(error)

    def apply(self, key: str, step: Step, timeout: float) -> Reply:
        """See Store.apply(). The driver sends the step once."""
        where = {"_id": {"$eq": key}} | ({"holders.grant": {"$eq": step.given}} if step.given else {})
        fields = REPLY if step.owner is None else REPLY_TO_OWNER
        with self.bounded(timeout, key):
            found = self._find_and_modify(
                key, step, query=where, update=pipeline(step), fields=fields, upsert=step.upserts
            )
        reply = read_reply(key, found)
        self.ring(reply.bells)
        if self._is_puzzling(step, reply):
            self.diagnose(key, timeout)
        return reply

    def take_free(self, key: str, step: Step, timeout: float) -> Reply | None:
        """See Store.take_free()."""
        where = {"_id": {"$eq": key}, "tombstones.grant": {"$ne": step.ask}, **IS_FREE}
        with self.bounded(timeout, key):
            try:
                found = self._find_and_modify(key, step, query=where, update=TAKE_FREE, fields=REPLY_TAKEN, upsert=True)
            except OperationFailure as error:
                if error.timeout:
                    raise
                forget_frames(error)
                return None  # not free (a duplicate key), refused, or damaged. The whole rule finds out.
        return read_taken(key, found) if found and "mine" in found else None

    def _find_and_modify(self, key: str, step: Step, **command: Any) -> Document | None:
        """Send *command* with the common fields. Return its `fields` of the document after the change."""
        collection = self.collection
        command = {
            "findAndModify": self.config.collection,
            "let": step.arguments(self.limits, CLOCK, CLUSTER_TIME),
            "new": True,
            "writeConcern": MAJORITY.document,
            **command,
        }
        answer = collection.database.command(command, codec_options=collection.codec_options)
        if not answer.get("lastErrorObject", {}).get("updatedExisting"):
            self.indexes.look_after(collection)
        if failure := answer.get("writeConcernError"):
            raise LockBackendFailed(
                f"the majority of the replica set did not confirm in time (code {failure.get('code')})", key
            )
        found: Document | None = answer["value"]
        return found

    def _is_puzzling(self, step: Step, reply: Reply) -> bool:
        """Return whether only a damaged document explains the answer.

        The rule leaves a damaged document as it is, and the server reports no error. If the answer is one that the rule
        never gives, the document needs a closer look. There are four such answers:

        - A holder that was to be renewed has the number of another command.
        - A former grant is still there.
        - A grant is refused or queued, although no other holder has any time left.
        - A grant is not queued, although there is room.
        """
        if step.renew:
            return reply.held and reply.beat != step.beat
        if step.add is None or reply.held or not reply.found:
            return False
        if reply.former is not None and reply.former.grant in step.remove:
            return True
        if step.trial or reply.place is not None:
            return reply.first_end is None or reply.first_end <= 0
        return reply.waiting < self.limits.waiters

    def release_uncontended(self, keys: Sequence[str], grants: Sequence[str], timeout: float) -> set[str]:
        """See Store.release_uncontended()."""
        collection = self.collection.with_options(write_concern=UNNOTICED)
        where = {"_id": _one_of(keys), "holders.grant": _one_of(grants)}
        # The driver repeats an update of one document, for instance after an election.
        update = collection.update_one if len(keys) == 1 else collection.update_many
        with self.bounded(timeout, keys[0] if len(keys) == 1 else None):
            try:
                if update({**where, **IS_UNCONTENDED}, RELEASE_UNCONTENDED).matched_count == len(keys):
                    return set()
            except WriteError as error:
                if error.timeout or len(keys) > 1:
                    raise  # in the other cases the document is damaged, and the whole rule finds out
            return set(keys) if len(keys) == 1 else {each["_id"] for each in self.latest.find(where, {"_id": 1})}

    def read(self, key: str, grant: str, timeout: float, owner: str | None = None) -> Reply:
        """See Store.read()."""
        asked: Document = {"ask": grant} if owner is None else {"ask": grant, "add": {"owner": owner}}
        fields = REPLY if owner is None else REPLY_TO_OWNER
        with self.bounded(timeout, key):
            answer = self.collection.find_one({"_id": {"$eq": key}}, fields, let={"c": {"$literal": asked}})
        return read_reply(key, answer)

    def renew(self, keys: Sequence[str], step: Step, timeout: float) -> dict[str, Found]:
        """See Store.renew(). Send one update, then one read.

        If documents are gone, another update makes them again. Documents that were there after all are read again.
        """
        grants = step.renew or step.remove
        where = {
            "_id": {"$in": list(keys)},
            "$or": [{"holders.grant": {"$in": grants}}, {"waiters.grant": {"$in": grants}}],
            **{name: {"$type": "array"} for name in ("holders", "waiters", "tombstones")},
        }
        entry = {"grant": 1, "beat": 1, "release_requested_by": 1}
        fields = {"holders": {**entry, "token": 1}, "waiters": entry, "token": 1, "granted": BELL_MESSAGES}
        with self.bounded(timeout):
            if grants or not keys:  # an empty command asks whether the primary carries out updates
                let = step.arguments(self.limits, CLOCK, CLUSTER_TIME)
                self.collection.update_many(where, pipeline(step), let=let)
            found = self._find(keys, fields)
            if step.renew and (gone := set(keys) - found.keys()):
                made = self._make_again(gone)
                found |= {**self._find(gone, fields), **dict.fromkeys(made, GONE)}
        return found

    def _find(self, keys: Iterable[str], fields: Document) -> dict[str, Found]:
        """Return the content of the documents of *keys*, as the majority has them.

        Ring for waiters that got a grant.
        """
        ids = list(keys)
        found = list(self.collection.find({"_id": {"$in": ids}}, fields, batch_size=len(ids) + 1))
        self.ring(bell for document in found for bell in read_bells(document))
        return {document["_id"]: read_found(document) for document in found}

    def _make_again(self, keys: Iterable[str]) -> list[str]:
        """Make the missing documents of *keys*, as after a drop of the collection, and return their keys.

        A primary that was left behind may lack a document as well, but cannot make one. If a document had to be made,
        it was gone, and its holders have lost their locks.
        """
        step = Step(remove=("",), tombstone_ttl=1)  # the way to an empty document within the rule
        made = [pymongo.UpdateOne({"_id": {"$eq": key}}, pipeline(step), upsert=True) for key in keys]
        let = step.arguments(self.limits, CLOCK, CLUSTER_TIME)
        return list((self.collection.bulk_write(made, let=let, ordered=False).upserted_ids or {}).values())

    def deadlock(self, key: str, grant: str, timeout: float) -> Cycle | None:
        """See Store.deadlock(). Search twice, because waits that were read one after another need not be a cycle."""
        if (cycle := self._find_cycle(key, grant, timeout)) and (again := self._find_cycle(key, grant, timeout)):
            return again if again.grants == cycle.grants else None
        return None

    def _find_cycle(self, key: str, grant: str, timeout: float) -> Cycle | None:
        with self.bounded(timeout):
            found = list(self.collection.aggregate(chain_pipeline(key, self.config.collection)))
        return cycle_of([found[0], *found[0]["chain"]], grant, found[0]["now"]) if found else None

    @cached_property
    def bells(self) -> Bells:
        """The bells beside the collection."""
        return Bells(self.collection)

    def ring(self, bells: Iterable[Bell]) -> None:
        """See Store.ring()."""
        if others := [bell for bell in bells if not is_heard_here(self, bell)]:
            self.bells.ring(others)

    def listen(self, session: str) -> Generator[Bell | None, None, None]:
        """See Store.listen(). Raise PyMongoError."""
        return self.bells.listen(session)

    def ring_for(self, keys: Sequence[str], timeout: float = 5.0) -> None:
        """Ring for the grants of the last command on each of the keys."""
        with contextlib.suppress(PyMongoError), pymongo.timeout(timeout):
            for document in self.collection.find({"_id": {"$in": list(keys)}}, REPLY, let={"c": {"ask": ""}}):
                self.ring(read_bells(document))

    def diagnose(self, key: str, timeout: float = 5.0) -> None:
        """Raise LockDocumentDamaged if the document of *key* can be read and cannot be used."""
        try:
            with pymongo.timeout(timeout):
                seen = self.collection.find_one({"_id": {"$eq": key}}, {"document": "$$ROOT", "whole": IS_WHOLE})
        except PyMongoError:
            return
        if seen is not None and (damage := find_damage(seen["document"])):
            raise LockDocumentDamaged(key, damage)
        if seen is not None and not seen["whole"]:  # some types look like others to the driver
            raise LockDocumentDamaged(key, "one of its fields has another type than this package writes")

    def close(self) -> None:
        """Write the rest of the history, and close the client, if there is one."""
        if self.history is not None:
            self.history.close()
        if "client" in self.__dict__:
            with contextlib.suppress(PyMongoError), pymongo.timeout(1.0):  # closing sends a command
                self.client.close()

    def _problem(self, error: PyMongoError, key: str | None, timeout: float) -> LockBackendFailed | LockDocumentDamaged:
        if key is not None and is_refusal(error):
            # An expression met a value of a wrong type. The document may be damaged.
            try:
                self.diagnose(key, timeout)
            except LockDocumentDamaged as damage:
                return damage
        return translate(error, timeout, key, client=self.client)


def _one_of(values: Sequence[str]) -> Document:
    return {"$eq": values[0]} if len(values) == 1 else {"$in": list(values)}
