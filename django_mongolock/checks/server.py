"""Checks of the MongoDB server behind the alias."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from django.apps import AppConfig
from django.core.checks import CheckMessage, Tags, register

from ..backends.base import get_backend, mongo_store
from ..backends.mongo import MongoBackend
from ..conf import NAME, LockSettings, get_settings, raw_settings
from .messages import error, warning
from .project import has_wrong_settings

if TYPE_CHECKING:
    from ..inspection.server_facts import ServerFacts


@register(Tags.database)
def check_server(
    *, app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None, **kwargs: Any
) -> list[CheckMessage]:
    """Check that the server can be reached and is a replica set, and that rights and indexes are there."""
    if not databases or has_wrong_settings():
        return []
    alias = raw_settings().get("DATABASE")
    if alias not in databases or not isinstance(get_backend(alias), MongoBackend):
        return []
    from ..inspection.server_facts import inspect_server

    facts = inspect_server(mongo_store(alias), get_settings().COMMAND_TIMEOUT)
    if facts.problem:
        return [
            error(
                "E101",
                f"The MongoDB of DATABASES[{alias!r}] cannot be used for locks: {facts.problem}",
                "Compare HOST, USER, PASSWORD and OPTIONS with what mongosh needs to connect from this machine.",
            )
        ]
    return [*_check_rights(facts, alias), *_check_replica_set(facts, alias), *_check_collections(facts, alias)]


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
            f"The collection mongolock_locks lacks indexes: {', '.join(facts.missing_indexes)}.",
            f"Run manage.py migrate --database {alias} as a user who may create indexes.",
        )
    if facts.history:
        yield warning(
            "W110",
            f"The history of the locks cannot be kept: {facts.history}.",
            f"Run manage.py migrate --database {alias} as a user who may create collections, or drop the wrong one.",
        )


def _check_replica_set(facts: ServerFacts, alias: object) -> Iterator[CheckMessage]:
    if facts.standalone:
        yield warning(
            "W101",
            f"The MongoDB of DATABASES[{alias!r}] is a standalone server: a lock survives no failover.",
            "Run it as a replica set; one node is enough to begin with (--replSet, rs.initiate()).",
        )
    elif facts.sharded:
        yield warning(
            "W107",
            f"DATABASES[{alias!r}] is a sharded cluster: each mongos judges leases by its own clock. Where two clocks "
            "differ by more than a lock's margin, the lock can have two holders.",
            'Keep the locks in a replica set of their own: an alias of its own, named by MONGOLOCK["DATABASE"].',
        )
    if not facts.standalone and not facts.may_watch:
        yield warning(
            "W104",
            f"The user of DATABASES[{alias!r}] may not watch the locks: waiters poll for their turn.",
            "Grant changeStream and find on the collection mongolock_locks of that database.",
        )
    lease = raw_settings().get("LEASE", LockSettings().LEASE)
    if facts.failover and lease < facts.failover:
        yield warning(
            "W102",
            f'{NAME}["LEASE"] is {lease:g} s, but a failover takes up to {facts.failover:g} s and loses the locks.',
            f"Set it to at least {facts.failover:g}.",
        )
    if not facts.journaled:
        yield warning(
            "W106",
            f"The replica set of DATABASES[{alias!r}] has writeConcernMajorityJournalDefault: false.",
            "Set it to true: waiters then get their locks sooner, and your other data survives a crash of all "
            "members. Locks are safe without it: their writes wait for the journals.",
        )
