"""Where the engine meets PyMongo: send one step, read one lock, renew many. Blocking; knows no lock object.

Every command is bounded, goes to the primary, and is acknowledged by the majority, whatever the client's URI says.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Protocol

import pymongo
from bson.codec_options import CodecOptions, DatetimeConversion, TypeEncoder, TypeRegistry
from pymongo import MongoClient, ReadPreference, WriteConcern
from pymongo.change_stream import CollectionChangeStream
from pymongo.collection import Collection
from pymongo.common import MAX_POOL_SIZE
from pymongo.errors import ConfigurationError, InvalidOperation, InvalidURI, OperationFailure, PyMongoError, WriteError
from pymongo.read_concern import ReadConcern
from pymongo.server_description import ServerDescription

from ..exceptions import LockBackendFailed, LockDocumentDamaged
from .deadlock import Cycle, chain_pipeline, cycle_of, read_chain
from .document import Reply, find_damage, read_reply, read_taken, tidy_fact
from .fast_path import RELEASE_UNCONTENDED, REPLY_TAKEN, TAKE_FREE, is_free, is_uncontended
from .history import History
from .rule import IS_WHOLE, REPLY, REPLY_TO_OWNER, Limits, Step

Document = dict[str, Any]

#: A release need not wait for the majority: if a failover undoes it, the session makes it again (see `releases`). It
#: waits for the journal, because only then do a change stream and a majority read show the grant to the next holder.
RELEASE_CONCERN = WriteConcern(w=1, j=True)
#: Where nobody waits, nobody has to be shown anything.
UNNOTICED = WriteConcern(w=1, j=False)
#: With the journal, also where the replica set is set to confirm by memory alone.
MAJORITY = WriteConcern(w="majority", j=True)

#: How long the server keeps a read of the change stream open when there is nothing to tell, in milliseconds.
STREAM_AWAIT_MS = 5_000

#: The change stream keeps a connection busy all the time, and each command that waits for one delays the renewals.
#: So however few connections the project allows its own client, in OPTIONS or in the URI, ours may open more.
MIN_POOL_LIMIT: Final = 50

#: A duplicate key from two upserts that raced (the server repeats them itself, but need not), a limit on time.
_PASSING = {11000, 262}
_UNAUTHORIZED = 13
_AUTHENTICATION_FAILED = 18
_ATLAS_ERROR = 8000
_REFUSALS = {
    _UNAUTHORIZED: "the user of this connection may not do this: it needs find, insert and update on the collection",
    _AUTHENTICATION_FAILED: "authentication failed: check user, password and authSource",
    _ATLAS_ERROR: "authentication failed or not allowed on Atlas: check user, password and roles",
}


class _Clock:
    """Stands in a command for the clock that is going to evaluate it; filled in when the command is encoded."""


class _ClusterTime:
    """Stands in a command for the cluster time, where the server has one; filled in when the command is encoded."""


CLOCK = _Clock()
CLUSTER_TIME = _ClusterTime()


def arguments(step: Step, limits: Limits) -> Document:
    """The ``let`` of a command."""
    return step.arguments(limits, CLOCK, CLUSTER_TIME)


class _ClockEncoder(TypeEncoder):
    """Names the primary that a command goes to, at the moment when it is encoded for that primary.

    The name is the election that made it primary. It is the same for every client (host names are not: a replica
    set may have several horizons), and another one after every failover, which is when clocks change. The driver
    selects a server, then encodes, in one thread, and does both again for a retry; so what `select` saw last in
    this thread is where the command goes.
    """

    python_type = _Clock

    def __init__(self) -> None:
        self._seen = threading.local()
        self.client: MongoClient[Document] | None = None

    def select(self, servers: Sequence[ServerDescription]) -> Sequence[ServerDescription]:
        """The client's `server_selector`: changes nothing, remembers the choice."""
        self._seen.server = servers[0] if len(servers) == 1 else None
        return servers

    def server(self) -> ServerDescription | None:
        """Where this thread's command goes to."""
        server: ServerDescription | None = getattr(self._seen, "server", None)
        if (server is None or server.election_id is None) and self.client is not None:
            # A single server without discovery: no selection is made, and its clock is the only one.
            known = list(self.client.topology_description.server_descriptions().values())
            return known[0] if len(known) == 1 else server
        return server

    def transform_python(self, value: object) -> str:
        server = self.server()
        return str((server and server.election_id) or "")

    def sent_to(self) -> str:
        """The name of the primary that this thread's last command went to; empty if the server tells of none."""
        return self.transform_python(None)

    def primary(self) -> str:
        """The name of today's primary; empty if none is known."""
        if self.client is None:
            return ""
        servers = self.client.topology_description.server_descriptions().values()
        return next((str(server.election_id) for server in servers if server.is_writable and server.election_id), "")


class _ClusterTimeEncoder(TypeEncoder):
    """Asks for the cluster time of the server that a command goes to. A standalone server has none."""

    python_type = _ClusterTime

    def __init__(self, clock: _ClockEncoder) -> None:
        self._clock = clock

    def transform_python(self, value: object) -> object:
        server = self._clock.server()
        return None if server is not None and server.server_type_name == "Standalone" else "$$CLUSTER_TIME"


@dataclass(frozen=True)
class StoreConfig:
    """Which collection, and how to reach it. `client` are the arguments of MongoClient; they may hold a password.
    history: how many bytes the history of the locks may take; 0: there is none."""

    client: Mapping[str, Any] = field(repr=False)
    database: str
    collection: str = "mongolock_locks"
    limits: Limits = Limits()  # noqa: RUF009 - it is frozen
    history: int = 0


class Stream(Protocol):
    """The changes that grant something to one session, as MongoDB tells them."""

    @property
    def alive(self) -> bool:
        """Will it ever tell of another?"""

    def try_next(self) -> Mapping[str, Any] | None:
        """The next change; None if there is none within about a second."""


class Store(Protocol):
    """What a session needs of a place that keeps lock documents. Commands are bounded by *timeout*, in seconds."""

    def apply(self, key: str, step: Step, timeout: float) -> Reply:
        """Apply *step* to the document of *key*, durably, and tell how its grant stands then.

        Raises LockBackendFailed, after which the step may have taken effect or may still do so, and
        LockDocumentDamaged, after which it has not.
        """

    def take_free(self, key: str, step: Step, timeout: float) -> Reply | None:
        """Apply *step*, which only adds, if nobody holds the key or waits for it; None if it did nothing."""

    def release(self, key: str, step: Step, timeout: float) -> bool:
        """Remove the grants of *step*; return whether one was there."""

    def release_uncontended(self, key: str, grant: str, timeout: float) -> bool:
        """Remove *grant*, which has no minimum hold, if it is the only holder and nobody waits; was that so?"""

    def read(self, key: str, grant: str, timeout: float, owner: str | None = None) -> Reply:
        """Tell how *grant* stands, and what *owner* has there besides."""

    def renew(self, keys: Sequence[str], step: Step, timeout: float) -> dict[str, Found]:
        """Renew the grants of *step*, which are in the documents of *keys*; return what was found under each key."""

    def deadlock(self, key: str, grant: str, timeout: float) -> Cycle | None:
        """The cycle of waits that the waiter *grant* of *key* is part of."""

    def watch(self, session: str) -> contextlib.AbstractContextManager[Stream]:
        """Open a stream of the grants that are given to *session*."""

    def sent_to(self) -> str:
        """Which primary this thread's last command went to: its name until the next election; empty if unknown."""

    def primary(self) -> str:
        """Which primary there is today; empty if none is known. Costs no command."""

    @property
    def limits(self) -> Limits:
        """What is the same for every command."""

    @property
    def is_journaled(self) -> bool:
        """Does what the majority has survive a crash of the majority? As far as it is known."""

    def close(self) -> None:
        """Disconnect."""


class MongoStore:
    """The lock documents of one collection. One per process; makes its client when it is first needed.

    The client is the store's own: an application that has used up its own pool must not stop the renewals.
    """

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self._clock = _ClockEncoder()
        self._opening = threading.Lock()
        #: Does what the majority has survive a crash of the majority? Found out when the change stream is opened.
        self.is_journaled = True
        #: Writes what happens to the locks; None if that is not wanted.
        self.history = History(self) if config.history else None

    @cached_property
    def client(self) -> MongoClient[Document]:
        try:
            # No variable here holds the settings: error reports show the variables of the functions in a traceback.
            client: MongoClient[Document] = MongoClient(**self._client_options())
        except (ConfigurationError, InvalidURI, ValueError, TypeError, OSError) as error:
            # The text of a URI error may quote the URI.
            raise LockBackendFailed(
                f"the connection settings are wrong ({type(error).__name__})", passing=False
            ) from None
        self._clock.client = client
        return client

    def _client_options(self) -> Document:
        options: Document = {"appname": "django_mongolock", "serverSelectionTimeoutMS": 10_000, **self.config.client}
        # Steps are idempotent by grant id and sent again by the protocol; a stored reply would only be older news,
        # and costs the server another write. Releases are not sent again by the protocol: see `release`.
        options |= {"server_selector": self._clock.select, "retryWrites": True, "tz_aware": True}
        if most := options.get("maxPoolSize", MAX_POOL_SIZE):  # 0 or None: as many as may be needed
            options["maxPoolSize"] = max(MIN_POOL_LIMIT, most)
        return options

    @cached_property
    def collection(self) -> Collection[Document]:
        """The collection, reading and writing as a lock must."""
        with self._opening:
            # A date that Python cannot hold comes as another type, which is damage, rather than as an error; a text
            # that is none comes with replacements. One such document must not cost the others their renewal.
            options: CodecOptions[Document] = CodecOptions(
                tz_aware=True,
                type_registry=TypeRegistry([self._clock, _ClusterTimeEncoder(self._clock)]),
                datetime_conversion=DatetimeConversion.DATETIME_AUTO,
                unicode_decode_error_handler="replace",
            )
            return self.client.get_database(self.config.database, options).get_collection(
                self.config.collection,
                codec_options=options,
                read_preference=ReadPreference.PRIMARY,
                write_concern=MAJORITY,
                read_concern=ReadConcern("majority"),
            )

    @property
    def latest(self) -> Collection[Document]:
        """The collection, reading what is there just now, even if the majority has not confirmed it yet."""
        return self.collection.with_options(read_concern=ReadConcern("local"))

    @contextlib.contextmanager
    def bounded(self, timeout: float, key: str | None = None) -> Iterator[None]:
        """Give the commands inside *timeout* seconds, and raise what goes wrong as LockBackendFailed, which quotes no
        command and no URI. key: the only key that they are about; then also LockDocumentDamaged, if it is damaged."""
        try:
            with pymongo.timeout(timeout):
                yield
        except PyMongoError as error:
            raise self._problem(error, key, timeout) from _bare(error)

    def apply(self, key: str, step: Step, timeout: float) -> Reply:
        """Apply *step* to the document of *key*, majority-committed, and tell how its grant stands then.

        Sent once: the caller may send it again, since steps are idempotent. Raises LockBackendFailed, after which
        the step may have taken effect or may still do so, and LockDocumentDamaged, after which it has not.
        """
        where = {"_id": {"$eq": key}} | ({"holders.grant": {"$eq": step.given}} if step.given else {})
        fields = REPLY if step.owner is None else REPLY_TO_OWNER
        try:
            found = self._find_and_modify(
                key, step, timeout, query=where, update=step.pipeline(), fields=fields, upsert=step.upserts
            )
        except PyMongoError as error:
            raise self._problem(error, key, timeout) from _bare(error)
        reply = read_reply(key, found)
        if self._is_puzzling(step, reply):
            self.diagnose(key, timeout)
        return reply

    def take_free(self, key: str, step: Step, timeout: float) -> Reply | None:
        """Apply *step*, which only adds, if nobody holds the key or waits for it; None if it did nothing.

        It has the same meaning as `apply`, and the same errors; the server has a fifth less to do.
        """
        where = {"_id": {"$eq": key}, **is_free(step.ask)}
        try:
            found = self._find_and_modify(key, step, timeout, query=where, update=TAKE_FREE, fields=REPLY_TAKEN)
        except OperationFailure as error:
            if error.timeout:
                raise self._problem(error, key, timeout) from _bare(error)
            return None  # refused, or damaged in a way that the filter does not see: the whole rule says how
        except PyMongoError as error:
            raise self._problem(error, key, timeout) from _bare(error)
        return None if found is None else read_taken(key, found)

    def _find_and_modify(self, key: str, step: Step, timeout: float, **command: Any) -> Document | None:
        """Send the rest of the *command*; return the document as it is then, as far as its `fields` show it."""
        collection = self.collection
        command = {
            "findAndModify": self.config.collection,
            "let": arguments(step, self.config.limits),
            "new": True,
            "writeConcern": MAJORITY.document,
            **command,
        }
        with pymongo.timeout(timeout):
            answer = collection.database.command(command, codec_options=collection.codec_options)
        if failure := answer.get("writeConcernError"):
            raise LockBackendFailed(
                f"the majority of the replica set did not confirm in time (code {failure.get('code')})", key
            )
        found: Document | None = answer["value"]
        return found

    def _is_puzzling(self, step: Step, reply: Reply) -> bool:
        """Can the answer only be explained by a document that the step left as it was?"""
        if not reply.found:
            return False
        if step.renew:
            return reply.held and reply.beat != step.beat
        if step.add is None or reply.held or reply.place is not None:
            return False
        if step.trial:
            return reply.first_end is None or reply.first_end <= 0
        return reply.waiting < self.config.limits.waiters

    def release(self, key: str, step: Step, timeout: float) -> bool:
        """Remove the grants of *step*; return whether one was there. The driver sends it again if need be."""
        collection = self.collection.with_options(write_concern=RELEASE_CONCERN)
        where = {"_id": {"$eq": key}, "holders.grant": {"$in": step.remove}}
        try:
            with pymongo.timeout(timeout):
                result = collection.update_one(where, step.pipeline(), let=arguments(step, self.config.limits))
        except PyMongoError as error:
            raise self._problem(error, key, timeout) from _bare(error)
        return result.matched_count == 1

    def release_uncontended(self, key: str, grant: str, timeout: float) -> bool:
        """Remove *grant* if it is the only holder and nobody waits; return whether that was so.

        Not for a grant with a minimum hold. Does not wait for the disk, so it takes a fraction of `release`.
        """
        collection = self.collection.with_options(write_concern=UNNOTICED)
        where = {"_id": {"$eq": key}, **is_uncontended(grant)}
        try:
            with pymongo.timeout(timeout):
                return collection.update_one(where, RELEASE_UNCONTENDED).matched_count == 1
        except WriteError as error:
            if error.timeout:
                raise self._problem(error, key, timeout) from _bare(error)
            return False  # a document that is damaged: leave it to the whole rule, which says how
        except PyMongoError as error:
            raise self._problem(error, key, timeout) from _bare(error)

    def read(self, key: str, grant: str, timeout: float, owner: str | None = None) -> Reply:
        """Tell how *grant* stands, by what is majority-committed, and what *owner* has there besides."""
        asked: Document = {"ask": grant} if owner is None else {"ask": grant, "add": {"owner": owner}}
        fields = REPLY if owner is None else REPLY_TO_OWNER
        try:
            with pymongo.timeout(timeout):
                answer = self.collection.find_one({"_id": {"$eq": key}}, fields, let={"c": {"$literal": asked}})
        except PyMongoError as error:
            raise self._problem(error, key, timeout) from _bare(error)
        return read_reply(key, answer)

    def renew(self, keys: Sequence[str], step: Step, timeout: float) -> dict[str, Found]:
        """Renew the grants of *step*, which are in the documents of *keys*: one update, then one read.

        Returns what was found under each key that has a document. A grant was renewed only if it carries the number
        of this step: then the update has been there, and the majority has it. Raises LockBackendFailed.
        """
        collection = self.collection
        where = {
            "_id": {"$in": list(keys)},
            "$or": [{"holders.grant": {"$in": step.renew}}, {"waiters.grant": {"$in": step.renew}}],
            **{name: {"$type": "array"} for name in ("holders", "waiters", "tombstones")},
        }
        entry = {"grant": 1, "beat": 1, "release_requested_by": 1}
        fields = {"holders": entry, "waiters": entry, "token": 1}
        try:
            with pymongo.timeout(timeout):
                collection.update_many(where, step.pipeline(), let=arguments(step, self.config.limits))
                found = list(collection.find({"_id": {"$in": list(keys)}}, fields, batch_size=len(keys) + 1))
        except PyMongoError as error:
            raise self._problem(error, None, timeout) from _bare(error)
        return {document["_id"]: read_found(document) for document in found}

    def deadlock(self, key: str, grant: str, timeout: float) -> Cycle | None:
        """The cycle of waits that the waiter *grant* is part of, seen twice: then it is none of the past."""
        seen: list[frozenset[str]] = []
        cycle = None
        for _ in range(2):
            try:
                with pymongo.timeout(timeout):
                    found = list(self.collection.aggregate(chain_pipeline(key, self.config.collection)))
            except PyMongoError as error:
                raise self._problem(error, None, timeout) from _bare(error)
            cycle = cycle_of(read_chain(found[0]), grant, found[0]["now"]) if found else None
            if cycle is None:
                return None
            seen.append(frozenset(wait.grant for wait in cycle.waits))
        return cycle if seen[0] == seen[1] else None

    @property
    def limits(self) -> Limits:
        """What is the same for every command."""
        return self.config.limits

    def sent_to(self) -> str:
        """Which primary this thread's last command went to."""
        return self._clock.sent_to()

    def primary(self) -> str:
        """Which primary there is today, as far as the driver's monitors know."""
        return self._clock.primary()

    def watch(self, session: str) -> CollectionChangeStream[Document]:
        """Open a change stream of the grants that are given to *session*. Raises PyMongoError."""
        mine = {"$regex": f"(^|;){session}\\."}
        pipeline: list[Document] = [
            {
                "$match": {
                    "$or": [
                        {"operationType": "update", "updateDescription.updatedFields.granted": mine},
                        {"operationType": "replace", "fullDocument.granted": mine},
                    ]
                }
            },
            {"$project": {"updateDescription.updatedFields.granted": 1, "fullDocument.granted": 1}},
        ]
        self.is_journaled = confirms_by_journal(self.client)
        return self.collection.watch(pipeline, max_await_time_ms=STREAM_AWAIT_MS)

    def diagnose(self, key: str, timeout: float = 5.0) -> None:
        """Raise LockDocumentDamaged if the document of *key* cannot be used, as far as it can be read."""
        try:
            with pymongo.timeout(timeout):
                seen = self.collection.find_one({"_id": {"$eq": key}}, {"document": "$$ROOT", "whole": IS_WHOLE})
        except PyMongoError:
            return
        if seen is not None and (damage := find_damage(seen["document"])):
            raise LockDocumentDamaged(key, damage)
        if seen is not None and not seen["whole"]:  # to the driver, some types look like others
            raise LockDocumentDamaged(key, "one of its fields has another type than we write")

    def close(self) -> None:
        """Write what the history has not yet, and close the client, if there is one."""
        if self.history is not None:
            self.history.close()
        if "client" in self.__dict__:
            with contextlib.suppress(PyMongoError), pymongo.timeout(1.0):  # it says good-bye to the server
                self.client.close()

    def _all_refuse_tls(self) -> bool:
        """Is it the TLS of every server that is wrong? Then trying again does not help."""
        servers = self.client.topology_description.server_descriptions().values()
        return all(tls_problem(server.error) is not None for server in servers)

    def _problem(self, error: PyMongoError, key: str | None, timeout: float) -> LockBackendFailed | LockDocumentDamaged:
        """Say in our own words what the driver met. Its words may hold the whole command, or a URI."""
        if isinstance(error, InvalidOperation):
            return LockBackendFailed("the session was closed", key, passing=False)
        if (problem := tls_problem(error)) is not None:
            return LockBackendFailed(problem, key, passing=not self._all_refuse_tls())
        if not isinstance(error, OperationFailure) or error.timeout:
            return LockBackendFailed(f"MongoDB did not answer within {timeout:.1f} s ({type(error).__name__})", key)
        if error.code in _REFUSALS:
            return LockBackendFailed(_REFUSALS[error.code], key, passing=False)
        if key is not None:
            # An expression that met a value of a type it cannot take: the document is not what it should be.
            try:
                self.diagnose(key, timeout)
            except LockDocumentDamaged as damage:
                return damage
        return LockBackendFailed(
            f"MongoDB refused the command (code {error.code}, {_code_name(error)})",
            key,
            passing=error.code in _PASSING or error.has_error_label("RetryableWriteError"),
        )


@dataclass(frozen=True, slots=True)
class Beat:
    """How a renewal found one grant: the number of the command that gave it its present lease, and who asks for its
    release."""

    number: int
    release_requested_by: str | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """What a renewal found under one key: the last token given, and the grants of everybody."""

    token: int
    holders: dict[str, Beat]
    waiters: dict[str, Beat]


def read_found(document: Document) -> Found:
    """Read what a renewal found: a document, or as much of one as there is."""
    token = document.get("token")
    return Found(token if isinstance(token, int) else 0, _beats(document, "holders"), _beats(document, "waiters"))


def _beats(document: Document, field: str) -> dict[str, Beat]:
    entries = document.get(field)
    beats: dict[str, Beat] = {}
    for entry in entries if isinstance(entries, list) else ():
        match entry:
            case {"grant": str(grant), "beat": int(number)} if type(grant) is str:
                name = entry.get("release_requested_by")
                beats[grant] = Beat(number, tidy_fact(name) if isinstance(name, str) else None)
            case {"grant": str(grant)} if type(grant) is str:  # bson.Code is a str, and cannot be hashed
                beats[grant] = Beat(0)
    return beats


def confirms_by_journal(client: MongoClient[Document]) -> bool:
    """Does the majority of the replica set have in its journals what it confirms? Yes, where we may not ask: that is
    what a replica set does by default."""
    try:
        config = client.admin.command("replSetGetConfig")["config"]
    except OperationFailure:
        return True
    return bool(config.get("writeConcernMajorityJournalDefault", True))


def tls_problem(error: Exception | None) -> str | None:
    """What is wrong with the TLS of a connection, if that is why it failed."""
    found = re.search(r"\[SSL: (\w+)\]", str(error))
    if found is None:
        return None
    return f"no TLS connection ({found[1]}): check tlsCAFile, and name and dates of the server's certificate"


def _code_name(error: OperationFailure) -> str:
    return str((error.details or {}).get("codeName", type(error).__name__))


def _bare(error: PyMongoError) -> BaseException:
    """The error as it may be shown: a refusal's text may quote the command, with everything in it."""
    if isinstance(error, OperationFailure):
        return OperationFailure(_code_name(error), error.code)
    return error
