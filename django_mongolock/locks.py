"""`mongo_lock` and `mongo_semaphore` make locks with the project's settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypedDict, Unpack, overload

from django.db.models import Model
from pymongo import AsyncMongoClient, MongoClient
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.client_session import ClientSession

from .backends import get_backend
from .conf import LockSettings, get_settings
from .context import holder_facts
from .engine.lock.lock import MongoLock
from .engine.lock.transaction import Atomic
from .engine.rule.document import UNLIMITED, Mode, Terms
from .engine.rule.options import LockOptions, Release, Seconds, Unset, as_seconds, check_number, foreign_option
from .engine.text_checks import check_key
from .keys import as_key, template_of, unexpected
from .transactions import DjangoAtomic, PendingRelease, open_transactions, warn_of_open

__all__ = ["MongoLock", "mongo_lock", "mongo_semaphore"]

Key = str | Model
#: The modes to choose from. A semaphore has a function of its own.
LockMode = Literal["exclusive", "shared"]


class DjangoLock(MongoLock):
    """A lock that takes the transactions of Django's databases into account. `mongo_lock` returns such a lock."""

    #: Whether the end of the block leaves the release to a streaming response.
    released_later = False

    def release(self, *, early: bool = False) -> bool:
        """See MongoLock.release(). With ``release="on_commit"``, an open transaction ends first."""
        if self._stays(early):
            return True
        warn = self._warning()
        released = super().release(early=early)
        warn()
        return released

    async def arelease(self, *, early: bool = False) -> bool:
        """See release()."""
        if self._stays(early):
            return True
        warn = self._warning()
        released = await super().arelease(early=early)
        warn()
        return released

    def _stays(self, early: bool) -> bool:
        return (self.released_later and self.held) or self._waits_for_commit(early)

    def _waits_for_commit(self, early: bool) -> bool:
        """Return whether an open transaction has to end first. If so, arrange the release for that moment.

        The transaction is not committed if the lock is known to be lost by then.
        """
        if self.options.release != "on_commit" or not ((opened := open_transactions()) and self.held):
            return False
        PendingRelease(partial(super().release, early=early), self.ensure_held).wait(opened)
        return True

    def _warning(self) -> Callable[[], object]:
        """Return a function to call after a release now. The function warns of a forgotten open transaction."""
        if self.options.release is not None or not ((opened := open_transactions()) and self.held):
            return bool
        return partial(warn_of_open, opened, self.keys[0], self._acquired()[0].acquired_from)

    @overload
    def atomic(self, client: AsyncMongoClient[Any]) -> Atomic[AsyncClientSession]: ...
    @overload
    def atomic(self, client: MongoClient[Any] | None = None, *, using: str | None = None) -> Atomic[ClientSession]: ...
    def atomic(self, client: Any = None, *, using: str | None = None) -> Any:
        """See MongoLock.atomic()."""
        alias: Any = using or self.options.using
        return Atomic(self, client) if client is not None else DjangoAtomic(self, alias)


class SemaphoreKeywords(TypedDict, total=False):
    """The options of `mongo_semaphore`, for type checkers. See `LockOptions`."""

    lease: Seconds | None
    wait: Seconds | Unset | None
    owner: str | None
    label: str | None
    min_hold: Seconds
    reentrant: bool
    auto_renew: bool
    max_hold: Seconds | None
    on_lost: Callable[[MongoLock], object] | None
    on_release_requested: Callable[[MongoLock], object] | None
    release: Release | None
    using: str | None


class LockKeywords(SemaphoreKeywords, total=False):
    """The options of `mongo_lock`, `LockedCommand` and locked rows, for type checkers. See `LockOptions`."""

    mode: LockMode


def mongo_lock(*keys: Key, **options: Unpack[LockKeywords]) -> MongoLock:
    """Return a lock on one or several keys, not yet acquired. Use it with ``with`` or ``async with``, or `acquire` it.

    A key is text, or a saved model instance (``"shop.order:<pk>"``). A lock on several keys acquires all or none,
    always in the same order. Each time is a number of seconds or a `timedelta`. The options:

    - lease: seconds that the lock lives after its process has died. A live process renews it. Default: setting
      LEASE.
    - wait: seconds to wait for the lock. 0 means a single attempt. None means no limit. Default: setting WAIT.
    - mode: "exclusive" (the default), or "shared" for readers. Readers exclude only exclusive holders.
    - owner: for whom the lock is held, such as the id of a task. If the process of a holder is proven dead, a lock with
      the same owner takes over at once, with a new fencing token.
    - label: text for the people who look at the locks.
    - min_hold: seconds that the key stays locked from the grant on, even if it is released sooner.
    - reentrant: whether this thread or task may take a key that it holds already. If not, that raises LockReentry.
    - auto_renew: whether the lease is renewed in the background (the default). If not, it ends unless you `extend` it.
    - max_hold: seconds after which the lock is no longer renewed, and is lost. For work that may hang.
    - on_lost: function that is called with the lock, once, in a thread of its own, when the lock was lost.
    - on_release_requested: function that is called in the same way for a request to release the lock.
    - release: "on_commit" releases the lock when the transactions that are open at the end of the block have ended.
      "now" releases it at the end of the block, without a warning about open transactions.
    - using: DATABASES alias. Default: setting DATABASE.

    Raises TypeError and ValueError for invalid arguments, before anything is sent.
    """
    return make_lock(keys, chosen(options))


def mongo_semaphore(
    key: Key, permits: int, *, weight: int = 1, resize: bool = False, **options: Unpack[SemaphoreKeywords]
) -> MongoLock:
    """Return a lock that up to *permits* holders share, each with a lease of its own.

    Name the same number of permits wherever you use a key. If the key is held with another number, acquiring it raises
    LockMisused, unless resize is true. The options are those of `mongo_lock`, and:

    - weight: number of holders as which this one counts. In the queue, no other overtakes it.
    - resize: whether holders may name different numbers of permits. The smallest number among them counts.

    A thread or task acquires the key once. With ``reentrant=True``, it shares that acquisition with itself.
    """
    check_number("permits", permits)  # None would be a lock
    semaphore = {"permits": permits, "weight": weight, "resize": resize}
    return make_lock((key,), chosen({**options, **semaphore}, [*SemaphoreKeywords.__annotations__, *semaphore]))


def chosen(options: Mapping[str, Any], known: Iterable[str] = LockKeywords.__annotations__) -> LockOptions:
    """Return the options that a user gives. Raise TypeError and ValueError for wrong or unknown ones."""
    for name in options:
        if name not in known:
            raise foreign_option(name) or unexpected(name, known)
    return LockOptions(**{name: as_seconds(value) for name, value in options.items()})


def make_lock(keys: tuple[Key, ...], options: LockOptions, **own: Any) -> DjangoLock:
    """Return a lock with the project's settings. *own* has options that are chosen for this lock alone."""
    if not keys:
        raise TypeError("name at least one key to lock")
    for key in keys[1:]:
        if isinstance(key, (int, float, timedelta)):  # as in other libraries' lock(name, timeout)
            meant = f'did you mean wait={as_seconds(key) + 0}? Or one key, as in f"order:{{pk}}"?'
            raise TypeError(f"a lock key must be a str, not {key!r}: {meant}")
    settings = get_settings()
    templates = {check_key(as_key(key), settings.KEY_PREFIX): template_of(key) for key in keys}
    wait = own.pop("wait", options.wait)
    resolved: dict[str, Any] = {"wait": settings.WAIT if isinstance(wait, Unset) else wait, "templates": templates}
    how = replace(options, using=options.using or settings.DATABASE, **own, **resolved)
    session, facts = get_backend(how.using).session, partial(holder_facts, options.label)
    return DjangoLock(session, tuple(sorted(templates)), _terms(how, settings), how, facts)


def _terms(options: LockOptions, settings: LockSettings) -> Terms:
    """Return the terms that the update on the server needs. The settings replace options that are not given."""
    lease = settings.LEASE if options.lease is None else options.lease
    mode: Mode = options.mode if options.permits is None else "semaphore"
    return Terms(
        mode=mode,
        capacity=options.permits or (UNLIMITED if mode == "shared" else 1),
        resize=options.resize,
        weight=options.weight,
        lease=lease,
        clock_margin=settings.CLOCK_MARGIN,
        waiter_lease=min(settings.WAITER_LEASE, lease),
        min_hold=options.min_hold,
        owner=options.owner,
    )
