"""The servers behind the locks: the members of the replica set, their roles, and how far their clocks are apart.

Only a member itself tells the time of its clock. The engine's own client asks nothing but the primary, and
`replSetGetStatus`, which needs a right of its own, has no clock of another member. So a second client is opened for a
moment, twice a minute at most, and only while a person or a program looks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, Self
from weakref import WeakKeyDictionary

import pymongo
from pymongo import MongoClient, ReadPreference
from pymongo.errors import PyMongoError
from pymongo.server_description import ServerDescription

from ..engine import clock
from ..engine.mongo_store import MongoStore
from .server_facts import ServerFacts, inspect_server

Document = dict[str, Any]
Address = tuple[str, int | None]

#: Seconds for which an answer is used again: it changes seldom, and asking takes a connection to each member.
CACHE_SECONDS: Final = 30.0
#: Seconds that the whole inquiry may take, and the answer of one member.
TIMEOUT: Final = 4.0
MEMBER_TIMEOUT: Final = 1.0


@dataclass(frozen=True, slots=True)
class Member:
    """One server. role: "primary", "secondary", "mongos", "standalone" or "other"; "away" if it does not answer.

    ahead: by how many seconds its clock is ahead of the primary's, negative if it is behind; None if unknown. The
    error is at most half a round trip to each of the two.
    """

    address: str
    role: str
    ahead: float | None = None


@dataclass(frozen=True, slots=True)
class Servers:
    """What is known of the servers. age: for how many seconds it has been known."""

    name: str
    members: tuple[Member, ...]
    facts: ServerFacts
    age: float = 0.0

    @property
    def primary(self) -> str:
        """Its address, "" without a primary."""
        return next((member.address for member in self.members if member.role == "primary"), "")

    @property
    def ringing(self) -> bool:
        """Whether a bell wakes a waiter at its turn. Otherwise it looks at intervals."""
        return not self.facts.bells

    @property
    def apart(self) -> float | None:
        """The largest difference between two clocks, in seconds; None with fewer than two known clocks."""
        known = [member.ahead for member in self.members if member.ahead is not None]
        return max(known) - min(known) if len(known) > 1 else None

    @property
    def away(self) -> tuple[Member, ...]:
        """The members that do not answer."""
        return tuple(member for member in self.members if member.role == "away")


_known: WeakKeyDictionary[MongoStore, tuple[float, Servers]] = WeakKeyDictionary()


def servers(store: MongoStore) -> Servers:
    """What is known of the servers, at most `CACHE_SECONDS` old. Never raises."""
    now = clock.now()
    at, found = _known.get(store, (0.0, None))
    if found is None or now - at > CACHE_SECONDS:
        found, at = look(store), now
        _known[store] = at, found
    return Servers(found.name, found.members, found.facts, round(now - at, 1))


def look(store: MongoStore) -> Servers:
    """Ask every member. Changes nothing, and never raises: a member that does not answer is "away"."""
    facts = inspect_server(store, TIMEOUT)
    if facts.problem:
        return Servers("", (), facts)
    with suppress(PyMongoError), pymongo.timeout(TIMEOUT):
        hello = store.client.admin.command("hello")
        with _AnyMember(store) as asked:
            found = list(_members(asked, [*hello.get("hosts", ()), *hello.get("passives", ())]))
        return Servers(hello.get("setName", ""), _relative_to_primary(found), facts)
    return Servers("", (), facts)


class _AnyMember:
    """A second client, for a moment, which can ask any one member."""

    def __init__(self, store: MongoStore) -> None:
        self._wanted: Address | None = None
        options = store._client_options() | {"server_selector": self._select, "serverSelectionTimeoutMS": 1_000}
        self.client: MongoClient[Document] = MongoClient(**options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._wanted = None  # to close, it ends its sessions on any member
        self.client.close()

    def ask(self, address: Address | None) -> Document:
        """Return the answer of one member, or of any, to "hello". Raises PyMongoError."""
        self._wanted = address
        with pymongo.timeout(MEMBER_TIMEOUT):
            return dict(self.client.admin.command("hello", read_preference=ReadPreference.NEAREST))

    def _select(self, members: Sequence[ServerDescription]) -> Sequence[ServerDescription]:
        return members if self._wanted is None else [each for each in members if each.address == self._wanted]


def _members(asked: _AnyMember, hosts: Sequence[str]) -> Iterator[Member]:
    """Each member, with its clock compared with this machine's, for now."""
    if not hosts:  # a standalone server, or routers, whose clocks judge no lease
        hello = asked.ask(None)
        role = "mongos" if hello.get("msg") == "isdbgrid" else "standalone"
        yield Member(":".join(map(str, asked.client.address or ())), role)
    for host in hosts:
        yield _member(asked, host)


def _member(asked: _AnyMember, host: str) -> Member:
    name, _, port = host.rpartition(":")
    try:
        asked.ask((name, int(port)))  # opens a connection, which takes longer than an answer
        begin = clock.now()
        hello = asked.ask((name, int(port)))
        trip = clock.now() - begin
    except (PyMongoError, ValueError):
        return Member(host, "away")
    role = "primary" if hello.get("isWritablePrimary") else "secondary" if hello.get("secondary") else "other"
    local = hello.get("localTime")
    ahead = local.timestamp() - (begin + trip / 2) if isinstance(local, datetime) else None
    return Member(host, role, ahead)


def _relative_to_primary(members: list[Member]) -> tuple[Member, ...]:
    """The same members, with their clocks compared with the primary's."""
    base = next((member.ahead for member in members if member.role == "primary"), None)
    return tuple(
        replace(member, ahead=None if base is None or member.ahead is None else member.ahead - base)
        for member in members
    )
