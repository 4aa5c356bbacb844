"""The abilities of a server, the rights of this user, and the problems with them, as far as locks need them."""

from __future__ import annotations

import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC
from importlib.metadata import version
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

import pymongo
from django.core.checks import CheckMessage
from pymongo.collection import Collection
from pymongo.errors import OperationFailure, PyMongoError

from ..conf import NAME, error, get_settings, info, warning
from ..engine import clock
from ..engine.rule.document import Step
from ..engine.rule.pipeline import pipeline
from ..engine.session.session import off_main_thread
from ..engine.store import layout
from ..engine.store.election import CLOCK, CLUSTER_TIME
from ..engine.store.errors import is_direct, translate, whereabouts
from ..engine.store.layout import missing_indexes
from ..engine.store.mongo import MongoStore
from ..exceptions import LockBackendFailed
from .queries import ping
from .snapshot import Document

T = TypeVar("T")

#: The actions that locking needs on the collection of locks.
RIGHTS: Final = ("find", "insert", "update")
#: The actions that a process needs on the bells and the history, and on documents with a lock.
BELL_RIGHTS: Final = ("find", "insert")
DOCUMENT_RIGHTS: Final = ("find", "update")
#: The largest number of seconds from the election timeout to the first successful write. A failover took 10.3 to 16 s
#: in all, with the default election timeout of 10 s.
_ELECTION_OVERHEAD: Final = 10.0
#: Seconds for which the dashboard uses an answer again. The answer seldom changes.
CACHE_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The answers of a server.

    - problem: reason why the server cannot be used, in words without credentials.
    - address, version: address and the version of the primary.
    - members: number of members of the replica set.
    - ahead: least number of seconds by which the server's clock is ahead of this machine's, negative if it is
      behind. The duration of the command limits the precision.
    - failover: seconds that a failover may take. None without another member.
    - new: whether there is no collection of locks yet.
    - bells: reason why no bell wakes a waiter.
    - journaled: whether the majority confirms only journaled writes, as far as this user may ask.
    - direct: whether the address leads to one member only.
    - refused: reason why the server refuses the update of the locks.
    """

    problem: str = ""
    address: str = ""
    version: str = ""
    set_name: str = ""
    members: int = 0
    ahead: float = 0.0
    standalone: bool = False
    sharded: bool = False
    failover: float | None = None
    missing_rights: tuple[str, ...] = ()
    missing_indexes: tuple[str, ...] = ()
    new: bool = False
    bells: str = ""
    journaled: bool = True
    direct: bool = False
    refused: str = ""


_known: WeakKeyDictionary[MongoStore, tuple[float, ServerFacts]] = WeakKeyDictionary()


def known_server(store: MongoStore, timeout: float) -> ServerFacts:
    """Return an answer of `inspect_server` that is at most `CACHE_SECONDS` old. A problem is never cached."""
    now = clock.now()
    at, found = _known.get(store, (0.0, None))
    if found is None or found.problem or now - at > CACHE_SECONDS:
        found = inspect_server(store, timeout)
        _known[store] = now, found
    return found


@off_main_thread
def inspect_server(store: MongoStore, timeout: float = 5.0) -> ServerFacts:
    """Ask the server about itself. This changes nothing, and never raises."""
    try:
        ping(store, timeout)
        with pymongo.timeout(timeout):
            admin = store.client.admin
            asked = time.time()
            hello = admin.command("hello")
            answered = time.time()
            if not hello.get("isWritablePrimary", True):
                return ServerFacts(problem=whereabouts(store.client))
            status = _connection_status(store.client)
            sharded = hello.get("msg") == "isdbgrid"
            rights = _missing_rights(status, store.collection, RIGHTS)
            # Without a replica set, the default applies.
            config: Document = _if_allowed(lambda: admin.command("replSetGetConfig")["config"], {})
            election = config.get("settings", {}).get("electionTimeoutMillis", 10_000) / 1000
            if not status["authenticatedUsers"]:
                store.collection.find_one({}, {"_id": 1})  # fails if there is access control without a login
            return ServerFacts(
                address=":".join(map(str, store.client.address or ())),
                version=store.client.server_info()["version"],
                set_name=hello.get("setName", ""),
                members=len(hello.get("hosts", ())) + len(hello.get("passives", ())),
                direct=is_direct(store.client),
                refused="" if rights else _refused_update(store),
                ahead=_ahead(hello["localTime"].replace(tzinfo=UTC).timestamp(), asked, answered),
                standalone="setName" not in hello and not sharded,
                sharded=sharded,
                failover=election + _ELECTION_OVERHEAD if len(hello.get("hosts", ())) > 1 else None,
                missing_rights=rights,
                missing_indexes=()
                if "find" in rights
                else tuple(_if_allowed(lambda: missing_indexes(store.collection), [])),
                # Any existing collection has at least the index of its ids.
                new="find" not in rights and _if_allowed(lambda: not store.collection.index_information(), False),
                bells=_bells(store, status),
                journaled=bool(config.get("writeConcernMajorityJournalDefault", True)),
            )
    except LockBackendFailed as error:
        return ServerFacts(problem=error.problem)
    except PyMongoError as error:
        return ServerFacts(problem=translate(error, timeout, client=store.client).problem)


def _ahead(there: float, asked: float, answered: float) -> float:
    """Return by how much the clock *there* is outside the time from *asked* to *answered*."""
    return min(there - asked, 0.0) or max(there - answered, 0.0)


def _connection_status(client: pymongo.MongoClient[Any]) -> Mapping[str, Any]:
    """Return the rights of this user. If the server refuses to tell, return the rights without access control."""
    unknown = {"authenticatedUsers": (), "authenticatedUserPrivileges": ()}
    return _if_allowed(lambda: client.admin.command("connectionStatus", showPrivileges=True)["authInfo"], unknown)


def _refused_update(store: MongoStore) -> str:
    """Send the update of every lock operation for no document. Return the reason of a refusal."""
    step = Step()
    try:
        store.collection.find_one_and_update(
            {"_id": {"$in": []}}, pipeline(step), let=step.arguments(store.config.limits, CLOCK, CLUSTER_TIME)
        )
    except OperationFailure as error:
        return translate(error, 0.0).problem
    return ""


def _if_allowed(ask: Callable[[], T], otherwise: T) -> T:
    """Return the answer of the server, or *otherwise* if the server refuses to tell this user."""
    try:
        return ask()
    except OperationFailure:
        return otherwise


def _bells(store: MongoStore, status: Mapping[str, Any]) -> str:
    """Return the reason why no bell wakes a waiter, "" if bells work."""
    for collection in store.bells.collections:
        if missing := _missing_rights(status, collection, BELL_RIGHTS):
            return f"the user lacks {' and '.join(missing)} on the collection {collection.name}"
        if not layout.stays_open(collection):
            return f"there is no capped collection {collection.name}"
    return ""


def missing_rights(collection: Collection[Any], wanted: Sequence[str]) -> tuple[str, ...]:
    """Return which of these rights the user of this connection lacks on the collection. Raises PyMongoError."""
    return _missing_rights(_connection_status(collection.database.client), collection, wanted)


def _missing_rights(status: Mapping[str, Any], collection: Collection[Any], wanted: Sequence[str]) -> tuple[str, ...]:
    if not status["authenticatedUsers"]:
        return ()  # no access control
    granted: set[str] = set()
    for privilege in status["authenticatedUserPrivileges"]:
        resource = privilege["resource"]
        everywhere = resource.get("anyResource", False)
        named = resource.get("db") in ("", collection.database.name)
        here = named and resource.get("collection") in ("", collection.name)
        if everywhere or here:
            granted.update(privilege["actions"])
    return tuple(right for right in wanted if right not in granted)


#: Clocks that differ by more seconds than this are not synchronised.
FAR_APART: Final = 1.0
#: The oldest version of MongoDB with everything that the rule of the locks needs.
OLDEST: Final = (6, 0)


def server_rules(facts: ServerFacts, alias: str) -> Iterator[CheckMessage]:
    """Yield the findings of each rule. If the server cannot be used, only the first rule finds something."""
    yield from _check_access(facts, alias)
    yield from _check_cluster(facts, alias)
    if not facts.new:
        yield from _check_collections(facts, alias)
    elif sys.argv[1:2] != ["migrate"]:  # migrate makes them, and runs the checks before
        yield warning(
            "W103", "The collections of the locks are not made yet.", f"Run manage.py migrate --database {alias}."
        )


def told(facts: ServerFacts, alias: str) -> Iterator[CheckMessage]:
    """Yield a message with the answers of the server."""
    if not facts.problem:
        packages = ("Django", "django-mongodb-backend", "PyMongo")
        said = [
            f"{facts.address} answers",
            f"replica set {facts.set_name!r}, members: {facts.members}" if facts.set_name else "no replica set",
            *([f"a failover takes up to {facts.failover:g} s"] if facts.failover else []),
            "the collections are made by migrate" if facts.new else "the collections are there",
            f"MongoDB {facts.version}",
            f"Python {platform.python_version()}",
            *(f"{name} {version(name)}" for name in packages),
        ]
        yield info("I101", f"The locks are in DATABASES[{alias!r}]: {'; '.join(said)}.")


def _check_access(facts: ServerFacts, alias: str) -> Iterator[CheckMessage]:
    if facts.problem:
        yield error(
            "E101",
            f"The MongoDB of DATABASES[{alias!r}] cannot be used for locks: {facts.problem}",
            "Compare HOST, USER, PASSWORD and OPTIONS with what mongosh needs to connect from this machine.",
        )
    if facts.missing_rights:
        yield error(
            "E102",
            f"The user of DATABASES[{alias!r}] lacks rights on the locks: {', '.join(facts.missing_rights)}.",
            "Grant find, insert and update on the collection mongolock_locks of that database.",
        )
    if facts.refused:
        yield error(
            "E107",
            f"The server of DATABASES[{alias!r}] refuses the update that locks are made of: {facts.refused}",
            "Use MongoDB 6.0 or newer. Servers of other vendors that speak its protocol often lack updates with a "
            "pipeline, or $$NOW.",
        )
    found = re.match(r"(\d+)\.(\d+)", facts.version)
    if found is not None and (int(found[1]), int(found[2])) < OLDEST:
        yield warning(
            "W109",
            f"The MongoDB of DATABASES[{alias!r}] has version {facts.version}: locks need {OLDEST[0]}.{OLDEST[1]}.",
            "Upgrade it.",
        )


def _check_collections(facts: ServerFacts, alias: str) -> Iterator[CheckMessage]:
    if facts.missing_indexes:
        yield warning(
            "W103",
            f"The collection of the locks lacks indexes: {', '.join(facts.missing_indexes)}.",
            f"Run manage.py migrate --database {alias} as a user who may create indexes.",
        )
    if facts.bells:
        yield warning(
            "W104",
            f"Waiters look for their turn at intervals, since no bell wakes them: {facts.bells}.",
            f"Run manage.py migrate --database {alias} as a user who may create collections. If a right is missing, "
            "grant find and insert on the collections mongolock_locks_bells_0 to _7.",
        )


def _check_cluster(facts: ServerFacts, alias: str) -> Iterator[CheckMessage]:
    if facts.standalone:
        yield warning(
            "W101",
            f"The MongoDB of DATABASES[{alias!r}] is a standalone server: a lock survives no failover.",
            "Run it as a replica set; one node is enough to begin with (--replSet, rs.initiate()).",
        )
    elif facts.sharded:
        yield error(
            "E105",
            f"DATABASES[{alias!r}] is a sharded cluster: each mongos judges leases by its own clock. Where two clocks "
            "differ by more than a lock's margin, the lock can have two holders.",
            'Keep the locks in a replica set of their own: an alias of its own, named by MONGOLOCK["DATABASE"]. If you '
            'know that all mongos have one clock, SILENCED_SYSTEM_CHECKS = ["mongolock.E105"].',
        )
    if not facts.journaled:
        yield error(
            "E104",
            f"The replica set of DATABASES[{alias!r}] has writeConcernMajorityJournalDefault: false.",
            "Set it to true: without it, what the majority has confirmed is lost in a crash of all members.",
        )
    if facts.direct and facts.members > 1:
        yield error(
            "E106",
            f"The address of DATABASES[{alias!r}] leads to one member of {facts.members} (directConnection=true). Once "
            "another member is elected, no lock can be acquired.",
            f"Name all members instead: mongodb://host1,host2,host3/?replicaSet={facts.set_name}.",
        )
    lease = get_settings().LEASE
    if facts.failover and lease < facts.failover:
        yield warning(
            "W102",
            f'{NAME}["LEASE"] is {lease:g} s, but a failover takes up to {facts.failover:g} s and loses the locks.',
            f"Set it to at least {facts.failover:g}.",
        )
    if abs(facts.ahead) > FAR_APART:
        direction = "ahead of" if facts.ahead > 0 else "behind"
        yield warning(
            "W108",
            f"The clock of DATABASES[{alias!r}] is {abs(facts.ahead):.0f} s {direction} that of this machine.",
            "Synchronise both (chrony, NTP). Only MongoDB's clock decides about leases, so no lock is in danger; but "
            "what the list and the history of the locks show does not match the logs of this machine.",
        )
