"""Renews the grants of a session in bulk, and learns from the answers which were lost, requested or granted."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

from ...exceptions import LockBackendFailed
from ..logs import DEBUG, WARNING, log
from ..protocol.actions import FOREVER
from ..rule.document import Step
from ..rule.replies import Found
from .bulk import SHORT_LIMIT, batches, parts_of
from .commands import Commands
from .core import RENEWAL, REQUEST, SessionCore
from .ending import Ending, How
from .grant import Grant, State

#: However short the leases are, a renewal gets so many seconds.
SHORTEST_RENEWAL: Final = 0.1


class Renewals:
    """Renews what is due: holders apart from waiters, so that no lease waits for a place in a queue.

    A batch that fails is split, or sent again as it is: see `bulk`. `judge` decides by each answer whether a grant
    lives on, is renewed again, or is lost.

    in_threads: whether each batch has a thread of its own.
    """

    def __init__(self, session: SessionCore, commands: Commands, ending: Ending) -> None:
        self.in_threads = True
        self._session = session
        self._commands = commands
        self._ending = ending

    def next_due(self) -> float:
        """When a grant is to be renewed, or is lost."""
        grants = list(self._session.registry.grants.values())
        return min(
            (min(grant.lease.renew_at, grant.ends_at) if grant.renewable else grant.ends_at for grant in grants),
            default=FOREVER,
        )

    def do_due(self, now: float) -> None:
        """Renew, and report losses."""
        grants = list(self._session.registry.grants.values())
        for grant in grants:
            if grant.lost:
                self._ending.end(grant, How.LOST, noticed=True)
        for state in (State.HELD, State.WAITING):
            due = [grant for grant in grants if grant.state is state and grant.renewable]
            stuck = [grant for grant in due if grant.lease.stuck and grant.lease.renew_at <= now]
            # A batch that is tried again takes along no grant that was renewed just now.
            failed = [grant for grant in due if grant.lease.failures and not grant.lease.stuck]
            fresh = [grant for grant in due if not grant.lease.failures]
            for together in (fresh, failed):
                self._renew_due(together, now)
            for grant in stuck:
                self._have_renewed([grant])

    def _renew_due(self, grants: list[Grant], now: float) -> None:
        """Renew those of *grants* that are late, in batches."""
        late = [grant.length for grant in grants if grant.lease.renew_at <= now]
        # Take along what would be due before these are again: one command instead of many, from then on too.
        soon = now + min(late, default=-FOREVER) / 3
        # But not what is deferred: a renewal would conflict with its transaction.
        due = [grant for grant in grants if grant.lease.renew_at <= (now if grant.lease.deferred else soon)]
        for batch in batches(sorted(due, key=lambda grant: grant.key)):
            self._have_renewed(batch)

    def _have_renewed(self, grants: Sequence[Grant], limit: float = FOREVER) -> None:
        """Have a batch renewed. A grant that has failed alone twice leaves most of the threads to others."""
        lease = grants[0].lease
        how = {"priority": REQUEST if lease.stuck and lease.failures > 1 else RENEWAL}
        for grant in grants:
            grant.lease.renewing, grant.lease.once_more = True, False
        renew = functools.partial(self.renew, grants, limit, self._session.now())
        key = grants[0].key if lease.stuck else None
        if not (self.in_threads and self._session.threads.submit(renew, key=key, **how)):
            renew()

    def _limit(self, grants: Sequence[Grant]) -> float:
        """Return the seconds that the renewal of *grants* may take, so that enough are left for the next ones.

        A renewal begins when two thirds of the time of a grant are left. The first try gets a sixth of that time, each
        later one a third.
        """
        # What was queued for has the time of a place until it is renewed, however long its lease is.
        now = self._session.now()
        length = min(min(grant.length, grant.lease.span(now)) for grant in grants)
        return min(self._commands.timeout, max(SHORTEST_RENEWAL, length / (3 if grants[0].lease.failures else 6)))

    def renew(self, grants: Sequence[Grant], limit: float = FOREVER, entered: float = FOREVER) -> None:
        """Renew a batch, and distinguish what is lost for good from what may only be late.

        limit: the most seconds for a part of a batch that has failed. entered: when a thread was asked for. If none
        came within the limit, nothing is sent: the grants are due with others again.
        """
        is_part, now = limit < FOREVER, self._session.now()
        living = [grant for grant in grants if grant.state is State.WAITING or grant.held]
        limit = min(limit, self._limit(living)) if living else 0.0
        parts: Sequence[Sequence[Grant]] = ()
        try:
            if living and now - entered <= limit:
                parts = self._renew(living, limit, is_part=is_part)
        finally:
            for part in parts:
                self._have_renewed(part, SHORT_LIMIT)
            if not parts:
                for grant in grants:
                    grant.lease.renewing = False
                self._session.heartbeat.see_to(min(grant.lease.renew_at for grant in grants))

    def _renew(self, grants: Sequence[Grant], limit: float, *, is_part: bool) -> Sequence[Sequence[Grant]]:
        """Send the renewal, and judge its answer. Return the parts that are to be sent instead."""
        number, sent, primary = next(self._commands.numbers), self._session.now(), self._session.store.primary()
        # Now: what waits while the command is sent, and holds the lock when it is answered, was given a place by it.
        asked = [(grant, grant.length, grant.waiting.behind) for grant in grants]
        behind = tuple(count for _, _, count in asked)
        counts = any(behind) or any(grant.waiting.counted for grant in grants)
        step = Step(renew=tuple(grant.id for grant in grants), beat=number, behind=behind if counts else ())
        found: dict[str, Found] = {}
        parts: Sequence[Sequence[Grant]] = ()
        try:
            found = self._session.store.renew(sorted({grant.key for grant in grants}), step, limit)
        except LockBackendFailed as error:
            news = not is_part and any(not grant.lease.failures for grant in grants)
            held = any(grant.state is State.HELD for grant in grants)
            level = WARNING if news else DEBUG
            log(level, "renewal failed" if held else "places in queues not renewed", grants=len(grants), error=error)
            if parts := parts_of(grants, self._session.store, primary):
                return parts
            grants[0].lease.stuck = is_part and len(grants) == 1
        finally:
            for grant, length, count in asked if not parts else ():
                grant.waiting.counted = count > 0
                self.judge(grant, found.get(grant.key), number, sent, length)
                if grant.lease.once_more:
                    grant.lease.renew_at = self._session.now()
        return parts

    def judge(self, grant: Grant, found: Found | None, number: int, sent: float, length: float) -> None:
        """Decide what renewal *number* says of the grant. One that got through gives *length* from when it was *sent*.

        If its length is another one now, a command that was sent later has been answered before: of a waiter which
        holds the lock now, or an extension. What that has given stands.
        """
        beats = {} if found is None else {**found.waiters, **found.holders}
        beat, held = beats.get(grant.id), grant.state is State.HELD
        if held and beat is not None and beat.token != grant.token:
            beat = None  # taken away, and queued again by a command of before that was held up on its way
        if found is not None and beat is not None and beat.number == number:
            grant.lease.uncontended = grant.lease.uncontended and not found.waiters
            # Up to which token all is older than this answer: of one that was granted, all before its own, so that the
            # bell which tells of it still counts. Before the end is noted: see `Waits.result`.
            token = beat.token - 1 if beat.token else found.token
            grant.waiting.last_token = max(grant.waiting.last_token, token)
            # Rule: a belief is made of local time only, of the length that this command has given.
            if length == grant.length:
                grant.renewed(sent + length, self._session.now())
            if beat.release_requested_by is not None:
                self._session.notifications.report_release_request(grant, beat.release_requested_by)
        elif held and found is not None and beat is None and found.token >= grant.token and sent >= grant.lease.since:
            # Majority-committed, and no older than the grant itself; an id never comes back. Where the document was
            # missing (`MongoStore.renew`), only the time says that.
            self._ending.not_found(grant, noticed=True)
        elif found is not None and beat is None and grant.place_is_gone(sent):
            pass  # nothing renews it until it has a place again: its waiter is woken, and asks for one
        else:
            grant.postpone(self._session.now(), at_once=grant.lease.failures < 2)
        if grant.state is State.WAITING and found is not None:
            self._look_at_queue(grant, found)

    def _look_at_queue(self, grant: Grant, found: Found) -> None:
        """Wake the waiter if it was granted, or has moved up."""
        if grant.id not in found.waiters:
            grant.waiting.wake()  # granted, and the news was missed; or gone from the queue
        elif next(iter(found.waiters)) == grant.id and grant.waiting.at_head < found.token:
            grant.waiting.at_head = found.token
            grant.waiting.wake()  # it must know when the holder's lease ends
