"""Checks of the MongoDB server behind the alias."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from django.apps import AppConfig
from django.core.checks import CheckMessage, Tags, register

from ..backends.base import get_backend, mongo_store
from ..backends.mongo import MongoBackend
from ..conf import NAME, get_settings
from .messages import error, info, warning
from .project import has_wrong_settings

if TYPE_CHECKING:
    from ..inspection.server_facts import ServerFacts

#: Clocks that are more than so many seconds apart are not synchronised.
FAR_APART: Final = 1.0
#: The oldest version of MongoDB that has what the rule of the locks needs.
OLDEST: Final = (6, 0)


@register(Tags.database)
def check_server(
    *, app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None, **kwargs: Any
) -> list[CheckMessage]:
    """Check that the server can be reached and is a replica set, and that rights and indexes are there."""
    return [] if (found := _look(databases)) is None else list(server_rules(*found))


@register(Tags.database, deploy=True)
def check_server_facts(
    *, app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None, **kwargs: Any
) -> list[CheckMessage]:
    """Tell what the server said, with ``--deploy``: the tests and ``migrate`` run the other checks of the database."""
    return [] if (found := _look(databases)) is None else list(_tell(*found))


def _look(databases: Sequence[str] | None) -> tuple[ServerFacts, str] | None:
    """What the server of the locks says of itself, and its alias; None if it is not to be asked."""
    from ..inspection.server_facts import inspect_server

    if not databases or has_wrong_settings():
        return None
    alias = get_settings().DATABASE
    if alias not in databases or not isinstance(get_backend(alias), MongoBackend):
        return None
    return inspect_server(mongo_store(alias), get_settings().COMMAND_TIMEOUT), alias


def server_rules(facts: ServerFacts, alias: str) -> Iterator[CheckMessage]:
    """What each rule finds. Of a server that cannot be used, only the first has something to say."""
    yield from _check_reach(facts, alias)
    yield from _check_rights(facts, alias)
    yield from _check_replica_set(facts, alias)
    yield from _check_bells(facts, alias)
    yield from _check_failover(facts)
    yield from _check_clock(facts, alias)
    yield from _check_collections(facts, alias)
    yield from _check_versions(facts, alias)


def _tell(facts: ServerFacts, alias: str) -> Iterator[CheckMessage]:
    if not facts.problem:
        packages = ("Django", "django-mongodb-backend", "PyMongo")
        said = [
            f"{facts.address} answers",
            f"replica set {facts.set_name!r}, members: {facts.members}" if facts.set_name else "no replica set",
            f"a failover takes up to {facts.failover:g} s" if facts.failover else "there is no other member",
            "the collections are made by migrate" if facts.new else "the collections are there",
            f"MongoDB {facts.version}",
            f"Python {platform.python_version()}",
            *(f"{name} {version(name)}" for name in packages),
        ]
        yield info("I101", f"The locks are in DATABASES[{alias!r}]: {'; '.join(said)}.")


def _check_reach(facts: ServerFacts, alias: str) -> Iterator[CheckMessage]:
    if facts.problem:
        yield error(
            "E101",
            f"The MongoDB of DATABASES[{alias!r}] cannot be used for locks: {facts.problem}",
            "Compare HOST, USER, PASSWORD and OPTIONS with what mongosh needs to connect from this machine.",
        )


def _check_rights(facts: ServerFacts, alias: object) -> Iterator[CheckMessage]:
    if facts.missing_rights:
        yield error(
            "E102",
            f"The user of DATABASES[{alias!r}] lacks rights on the locks: {', '.join(facts.missing_rights)}.",
            "Grant find, insert and update on the collection mongolock_locks of that database.",
        )


def _check_collections(facts: ServerFacts, alias: object) -> Iterator[CheckMessage]:
    if facts.new:
        return  # `migrate`, which runs this check first, makes them
    if facts.missing_indexes:
        yield warning(
            "W103",
            f"The collection of the locks lacks indexes: {', '.join(facts.missing_indexes)}.",
            f"Run manage.py migrate --database {alias} as a user who may create indexes.",
        )
    if facts.history:
        yield warning(
            "W110",
            f"The history of the locks cannot be kept: {facts.history}.",
            "Grant find and insert on it, or drop the wrong one, and run manage.py migrate "
            f"--database {alias} as a user who may create collections.",
        )


def _check_replica_set(facts: ServerFacts, alias: object) -> Iterator[CheckMessage]:
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


def _check_bells(facts: ServerFacts, alias: object) -> Iterator[CheckMessage]:
    if facts.bells and not facts.new:
        yield warning(
            "W104",
            f"Waiters look for their turn at intervals, since no bell wakes them: {facts.bells}.",
            "Grant find and insert on the collections mongolock_locks_bells_0 to _7, and run manage.py migrate "
            f"--database {alias} as a user who may create collections.",
        )


def _check_failover(facts: ServerFacts) -> Iterator[CheckMessage]:
    lease = get_settings().LEASE
    if facts.failover and lease < facts.failover:
        yield warning(
            "W102",
            f'{NAME}["LEASE"] is {lease:g} s, but a failover takes up to {facts.failover:g} s and loses the locks.',
            f"Set it to at least {facts.failover:g}.",
        )


def _check_clock(facts: ServerFacts, alias: object) -> Iterator[CheckMessage]:
    if abs(facts.ahead) > FAR_APART:
        direction = "ahead of" if facts.ahead > 0 else "behind"
        yield warning(
            "W108",
            f"The clock of DATABASES[{alias!r}] is {abs(facts.ahead):.0f} s {direction} that of this machine.",
            "Synchronise both (chrony, NTP). Only MongoDB's clock decides about leases, so no lock is in danger; but "
            "what the list and the history of the locks show does not match the logs of this machine.",
        )


def _check_versions(facts: ServerFacts, alias: object) -> Iterator[CheckMessage]:
    found = re.match(r"(\d+)\.(\d+)", facts.version)
    if found is not None and (int(found[1]), int(found[2])) < OLDEST:
        yield warning(
            "W109",
            f"The MongoDB of DATABASES[{alias!r}] has version {facts.version}: locks need {OLDEST[0]}.{OLDEST[1]}.",
            "Upgrade it.",
        )
