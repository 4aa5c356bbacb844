"""The locks and their server at one moment, and the problems that need a person."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Final

from ..backends.base import mongo_store
from ..conf import get_settings
from .kinds import Counts, count_all, other_kinds
from .overview import Overview, overview
from .patterns import starting
from .server_facts import ServerFacts, known_server

#: A wait of more than so many seconds is a problem.
LONG_WAIT: Final = 60.0


class Alarm(StrEnum):
    """The kinds of problems, the most urgent first."""

    SERVER = "server"
    DEADLOCK = "deadlock"
    DAMAGED = "damaged"
    LONG_WAIT = "long_wait"
    STALE = "stale"
    STALE_DOCUMENTS = "stale_documents"
    DAMAGED_DOCUMENTS = "damaged_documents"
    DOCUMENTS_AWAY = "documents_away"
    INDEXES = "indexes"
    STANDALONE = "standalone"
    POLLING = "polling"


@dataclass(frozen=True)
class Problem:
    """A problem that needs a person. amount: how many, or how many seconds. about: a key, a name, or words."""

    alarm: Alarm
    amount: float
    about: str = ""


@dataclass(frozen=True)
class Status:
    """The locks, their server, and the documents that have locks of their own."""

    locks: Overview
    server: ServerFacts
    documents: tuple[Counts, ...] = ()

    @cached_property
    def problems(self) -> list[Problem]:
        """The problems, the most urgent first."""
        return [*_of_locks(self.locks), *_of_documents(self.documents), *_of_server(self.server)]


def current_status() -> Status:
    """Look at the locks of this project. Raises LockBackendFailed."""
    settings = get_settings()
    store = mongo_store()
    locks = overview(store, starting(settings.KEY_PREFIX), settings.COMMAND_TIMEOUT)
    return Status(locks, known_server(store, settings.COMMAND_TIMEOUT), count_all(other_kinds()))


def _of_locks(locks: Overview) -> Iterator[Problem]:
    if locks.deadlocks:
        yield Problem(Alarm.DEADLOCK, len(locks.deadlocks))
    if locks.damaged:
        yield Problem(Alarm.DAMAGED, len(locks.damaged), locks.damaged[0])
    if locks.longest_wait > LONG_WAIT:
        # The order may have changed since the locks were chosen.
        longest = max(locks.waited_for, key=lambda lock: lock.longest_wait or 0.0)
        yield Problem(Alarm.LONG_WAIT, locks.longest_wait, longest.key)
    if locks.stale:
        yield Problem(Alarm.STALE, locks.stale)


def _of_documents(found: Iterable[Counts]) -> Iterator[Problem]:
    for counts in found:
        if counts.stale:
            yield Problem(Alarm.STALE_DOCUMENTS, counts.stale, counts.lock)
        if counts.damaged:
            yield Problem(Alarm.DAMAGED_DOCUMENTS, counts.damaged, counts.lock)
        if counts.error:
            yield Problem(Alarm.DOCUMENTS_AWAY, 1, f"{counts.lock}: {counts.error}")


def _of_server(facts: ServerFacts) -> Iterator[Problem]:
    if facts.problem:
        yield Problem(Alarm.SERVER, 1, facts.problem)
        return
    if facts.missing_indexes:
        yield Problem(Alarm.INDEXES, len(facts.missing_indexes), ", ".join(facts.missing_indexes))
    if facts.standalone:
        yield Problem(Alarm.STANDALONE, 1)
    if facts.bells and not facts.new:
        yield Problem(Alarm.POLLING, 1)
