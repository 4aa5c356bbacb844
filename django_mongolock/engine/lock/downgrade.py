"""The change of an exclusive lock into a shared one, without a gap."""

from __future__ import annotations

from dataclasses import replace

from ...exceptions import LockLost, LockMisused
from ..protocol import procedures
from ..protocol.actions import Protocol
from ..rule.document import UNLIMITED
from ..session.ending import EndReason
from ..session.grant import Grant
from ..session.session import Session
from .grants import LockGrants


def downgrade(own: LockGrants) -> Protocol[bool]:
    """Hold every key of *own* as a reader from now on. Return whether all are held."""
    session, grants = own.session, own.grants
    if session is None or not own.all_held(grants):
        return False
    for grant in grants:
        if grant.terms.mode != "exclusive":
            raise LockMisused(f"{grant.key!r} is held as {grant.terms.mode}: only an exclusive lock can be downgraded")
        if grant.lease.deferred:
            raise LockMisused(f"{grant.key!r} is held for an atomic() block: leave that before you downgrade")
        if len(grant.users) > 1:
            raise LockMisused(
                f"{grant.key!r} is also held by another lock object of this thread or task (reentrant=True): leave its "
                "block before you downgrade"
            )
    for grant in grants:
        terms = replace(grant.terms, mode="shared", capacity=UNLIMITED, lease=grant.lease.length)
        reader = own.new_grant(session, grant.key, grant.worker, session.registry.held_by(grant.worker), terms)
        token = reader.new_owner_token(session.heartbeat.inbox.put)
        reader.acquired_from = grant.acquired_from
        if not (yield from _replace(own, session, grant, reader)):
            return False
        own.replace(grant, reader, token)
    return own.all_held(own.grants)


def _replace(own: LockGrants, session: Session, grant: Grant, reader: Grant) -> Protocol[bool]:
    """Let *reader* take the place of *grant*. Return whether *grant* was held until then."""
    until, now = grant.lease.until, session.now()
    reader.lease.last = grant.lease.last
    reader.waiting.back_by = until + session.commands.timeout
    session.queue.join(reader, trial=True)
    session.registry.expect(reader)
    try:
        # Mark it released first. From now on it is no loss if a renewal does not find the grant.
        granted = None
        if grant.mark_released():
            granted = yield from procedures.downgrade(
                reader.acquisition, grant.id, until, now, leave_tombstone=grant.needs_tombstone()
            )
            if granted is None:
                session.ending.not_found(grant, by_release=True)
    except BaseException as error:
        given_up, own.grants = own.grants, ()  # of all keys, because a lock that is held in part is of no use
        own.give_up(session, reader, error)
        for each in {grant, *given_up}:
            session.ending.end(each, EndReason.ABANDONED)
        raise
    if granted is None:
        own.give_up(session, reader, LockLost(grant.key, grant.token, grant.reason))
        session.ending.end(grant, EndReason.LOST)
        return False
    session.register_grant(reader, granted)
    session.ending.end(grant, EndReason.REPLACED)
    return True
