"""Owners: on whose behalf a process holds a lock. A web session can be one; a logout releases what it holds."""

from __future__ import annotations

import secrets
from typing import Any, Final

from django.contrib.auth import SESSION_KEY
from django.contrib.auth.signals import user_logged_in, user_logged_out
from django.http import HttpRequest

from .backends.base import mongo_store
from .conf import get_settings
from .engine.logs import WARNING, log
from .engine.text_checks import check_fact
from .exceptions import LockError
from .inspection import operations
from .signals import lock_forced, send

__all__ = ["asession_owner", "release_owner", "session_owner"]

#: The key under which a session keeps its owner.
OWNER_KEY: Final = "_mongolock_owner"
#: How long a logout, or a worker that cleans up, waits for MongoDB, in seconds.
CLEANUP_TIMEOUT: Final = 2.0


def release_owner(owner: str, *, using: str | None = None) -> int:
    """Release every lock of *owner*, whichever process holds it; return how many were released.

    Other holders of a shared lock or a semaphore keep theirs. A holder that still runs learns of it at its next
    renewal; what it does until then is stopped only where its fencing token is compared. Raises LockBackendFailed.
    """
    name = check_fact("owner", owner)
    return 0 if name is None else release_holders(name, using)


def release_holders(owner: str, using: str | None = None, **which: Any) -> int:
    """See release_owner(). which: the options of `operations.release_owner`."""
    taken = operations.release_owner(mongo_store(using), owner, **which)
    _report(taken, using, operations.OWNER_DONE)
    return len(taken)


def release_gone(place: str, using: str | None = None) -> int:
    """Release every lock that is held at this *place* by a process that has ended; return how many other holders are
    left there. Raises LockBackendFailed."""
    taken, left = operations.release_place(mongo_store(using), place, CLEANUP_TIMEOUT)
    _report(taken, using, operations.OWNER_GONE)
    return left


def _report(taken: list[str], using: str | None, reason: str) -> None:
    for key in taken:
        send(lock_forced, key=key, using=using or get_settings().DATABASE, by="", reason=reason)


def keep_session(request: HttpRequest) -> float:
    """Have the session saved with the response, so that it lasts for its whole age again; return that, in seconds.

    The session was loaded before, so nothing waits here.
    """
    session = _session(request)
    session.modified = True
    age: float = session.get_expiry_age()
    return age


def session_owner(request: HttpRequest) -> str:
    """The owner that stands for the session of *request*, for ``mongo_lock(..., owner=session_owner(request))``.

    It is random and kept in the session, so it does not reveal the session key; a login, a logout or a change of the
    user makes a new one. A logout releases what it holds in MONGOLOCK["DATABASE"], and a login what it holds there by
    a claim. Raises TypeError without a session.
    """
    session = _session(request)
    return _owner(session, session.get(OWNER_KEY), session.get(SESSION_KEY))


async def asession_owner(request: HttpRequest) -> str:
    """See session_owner()."""
    session = _session(request)
    return _owner(session, await session.aget(OWNER_KEY), await session.aget(SESSION_KEY))


def _session(request: HttpRequest | None) -> Any:
    session = getattr(request, "session", None)
    if session is None:
        raise TypeError("the request has no session: put SessionMiddleware into MIDDLEWARE, and call this in a view")
    return session


def _owner(session: Any, kept: object, user: object) -> str:
    """The owner that the session *kept* for this *user*, or a new one. The session is loaded, so nothing waits here."""
    match kept:
        case [str(owner), known] if known == user:
            return owner
    owner = f"session:{secrets.token_urlsafe(16)}"
    session[OWNER_KEY] = [owner, user]
    return owner


def _release_on_logout(sender: object, request: HttpRequest | None, **kwargs: object) -> None:
    """Release what the session holds. For a session that never was an owner, nothing is sent."""
    if kept := _kept(request):
        _release(kept[0])


def _release_on_login(sender: object, request: HttpRequest | None, **kwargs: object) -> None:
    """Release the claims of the session from before the login: no one could give them back. What a process holds for
    it goes on."""
    kept = _kept(request)
    if kept and kept[1] != _session(request).get(SESSION_KEY):
        _release(kept[0], claims=True)


def _kept(request: HttpRequest | None) -> Any:
    session = getattr(request, "session", None)
    return session.get(OWNER_KEY) if session is not None else None


def _release(owner: str, **which: Any) -> None:
    try:
        release_holders(owner, timeout=CLEANUP_TIMEOUT, **which)
    except LockError as error:
        log(WARNING, "the locks of an ended session are not released: they end with their leases", error=error)


user_logged_in.connect(_release_on_login, dispatch_uid="django_mongolock.login")
user_logged_out.connect(_release_on_logout, dispatch_uid="django_mongolock.logout")
