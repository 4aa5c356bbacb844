"""Owners, on whose behalf a process holds a lock. A web session can be an owner. A logout releases its locks."""

from __future__ import annotations

import hashlib
import secrets
from typing import Any, Final

from asgiref.sync import sync_to_async
from django.contrib.auth.signals import user_logged_out
from django.contrib.sessions.backends import signed_cookies
from django.http import HttpRequest
from django.utils.crypto import salted_hmac

from .backends import mongo_store
from .conf import get_settings
from .engine.logs import WARNING, log
from .engine.text_checks import check_fact
from .exceptions import LockError
from .inspection import operations
from .signals import lock_forced, send

__all__ = ["asession_owner", "release_owner", "session_owner"]

#: The key under which a session keeps its owner.
OWNER_KEY: Final = "_mongolock_owner"
#: The seconds that a logout, or a worker that cleans up, waits for MongoDB.
CLEANUP_TIMEOUT: Final = 2.0


def release_owner(owner: str, *, using: str | None = None) -> int:
    """Release every lock of *owner*, in any process. Return the number of released locks.

    Other holders of a shared lock or a semaphore keep theirs. A running holder learns of the release at its next
    renewal. Until then, writes of that holder are stopped only where its fencing token is compared. Raises
    LockBackendFailed.
    """
    owner = check_fact("owner", owner) or ""
    return sum(release_holders(each, using) for each in (owner, claim_owner(owner)))


def claim_owner(owner: str) -> str:
    """Return the digest by which claims store the text of an *owner*, which whoever is refused can see."""
    return f"claim:{hashlib.sha256(owner.encode()).hexdigest()[:32]}"


def release_holders(owner: str, using: str | None = None, **which: Any) -> int:
    """See release_owner(). The options in *which* are those of `operations.release_owner`."""
    taken, _left = operations.release_owner(mongo_store(using), owner, **which)
    _report(taken, using, operations.OWNER_DONE)
    return len(taken)


def release_gone(place: str, using: str | None = None) -> int:
    """Release every lock that a process which has ended holds at this *place*. Raises LockBackendFailed.

    Return the number of other holders that are left there.
    """
    reason = operations.OWNER_GONE
    taken, left = operations.release_owner(
        mongo_store(using), place, field="place", gone=True, reason=reason, timeout=CLEANUP_TIMEOUT
    )
    _report(taken, using, reason)
    return left


def _report(taken: list[str], using: str | None, reason: str) -> None:
    for key in taken:
        send(lock_forced, key=key, using=using or get_settings().DATABASE, by="", reason=reason)


def keep_session(request: HttpRequest) -> float:
    """Mark the session as modified, so that the response saves it for its whole age again. Return the age in seconds.

    The session was loaded before, so nothing waits here.
    """
    session = session_of(request)
    session.modified = True
    age: float = session.get_expiry_age()
    return age


def session_owner(request: HttpRequest) -> str:
    """Return the owner that stands for the session of *request*, for ``mongo_lock(..., owner=session_owner(request))``.

    The owner is made of the session's key and the project's secret. All requests of a session therefore have the same
    owner, and the owner does not reveal the key. A new session has no key, and keeps a random owner. A login keeps the
    owner. Logout releases the locks of the session in MONGOLOCK["DATABASE"]. A session that ends in another way leaves
    its locks to their leases. Raises TypeError without a session.
    """
    session = session_of(request)
    if (owner := session.get(OWNER_KEY)) is None:
        session[OWNER_KEY] = owner = _derived(session)
    return str(owner)


async def asession_owner(request: HttpRequest) -> str:
    """See session_owner()."""
    return await sync_to_async(session_owner)(request)


def session_is_gone(request: HttpRequest) -> bool:
    """Return whether the session of *request* was ended by another request."""
    session = session_of(request)
    return _is_stored(session) and not session.exists(session.session_key)


def session_of(request: HttpRequest) -> Any:
    """Return the session of a request. Raises TypeError for an object without one."""
    session = getattr(request, "session", None)
    if session is None:
        kind = type(request).__name__
        raise TypeError(
            f"an owner is a text, or a request with a session (SessionMiddleware in MIDDLEWARE), not {kind}"
        )
    return session


def _is_stored(session: Any) -> bool:
    """Return whether the session has a lasting key.

    A session has none in its first request, or if the cookie itself keeps the session.
    """
    return session.session_key is not None and not isinstance(session, signed_cookies.SessionStore)


def _derived(session: Any) -> str:
    # A session without a key has no other request yet. Do not store it here, because the caller may forget it again.
    key = session.session_key if _is_stored(session) else secrets.token_urlsafe(16)
    return f"session:{salted_hmac('django_mongolock.owners', key, algorithm='sha256').hexdigest()[:32]}"


def _release_on_logout(sender: object, request: HttpRequest | None, **kwargs: object) -> None:
    """Release the locks of the session. For a session that never was an owner, nothing is sent."""
    session = getattr(request, "session", None)
    if session is None or (owner := session.pop(OWNER_KEY, None)) is None:
        return
    try:
        release_holders(owner, timeout=CLEANUP_TIMEOUT)
    except LockError as error:
        log(WARNING, "the locks of an ended session are not released: they end with their leases", error=error)


def watch_sessions() -> None:
    """Release the locks of a session on logout. Called once, when the apps are ready."""
    user_logged_out.connect(_release_on_logout, dispatch_uid="django_mongolock.logout")
