"""Defects of the session, each a patch: see `defects`."""

from __future__ import annotations

from dataclasses import replace

from bson.int64 import Int64

from django_mongolock.engine import protocol
from django_mongolock.engine.actions import Answer
from django_mongolock.engine.grant import Grant, State
from django_mongolock.engine.replies import Beat, Found, Reply
from django_mongolock.engine.rule_in_python import _Rule
from django_mongolock.engine.session.cleanup import Cleanup
from django_mongolock.engine.session.commands import Commands
from django_mongolock.engine.session.local_queue import LocalQueue
from django_mongolock.engine.session.renewals import Renewals
from django_mongolock.engine.session.session import Session
from verify.faults.broken import Patches
from verify.simulation.client import SimStore
from verify.simulation.rule_defects import Document, Entries


def renewal_without_grant(patches: Patches) -> None:
    judge = Renewals.judge

    def judge_by_key(self: Renewals, grant: Grant, found: Found | None, number: int, *times: float) -> None:
        if found is not None and grant.state is State.HELD:
            found = replace(found, holders={grant.id: Beat(number, token=grant.token)} if found.holders else {})
        judge(self, grant, found, number, *times)

    patches.set(Renewals, "judge", judge_by_key)


def end_of_another_clock(patches: Patches) -> None:
    look, answer = SimStore.read, Commands.answer
    left: dict[str, float] = {}

    def read(self: SimStore, key: str, grant: str, timeout: float, owner: str | None = None) -> Reply:
        reply = look(self, key, grant, timeout, owner)
        mine = [e for e in self._servers.committed.get(key, {}).get("waiters", ()) if e["grant"] == grant]
        if not mine or reply.now is None:
            return reply
        left[grant] = (mine[0]["until"] - reply.now).total_seconds()
        return reply

    def believe(self: Commands, grant_id: str, reply: Reply, sent: float, number: int = -1) -> Answer:
        grant = self._session.registry.grants.get(grant_id)
        if number == -1 and grant is not None and reply.place is not None and grant_id in left:
            grant.renewed(sent + min(grant.lease.length, left.pop(grant_id)), self._session.now())
        return answer(self, grant_id, reply, sent, number)

    patches.set(SimStore, "read", read)
    patches.set(Commands, "answer", believe)


def next_not_queued(patches: Patches) -> None:
    patches.set(Commands, "_queue_next", lambda self, grant_id, timeout: None)


def heir_without_doubt(patches: Patches) -> None:
    finish = LocalQueue.finish_handover

    def without_doubt(self: LocalQueue, next_waiter: Grant, answer: Answer | None) -> None:
        before = next_waiter.outcome_unknown
        finish(self, next_waiter, answer)
        next_waiter.outcome_unknown = before

    patches.set(LocalQueue, "finish_handover", without_doubt)


def all_in_one(patches: Patches) -> None:
    def renew_due(self: Renewals, grants: list[Grant], now: float) -> None:
        if any(grant.lease.renew_at <= now for grant in grants):
            self._have_renewed(sorted(grants, key=lambda grant: grant.key))

    patches.set(Renewals, "_renew_due", renew_due)


def without_limit(patches: Patches) -> None:
    patches.set(Commands, "_seconds_for", lambda self, action: 60.0)


def loss_untold(patches: Patches) -> None:
    patches.set(Session, "lost", lambda self, grant, noticed=False: self.forget(grant))


def undone_release_kept(patches: Patches) -> None:
    def forget(self: Cleanup) -> None:
        self._commands.releases.undone(self._session.store.primary(), self._session.now())

    patches.set(Cleanup, "repeat_releases", forget)


def longest_place(patches: Patches) -> None:
    with_new, answer, renewed = _Rule.with_new, Commands.answer, Grant.renewed

    def add(self: _Rule, new: Document, queue: Entries, done: set[str], *, resumes: bool) -> Entries:
        if queue:
            new = {**new, "waiter_lease": Int64(min(3 * new["waiter_lease"], new["server_lease"]))}
        return with_new(self, new, queue, done, resumes=resumes)

    def believe(self: Commands, grant_id: str, reply: Reply, sent: float, number: int = -1) -> Answer:
        grant = self._session.registry.grants.get(grant_id)
        if grant is not None and reply.place is not None and reply.waiting > 1 and reply.beat == number:
            length = min(3 * grant.terms.waiter_lease, grant.terms.lease)
            grant.lease.waiter_length = max(grant.lease.waiter_length, length)
        return answer(self, grant_id, reply, sent, number)

    def longest(self: Grant, until: float, now: float, length: float = 0.0) -> None:
        renewed(self, max(until, self.lease.until), now, length)

    patches.set(_Rule, "with_new", add)
    patches.set(Commands, "answer", believe)
    patches.set(Grant, "renewed", longest)


def old_bells(patches: Patches) -> None:
    patches.set(protocol, "_newer", lambda result, last_token: (result.news, result.answer))
