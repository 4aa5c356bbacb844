"""Locks that are detached from the process that holds them."""

import weakref

from django_mongolock import mongo_lock
from django_mongolock.engine.detached import Parked, park_held
from django_mongolock.engine.document import Terms
from django_mongolock.engine.grant import State
from tests.support.looking import holder, new_key


def test_a_lock_that_is_detached_was_not_forgotten() -> None:
    """F96: its owner token lives until the grant is released here; the heartbeat, which sees a token die, would take a
    held grant for one that its code has dropped, and warn."""
    key = new_key()
    lock = mongo_lock(key).acquire()
    (grant,), (token,) = lock._own.grants, lock._own._owner_tokens
    states: list[State] = []
    weakref.finalize(token, lambda: states.append(grant.state))
    del token
    assert isinstance(park_held(lock, Terms(owner="a task"), {}), Parked)
    assert states == [State.RELEASED]
    assert holder(key)["process"] == "none"
