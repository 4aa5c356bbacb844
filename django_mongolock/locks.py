"""`mongo_lock` and `mongo_semaphore`: the engine with the project's settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypedDict, Unpack, overload

from asgiref.sync import iscoroutinefunction
from django.db.models import Model
from pymongo import AsyncMongoClient, MongoClient
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.client_session import ClientSession

from .backends.atomic import DjangoAtomic
from .backends.base import get_backend
from .backends.transactions import RELEASES, PendingRelease, Release, open_transactions, warn_of_open
from .conf import get_settings
from .context import holder_facts
from .engine.lock.lock import MongoLock
from .engine.lock.transaction import Atomic
from .engine.rule.document import MAX_HOLDERS, UNLIMITED, Mode, Terms
from .engine.rule.options import (
    UNSET,
    Options,
    Seconds,
    Unset,
    as_seconds,
    check_flag,
    check_seconds,
    check_wait,
    foreign_option,
)
from .engine.session.session import Session
from .engine.text_checks import check_fact, check_key
from .keys import as_key, template_of, unexpected

__all__ = ["MongoLock", "mongo_lock", "mongo_semaphore"]

Key = str | Model
#: The modes to choose from; a semaphore has a function of its own.
LockMode = Literal["exclusive", "shared"]


class DjangoLock(MongoLock):
    """A lock that takes the transactions of Django's databases into account: what `mongo_lock` returns."""

    def __init__(
        self,
        session: Callable[[], Session],
        keys: tuple[str, ...],
        options: Options,
        facts: Callable[[], Mapping[str, str | int]],
        *,
        release: Release | None,
        using: str,
    ) -> None:
        super().__init__(session, keys, options, facts)
        self.using = using
        self.release_when = release
        #: Whether the end of its block leaves the release to a streaming response.
        self.released_later = False

    def release(self, *, early: bool = False) -> bool:
        """See MongoLock.release(). With ``release="on_commit"``, an open transaction ends first."""
        return True if self._stays(early) else super().release(early=early)

    async def arelease(self, *, early: bool = False) -> bool:
        """See release()."""
        return True if self._stays(early) else await super().arelease(early=early)

    def _stays(self, early: bool) -> bool:
        return (self.released_later and self.held) or self._waits_for_commit(early)

    def _waits_for_commit(self, early: bool) -> bool:
        """Return whether an open transaction has to end first; if so, release then.

        The transaction is not committed if the lock is known to be lost by then.
        """
        if self.release_when == "now" or not ((opened := open_transactions()) and self.held):
            return False
        if self.release_when is None:
            warn_of_open(opened, self.keys[0], self._acquired()[0].acquired_from)
            return False
        PendingRelease(partial(super().release, early=early), self.ensure_held).wait(opened)
        return True

    @overload
    def atomic(self, client: AsyncMongoClient[Any]) -> Atomic[AsyncClientSession]: ...
    @overload
    def atomic(self, client: MongoClient[Any] | None = None, *, using: str | None = None) -> Atomic[ClientSession]: ...
    def atomic(self, client: Any = None, *, using: str | None = None) -> Any:
        """See MongoLock.atomic()."""
        return Atomic(self, client) if client is not None else DjangoAtomic(self, using or self.using)


class SemaphoreOptions(TypedDict, total=False):
    """The options of `mongo_semaphore`: see `mongo_lock`."""

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


class LockOptions(SemaphoreOptions, total=False):
    """The options of `mongo_lock`, `mongo_locked`, `LockedCommand` and locked rows: see `mongo_lock`."""

    mode: LockMode


def mongo_lock(*keys: Key, **options: Unpack[LockOptions]) -> MongoLock:
    """A lock on one or several keys, not yet acquired: use it with ``with`` or ``async with``, or `acquire` it.

    A key is text, or a saved model instance (``"shop.order:<pk>"``). Of several keys, it acquires all or none, always
    in the same order. Each time is a number of seconds or a `timedelta`. The options:

    - lease: seconds that the lock lives after its process has died. It is renewed until then. Default: the setting
      LEASE.
    - wait: seconds to wait for the lock. 0: a single attempt. None: no limit. Default: the setting WAIT.
    - mode: "exclusive" (the default), or "shared" for readers, which exclude only exclusive holders.
    - owner: for whom the lock is held, such as the id of a task. If the process of a holder is proven dead, a lock with
      the same owner takes over at once, with a new fencing token.
    - label: text for the people who look at the locks.
    - min_hold: seconds that the key stays locked from the grant on, even if it is released sooner.
    - reentrant: whether this thread or task may take a key that it holds already. If not, that raises LockReentry.
    - auto_renew: whether the lease is renewed in the background (the default). If not, it ends unless you `extend` it.
    - max_hold: seconds after which the lock is no longer renewed, and is lost. For work that may hang.
    - on_lost: a function that is called with the lock, once, in a thread of its own, when the lock was lost.
    - on_release_requested: the same for a request to release the lock.
    - release: "on_commit" releases the lock when the transactions that are open at the end of the block have ended.
      "now" releases it at the end of the block, without a warning about open transactions.
    - using: the DATABASES alias. Default: the setting DATABASE.

    Raises TypeError and ValueError for invalid arguments, before anything is sent.
    """
    check_options(options)
    mode = options.get("mode", "exclusive")
    return make_lock(keys, mode, 1 if mode == "exclusive" else UNLIMITED, options)


def mongo_semaphore(
    key: Key, permits: int, *, weight: int = 1, resize: bool = False, **options: Unpack[SemaphoreOptions]
) -> MongoLock:
    """A lock that up to *permits* holders share, each with a lease of its own. The options are those of `mongo_lock`.

    Name the same number of permits wherever you use a key: while it is held with another one, acquiring it raises
    LockMisused, unless resize is true. Then the smallest number among the holders counts. weight: as how many holders
    this one counts; in the queue, no other overtakes it. A thread or task acquires the key once: with
    ``reentrant=True`` it shares that with itself.
    """
    check_options(options, [*SemaphoreOptions.__annotations__, "permits", "weight", "resize"])
    check_permits(permits, weight, resize)
    return make_lock((key,), "semaphore", permits, options, resize=resize, weight=weight)


def check_permits(permits: object, weight: object, resize: object) -> None:
    """Raise TypeError or ValueError for arguments that `mongo_semaphore` does not take."""
    check_flag("resize", resize)
    most: Any = MAX_HOLDERS
    for name, value in (("permits", permits), ("weight", weight)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} is a whole number, not {type(value).__name__}")
        if not 1 <= value <= most:
            raise ValueError(f"{name} must be at least 1 and at most {most}, not {value}")
        most = value


def check_options(options: Mapping[str, Any], known: Iterable[str] = LockOptions.__annotations__) -> None:
    """Raise TypeError or ValueError for invalid options, or for one that is not *known*. Needs no settings."""
    for name in options:
        if name not in known:
            raise foreign_option(name) or unexpected(name, known)
    for name in ("lease", "max_hold"):
        if options.get(name) is not None:
            check_seconds(name, options[name])
    if not isinstance(options.get("wait", UNSET), Unset):
        check_wait(options["wait"])
    for name in ("owner", "label"):
        check_fact(name, options.get(name))
    _check_min_hold(options.get("min_hold", 0))
    _check_choices(options)
    for name in ("reentrant", "auto_renew"):
        check_flag(name, options.get(name, True))
    for name in ("on_lost", "on_release_requested"):
        _check_callback(name, options.get(name))


def _check_callback(name: str, callback: object) -> None:
    if callback is not None and not callable(callback):
        raise TypeError(f"{name} must be a function that takes the lock, not {type(callback).__name__}")
    if iscoroutinefunction(callback) or iscoroutinefunction(getattr(callback, "__call__", None)):  # noqa: B004
        raise TypeError(f"{name} is called in a thread without an event loop: it cannot be a coroutine function")


def _check_choices(options: Mapping[str, Any]) -> None:
    if (mode := options.get("mode", "exclusive")) not in ("exclusive", "shared"):
        raise ValueError(f'mode is "exclusive" or "shared", not {mode!r}; for a semaphore use mongo_semaphore()')
    if (release := options.get("release")) not in (None, *RELEASES):
        raise ValueError(f'release is "on_commit" or "now", not {release!r}')


def _check_min_hold(value: object) -> float:
    value = as_seconds(value)
    return 0.0 if value == 0 and not isinstance(value, bool) else check_seconds("min_hold", value)


def make_lock(
    keys: tuple[Key, ...],
    mode: Mode,
    capacity: int,
    options: Mapping[str, Any],
    *,
    resize: bool = False,
    weight: int = 1,
    whole: bool = False,
) -> DjangoLock:
    """A lock by options that were checked. whole: see `Options`."""
    if not keys:
        raise TypeError("name at least one key to lock")
    for key in keys[1:]:
        if isinstance(key, (int, float, timedelta)):  # as in other libraries' lock(name, timeout)
            raise TypeError(f"a lock key must be a str, not {key!r}: did you mean wait={as_seconds(key) + 0}?")
    settings = get_settings()
    lease, max_hold = as_seconds(options.get("lease")), as_seconds(options.get("max_hold"))
    length = settings.LEASE if lease is None else float(lease)
    wait = options.get("wait", UNSET)
    label = check_fact("label", options.get("label"))
    templates = {check_key(as_key(key), settings.KEY_PREFIX): template_of(key) for key in keys}
    terms = Terms(
        mode=mode,
        capacity=capacity,
        resize=resize,
        weight=weight,
        lease=length,
        clock_margin=settings.CLOCK_MARGIN,
        waiter_lease=min(settings.WAITER_LEASE, length),
        min_hold=_check_min_hold(options.get("min_hold", 0)),
        owner=check_fact("owner", options.get("owner")),
    )
    how = Options(
        terms=terms,
        wait=settings.WAIT if isinstance(wait, Unset) else check_wait(wait),
        reentrant=options.get("reentrant", False),
        auto_renew=options.get("auto_renew", True),
        whole=whole,
        max_hold=max_hold,
        on_lost=options.get("on_lost"),
        on_release_requested=options.get("on_release_requested"),
        templates=templates,
    )
    alias = options.get("using") or settings.DATABASE
    session, names = get_backend(alias).session, tuple(sorted(templates))
    return DjangoLock(session, names, how, partial(holder_facts, label), release=options.get("release"), using=alias)
