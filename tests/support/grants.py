"""What stands behind a lock object: its grants, as the engine knows them."""

from django_mongolock.engine.lock.grants import LockGrants
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.session.grant import Grant
from django_mongolock.engine.session.session import Session


def own(lock: MongoLock) -> LockGrants:
    """What the lock object has, and the steps by which it gets it."""
    return lock._own


def grant_of(lock: MongoLock) -> Grant:
    """The grant of a lock on one key, which is held."""
    (grant,) = own(lock).grants
    return grant


def new_grant(session: Session, lock: MongoLock, worker: object) -> Grant:
    """A grant for the first key of *lock*, which was not asked for."""
    return own(lock).new_grant(session, lock.keys[0], worker, session.registry.held_by(worker), lock.terms)
