"""How the locks are, at one moment, and what of it needs somebody's attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Final

from ..backends.base import mongo_store
from ..conf import get_settings
from .overview import Overview, longest_wait, overview
from .patterns import starting
from .servers import Servers, servers

#: Longer than this nobody waits who does not have to, in seconds: for people, by the server's clock.
LONG_WAIT: Final = 60.0
#: Clocks that are further apart than this are not being set right, in seconds.
FAR_APART: Final = 1.0


class Alarm(StrEnum):
    """What may need somebody. The order is that of urgency."""

    SERVER = "server"
    DEADLOCK = "deadlock"
    DAMAGED = "damaged"
    LONG_WAIT = "long_wait"
    STALE = "stale"
    MEMBER_AWAY = "member_away"
    CLOCKS = "clocks"
    INDEXES = "indexes"
    STANDALONE = "standalone"
    POLLING = "polling"


@dataclass(frozen=True)
class Trouble:
    """One thing that needs somebody. amount: how many, or how many seconds."""

    alarm: Alarm
    amount: float
    about: str = ""


@dataclass(frozen=True)
class Status:
    """The locks and their servers."""

    locks: Overview
    servers: Servers

    @cached_property
    def troubles(self) -> list[Trouble]:
        """What needs somebody, the most urgent first."""
        return [*_of_locks(self.locks), *_of_servers(self.servers)]


def current_status() -> Status:
    """Look at the locks of this project. Raises LockBackendFailed."""
    settings = get_settings()
    store = mongo_store()
    return Status(overview(store, starting(settings.KEY_PREFIX), settings.COMMAND_TIMEOUT), servers(store))


def _of_locks(locks: Overview) -> Iterator[Trouble]:
    if locks.deadlocks:
        yield Trouble(Alarm.DEADLOCK, len(locks.deadlocks))
    if locks.damaged:
        yield Trouble(Alarm.DAMAGED, len(locks.damaged), locks.damaged[0].key)
    if locks.longest_wait > LONG_WAIT:
        first = max(locks.waited_for, key=lambda seen: longest_wait(seen) or 0.0)  # the order may have changed since
        yield Trouble(Alarm.LONG_WAIT, locks.longest_wait, first.key)
    if locks.stale:
        yield Trouble(Alarm.STALE, locks.stale)


def _of_servers(found: Servers) -> Iterator[Trouble]:
    facts = found.facts
    if facts.problem:
        yield Trouble(Alarm.SERVER, 1, facts.problem)
        return
    if found.away:
        yield Trouble(Alarm.MEMBER_AWAY, len(found.away), ", ".join(member.address for member in found.away))
    if found.apart is not None and found.apart > FAR_APART:
        yield Trouble(Alarm.CLOCKS, found.apart)
    if facts.missing_indexes:
        yield Trouble(Alarm.INDEXES, len(facts.missing_indexes), ", ".join(facts.missing_indexes))
    if facts.standalone:
        yield Trouble(Alarm.STANDALONE, 1)
    elif not facts.may_watch:
        yield Trouble(Alarm.POLLING, 1)
