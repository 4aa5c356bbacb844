"""Named locks, those of `mongo_lock`, as the first kind of locks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from typing import Any, Final

from django.apps import apps
from django.core.checks import CheckMessage

from ..backends import MongoBackend, get_backend, mongo_store
from ..conf import get_settings
from ..engine.store.mongo import MongoStore
from ..engine.text_checks import check_key, check_text
from ..exceptions import from_printed
from ..signals import lock_forced, send, stale_locks_cleared
from . import display, operations, queries
from .kinds import Choice, Counts, Row, Swept, starting
from .overview import Overview, overview
from .queries import chosen
from .server import inspect_server, server_rules
from .snapshot import LockSnapshot, Party, ShownState
from .verdict import verdict_text

#: The number of holders in a row, and the number of holders that one forced release can take.
HOLDERS: Final = 10
MOST_HOLDERS: Final = 1_000
#: The number of stale locks that one update clears.
BATCH: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LockRow(Row):
    """A named lock as a row, with its snapshot and its verdict."""

    lock: LockSnapshot

    @property
    def seal(self) -> list[int]:
        """The fencing tokens of the holders. They tell holders apart as well as ids do, and are no secret."""
        return self.lock.tokens

    def cells(self) -> dict[str, object]:
        """See Row.cells()."""
        lock = self.lock
        token = max(lock.tokens, default=lock.token or "-")
        return {**Row.cells(self), "WAITING": lock.waiting, "TOKEN": token}

    @property
    def condition(self) -> str:
        """The verdict, or the state without one. A verdict says more than a state."""
        return self.lock.verdict or self.state

    @property
    def text(self) -> str:
        """The verdict in two or three sentences."""
        return verdict_text(self.lock)

    @property
    def note(self) -> str:
        """See Row.note."""
        return f"{self.key}: {display.SHOWN[self.condition][1]}. {self.text}" if self.lock.needs_a_look else ""

    def facts(self) -> dict[str, Any]:
        """See Row.facts()."""
        lock = self.lock
        return {
            "holders": [party_as_json(holder, holder.acquired_at) for holder in lock.holders],
            "holding": lock.holding,
            "permits": lock.permits,
            "waiting": lock.waiting,
            "token": lock.token,
            "ends": lock.expires_at.isoformat() if lock.expires_at else None,
            "verdict": lock.verdict,
            "verdict_text": self.text,
            "holder_waits_for": lock.obstacle and lock.obstacle.key,
            "renewed_seconds_ago": round(lock.age(lock.heard), 3) if lock.heard else None,
            "mean_hold_seconds": lock.mean_hold,
            "longest_hold_seconds": lock.longest_hold_ms / 1_000,
        }


def row_of(lock: LockSnapshot) -> LockRow:
    """Return the row of a lock."""
    first = min(lock.holders, key=lambda holder: bool(holder.released), default=None)
    return LockRow(
        key=lock.key,
        state=lock.state,
        holder=display.who(first) + display.others(lock) if first else None,
        where=display.details(first) if first else "",
        since=None if lock.held_seconds is None else lock.since,
        seconds=lock.held_seconds or 0.0,
        left=lock.left,
        damage=lock.damage or "",
        lock=lock,
    )


def party_as_json(party: Party, since: datetime | None) -> dict[str, Any]:
    """Return a holder or a waiter as a dictionary for programs."""
    facts = {name: value for name in (*operations.FACTS, "token") if (value := getattr(party, name)) is not None}
    if party.mode == "semaphore":
        facts |= {"capacity": party.capacity, "weight": 1 + party.more_permits}
    moments = {"since": since, "released": party.released}
    return facts | {name: moment.isoformat() for name, moment in moments.items() if moment}


class NamedLocks:
    """The locks with the key prefix of this project. See `LockKind`.

    - using: DATABASES alias. Default: MONGOLOCK["DATABASE"].
    """

    name = title = "locks"
    taken = (ShownState.HELD, ShownState.KEPT)

    def __init__(self, using: str | None = None) -> None:
        self._using = using

    @property
    def alias(self) -> str:
        return self._using or get_settings().DATABASE

    @property
    def model(self) -> Any:
        return apps.get_model("django_mongolock", "Lock")

    @property
    def store(self) -> MongoStore:
        return mongo_store(self.alias)

    def rows(self, choice: Choice, limit: int = 0) -> Iterator[LockRow]:
        order = "_id" if choice.state == "all" else "expires_at"
        holders = HOLDERS if choice.owner is None and choice.ids is None else MOST_HOLDERS
        query = chosen(self._ours(choice))
        found = queries.snapshots(self.store, query, {order: 1}, limit=limit, holders=holders, owner=choice.owner)
        return map(row_of, self.with_obstacles(found))

    def with_obstacles(self, locks: Iterable[LockSnapshot]) -> Iterator[LockSnapshot]:
        """See queries.with_obstacles()."""
        settings = get_settings()
        return queries.with_obstacles(self.store, locks, starting(settings.KEY_PREFIX), settings.COMMAND_TIMEOUT)

    def again(self, shown: Sequence[tuple[Any, Any]]) -> list[LockRow]:
        settings, wanted = get_settings(), dict[str, set[int]]()
        for key, tokens in shown:
            check_text("a lock key", key)
            if not key.startswith(settings.KEY_PREFIX) or {type(token) for token in tokens} - {int}:
                raise ValueError("not a lock of this site")
            wanted.setdefault(key, set()).update(tokens)
        query = chosen(Choice(ids=list(wanted)))
        found = queries.snapshots(self.store, query, {"_id": 1}, holders=MOST_HOLDERS, timeout=settings.COMMAND_TIMEOUT)
        rows = []
        for lock in self.with_obstacles(found):
            known = tuple(holder for holder in lock.holders if holder.token in wanted[lock.key])
            rows += [row_of(replace(lock, holders=known, holding=len(known)))] if known else []
        return rows

    def ids(self, text: str) -> list[str]:
        prefix = get_settings().KEY_PREFIX
        texts = dict.fromkeys([text, from_printed(text)])
        return [check_key(each, "" if each.startswith(prefix) else prefix) for each in texts]

    def counts(self) -> Counts:
        settings = get_settings()
        return counts_of(overview(self.store, starting(settings.KEY_PREFIX), settings.COMMAND_TIMEOUT))

    def clear(self, choice: Choice, *, dry_run: bool = False) -> Iterator[Swept]:
        store, choice = self.store, self._ours(replace(choice, state="stale"))
        found = queries.snapshots(store, chosen(choice), {"expires_at": 1}, holders=HOLDERS)
        while rows := [row_of(each) for each in islice(found, BATCH)]:
            stale = [row for row in rows if row.state is not ShownState.DAMAGED]
            part = Swept(stale, found=len(stale), damaged=[row for row in rows if row.state is ShownState.DAMAGED])
            if stale and not dry_run:
                part.count, part.postponed = operations.clear_stale(store, [row.key for row in stale], choice)
            if part.count:
                send(stale_locks_cleared, count=part.count, using=self.alias)
            yield part

    def force(self, shown: Iterable[LockRow], *, by: str, reason: str) -> list[LockRow]:
        store, timeout, taken = self.store, get_settings().COMMAND_TIMEOUT, list[LockRow]()
        for row in shown:
            grants = [holder.grant for holder in row.lock.holders if holder.grant]
            if grants and operations.force_release(store, row.key, grants, timeout, by=by, reason=reason):
                send(lock_forced, key=row.key, using=self.alias, by=by, reason=reason)
                taken.append(row)
        return taken

    def ask(self, row: Any, requested_by: str, *, by: str = "", reason: str = "") -> int:
        """Ask the holders of this row to release the lock. Return the number of holders asked.

        See `operations.ask_to_release`.
        """
        grants = [holder.grant for holder in row.lock.holders if holder.grant]
        timeout = get_settings().COMMAND_TIMEOUT
        return operations.ask_to_release(
            self.store, row.key, requested_by, timeout, grants=grants, by=by, reason=reason
        )

    def checks(self, databases: Sequence[str]) -> Iterator[CheckMessage]:
        if self.alias in databases and isinstance(get_backend(self.alias), MongoBackend):
            yield from server_rules(inspect_server(self.store, get_settings().COMMAND_TIMEOUT), self.alias)

    def _ours(self, choice: Choice) -> Choice:
        return replace(choice, key=choice.key or starting(get_settings().KEY_PREFIX))


def named_locks(using: str | None = None) -> list[NamedLocks]:
    """Return the named locks as the only kind of their source."""
    return [NamedLocks(using)]


def counts_of(found: Overview) -> Counts:
    """Return the counts of an overview."""
    longest = max((lock.held_seconds or 0.0 for lock in found.longest_held), default=0.0)
    return Counts(NamedLocks.name, found.held, found.stale, len(found.damaged), longest, more=found.capped)
