"""The renewals of a session's grants in bulk. The answers show which grants were lost, requested or granted."""

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
from .core import SessionCore
from .ending import Ending, EndReason
from .grant import Grant, State
from .lanes import RENEWAL, REQUEST

#: The least number of seconds for a renewal, however short the leases are.
SHORTEST_RENEWAL: Final = 0.1


class Renewals:
    """The renewal of what is due. Holders and waiters are renewed apart, so that no lease waits for a place in a queue.

    A batch that fails is split, or sent again unchanged: see `bulk`. For each answer, `judge` decides whether a grant
    lives on, is renewed again, or is lost.

    - in_threads: whether each batch has a thread of its own.
    """

    def __init__(self, session: SessionCore, commands: Commands, ending: Ending) -> None:
        self.in_threads = True
        self._session = session
        self._commands = commands
        self._ending = ending

    def next_due(self) -> float:
        """Return the time of the next renewal or loss."""
        grants = list(self._session.registry.grants.values())
        return min(
            (min(grant.lease.renew_at, grant.ends_at) if grant.renewable else grant.ends_at for grant in grants),
            default=FOREVER,
        )

    def do_due(self, now: float) -> None:
        """Renew what is due, and report losses."""
        grants = list(self._session.registry.grants.values())
        for grant in grants:
            if grant.lost:
                self._ending.end(grant, EndReason.LOST, noticed=True)
        for state in (State.HELD, State.WAITING):
            due = [grant for grant in grants if grant.state is state and grant.renewable]
            stuck = [grant for grant in due if grant.lease.stuck and grant.lease.renew_at <= now]
            # A batch that is tried again includes no grant that was renewed just now.
            failed = [grant for grant in due if grant.lease.failures and not grant.lease.stuck]
            fresh = [grant for grant in due if not grant.lease.failures]
            for together in (fresh, failed):
                self._renew_due(together, now)
            for grant in stuck:
                self._have_renewed([grant])

    def _renew_due(self, grants: list[Grant], now: float) -> None:
        """Renew those of *grants* that are due, in batches."""
        late = [grant.length for grant in grants if grant.lease.renew_at <= now]
        # Include grants that would be due before these are due again, to save commands now and later.
        soon = now + min(late, default=-FOREVER) / 3
        # Exclude deferred grants, because a renewal would conflict with the transaction.
        due = [grant for grant in grants if grant.lease.renew_at <= (now if grant.lease.deferred else soon)]
        # The most urgent go first. Otherwise the last ones might never get a thread in time.
        for batch in batches(sorted(due, key=lambda grant: grant.lease.until)):
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
        later try a third. A renewal that begins later gets at most a quarter, or two thirds, of the time that is left.
        """
        now, failed = self._session.now(), grants[0].lease.failures > 0
        # A grant that waited in the queue has the time of a place until its renewal, however long its lease is.
        length = min(min(grant.length, grant.lease.span(now)) for grant in grants) / (3 if failed else 6)
        left = min((grant.lease.until - now for grant in grants if grant.lease.until > now), default=FOREVER)
        limit = min(length, left * (2 / 3 if failed else 1 / 4))
        return min(self._commands.timeout, max(SHORTEST_RENEWAL, limit))

    def renew(self, grants: Sequence[Grant], limit: float = FOREVER, entered: float = FOREVER) -> None:
        """Renew a batch, and tell lost grants from late ones.

        - limit: seconds for a part of a failed batch.
        - entered: time when a thread was asked for. If no thread came within the limit, nothing is sent, and the
          grants become due together with others.
        """
        is_part, now, known = limit < FOREVER, self._session.now(), self._session.registry.grants
        living = [grant for grant in grants if grant.id in known and (grant.state is State.WAITING or grant.held)]
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
                self._session.heartbeat.schedule(min(grant.lease.renew_at for grant in grants))

    def _renew(self, grants: Sequence[Grant], limit: float, *, is_part: bool) -> Sequence[Sequence[Grant]]:
        """Send the renewal, and judge its answer. Return the parts that have to be sent instead."""
        number, sent, primary = next(self._commands.numbers), self._session.now(), self._session.store.primary()
        # Read the lengths before sending. This command gives the length of a place to a waiter that holds the lock at
        # the answer.
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
        """Decide what renewal *number* says about the grant. A successful renewal gives *length*, counted from *sent*.

        If the grant's length has changed meanwhile, a later command has been answered earlier. The grant is a waiter
        that holds the lock now, or was extended. The deadline from the later command stands.
        """
        beats = {} if found is None else {**found.waiters, **found.holders}
        beat, held = beats.get(grant.id), grant.state is State.HELD
        if held and beat is not None and beat.token != grant.token:
            beat = None  # taken away, and queued again by an earlier command that was delayed
        if found is not None and beat is not None and beat.number == number:
            grant.lease.uncontended = grant.lease.uncontended and not found.waiters
            # Every event up to this token is older than this answer. For a granted waiter these are the events before
            # its own token, so that the bell of its grant still counts. Write the token before the end, see
            # `Waits.result`.
            token = beat.token - 1 if beat.token else found.token
            grant.waiting.last_token = max(grant.waiting.last_token, token)
            # Rule: the deadline is derived from local time only, with the length that this command has given.
            if length == grant.length:
                grant.renewed(sent + length, self._session.now())
            if beat.release_requested_by is not None:
                self._session.notifications.report_release_request(grant, beat.release_requested_by)
        elif held and found is not None and beat is None and found.token >= grant.token and sent >= grant.lease.since:
            # The answer is majority-committed and no older than the grant itself, and an id never comes back. If the
            # document was missing (`MongoStore.renew`), only the time shows a loss.
            self._ending.not_found(grant, noticed=True)
        elif found is not None and beat is None and grant.place_is_gone(sent):
            pass  # no renewal until it has a place again: its waiter is woken, and asks for one
        else:
            grant.postpone(self._session.now(), at_once=grant.lease.failures < 2)
        if grant.state is State.WAITING and found is not None:
            grant.look_at_queue(found)
