"""The grants of a lock object, as the engine knows them."""

from django_mongolock.engine.lock.grants import LockGrants
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.session.grant import Grant
from django_mongolock.engine.session.session import Session


def own(lock: MongoLock) -> LockGrants:
    """Return the grants of the lock object, with the steps that acquire them."""
    return lock._own


def grant_of(lock: MongoLock) -> Grant:
    """Return the grant of a held lock on one key."""
    (grant,) = own(lock).grants
    return grant


def new_grant(session: Session, lock: MongoLock, worker: object) -> Grant:
    """Make a grant for the first key of *lock*. No command is sent."""
    return own(lock).new_grant(session, lock.keys[0], worker, session.registry.held_by(worker), lock.terms)
