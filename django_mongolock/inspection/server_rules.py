"""What is wrong with the MongoDB server of the locks, by what it says of itself: for the checks."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from importlib.metadata import version
from typing import Final

from django.core.checks import CheckMessage

from ..conf import NAME, get_settings
from .check_messages import error, info, warning
from .server_facts import ServerFacts

#: Clocks that are more than so many seconds apart are not synchronised.
FAR_APART: Final = 1.0
#: The oldest version of MongoDB that has what the rule of the locks needs.
OLDEST: Final = (6, 0)


def server_rules(facts: ServerFacts, alias: str) -> Iterator[CheckMessage]:
    """What each rule finds. Of a server that cannot be used, only the first has something to say."""
    yield from _check_access(facts, alias)
    yield from _check_cluster(facts, alias)
    if not facts.new:  # `migrate`, which runs this check first, makes them
        yield from _check_collections(facts, alias)


def told(facts: ServerFacts, alias: str) -> Iterator[CheckMessage]:
    """What the server said."""
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
            "Grant find and insert on the collections mongolock_locks_bells_0 to _7, and run manage.py migrate "
            f"--database {alias} as a user who may create collections.",
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
