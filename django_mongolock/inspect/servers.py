"""The servers behind the locks: who is there, who is primary, and how far their clocks are apart."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Self
from weakref import WeakKeyDictionary

import pymongo
from pymongo import MongoClient, ReadPreference
from pymongo.errors import PyMongoError
from pymongo.server_description import ServerDescription

from ..engine import clock
from ..engine.store import MongoStore
from .server_facts import ServerFacts, inspect_server

Document = dict[str, Any]
Address = tuple[str, int | None]

#: For how long what was found is told again, in seconds: it changes seldom, and asking takes a connection to each.
KEPT: Final = 30.0
#: How long all of it may take, and the answer of one member, in seconds.
TIMEOUT: Final = 4.0
MEMBER_TIMEOUT: Final = 1.0


@dataclass(frozen=True, slots=True)
class Member:
    """One server. role: "primary", "secondary", "mongos", "standalone" or "other"; "away" if it does not answer.

    ahead: by how many seconds its clock is before the primary's, negative if it is behind; None if unknown. It is as
    exact as the way to the member and back is short: *trip* seconds.
    """

    address: str
    role: str
    ahead: float | None = None
    trip: float = 0.0


@dataclass(frozen=True, slots=True)
class Servers:
    """What the locks are kept on. age: for how many seconds this has been known."""

    name: str
    members: tuple[Member, ...]
    facts: ServerFacts
    age: float = 0.0

    @property
    def primary(self) -> str:
        """Its address, "" where there is none."""
        return next((member.address for member in self.members if member.role == "primary"), "")

    @property
    def watching(self) -> bool:
        """Are those who wait told of their turn by a change stream? Otherwise they look for it now and then."""
        return self.facts.may_watch and not self.facts.standalone

    @property
    def apart(self) -> float | None:
        """How far the clocks are apart at most, in seconds; None where there are not two that are known."""
        known = [member.ahead for member in self.members if member.ahead is not None]
        return max(known) - min(known) if len(known) > 1 else None

    @property
    def away(self) -> tuple[Member, ...]:
        """Those who do not answer."""
        return tuple(member for member in self.members if member.role == "away")


_known: WeakKeyDictionary[MongoStore, tuple[float, Servers]] = WeakKeyDictionary()
_mutex = threading.Lock()


def servers(store: MongoStore, kept: float = KEPT) -> Servers:
    """What is known of the servers, asked anew where that is older than *kept* seconds. Never raises."""
    now = clock.now()
    with _mutex:
        at, found = _known.get(store, (0.0, None))
    if found is None or now - at > kept:
        found, at = look(store), now
        with _mutex:
            _known[store] = at, found
    return Servers(found.name, found.members, found.facts, round(now - at, 1))


def look(store: MongoStore) -> Servers:
    """Ask every member. Changes nothing, and never raises: who does not answer is away."""
    facts = inspect_server(store, TIMEOUT)
    if facts.problem:
        return Servers("", (), facts)
    with suppress(PyMongoError), pymongo.timeout(TIMEOUT):
        hello = store.client.admin.command("hello")
        with _AnyMember(store) as asked:
            found = tuple(_members(asked, [*hello.get("hosts", ()), *hello.get("passives", ())]))
        return Servers(hello.get("setName", ""), _beside_primary(found), facts)
    return Servers("", (), facts)


class _AnyMember:
    """A client of its own for a moment, which can be made to ask one member."""

    def __init__(self, store: MongoStore) -> None:
        self._wanted: Address | None = None
        options = store._client_options() | {"server_selector": self._select, "serverSelectionTimeoutMS": 1_000}
        self.client: MongoClient[Document] = MongoClient(**options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._wanted = None  # it says good-bye to whoever is there
        self.client.close()

    def ask(self, address: Address | None) -> Document:
        """The member's answer to hello; of any, if there is no address. Raises PyMongoError."""
        self._wanted = address
        with pymongo.timeout(MEMBER_TIMEOUT):
            return dict(self.client.admin.command("hello", read_preference=ReadPreference.NEAREST))

    def _select(self, members: Sequence[ServerDescription]) -> Sequence[ServerDescription]:
        return members if self._wanted is None else [each for each in members if each.address == self._wanted]


def _members(asked: _AnyMember, hosts: Sequence[str]) -> Iterator[Member]:
    """Each with its clock beside this machine's, which only serves to compare theirs."""
    if not hosts:  # a standalone server, or routers, whose clocks judge no lease
        hello = asked.ask(None)
        role = "mongos" if hello.get("msg") == "isdbgrid" else "standalone"
        yield Member(":".join(map(str, asked.client.address or ())), role)
    for host in hosts:
        yield _member(asked, host)


def _member(asked: _AnyMember, host: str) -> Member:
    name, _, port = host.rpartition(":")
    try:
        asked.ask((name, int(port)))  # the first opens a connection, which takes longer than the answer
        begin = clock.now()
        hello = asked.ask((name, int(port)))
        trip = clock.now() - begin
    except (PyMongoError, ValueError):
        return Member(host, "away")
    role = "primary" if hello.get("isWritablePrimary") else "secondary" if hello.get("secondary") else "other"
    local = hello.get("localTime")
    ahead = local.timestamp() - (begin + trip / 2) if isinstance(local, datetime) else None
    return Member(host, role, ahead, trip)


def _beside_primary(members: tuple[Member, ...]) -> tuple[Member, ...]:
    """The same, with their clocks beside the primary's."""
    base = next((member.ahead for member in members if member.role == "primary"), None)
    return tuple(
        Member(each.address, each.role, None if base is None or each.ahead is None else each.ahead - base, each.trip)
        for each in members
    )
