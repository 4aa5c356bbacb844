"""`mongo_lock` and `mongo_semaphore`: the engine with the project's settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypedDict, overload

from django.db.models import Model
from pymongo import AsyncMongoClient, MongoClient
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.client_session import ClientSession

from .backends.atomic import DjangoAtomic
from .backends.base import get_backend
from .backends.transactions import RELEASES, HeldLock, Release, open_transactions, warn_of_open
from .conf import get_settings
from .context import holder_facts
from .engine.document import UNLIMITED, Mode, Terms, check_fact, check_key
from .engine.lock import UNSET, MongoLock, Options, Unset, check_seconds, check_wait
from .engine.session.session import Session
from .engine.transaction import Atomic
from .keys import as_key, template_of, unexpected

Key = str | Model
#: The modes to choose from; a semaphore has a function of its own.
LockMode = Literal["exclusive", "shared"]


class DjangoLock(MongoLock):
    """A lock that knows the transactions of Django's databases. Made by `mongo_lock` and `mongo_semaphore`."""

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
        #: Does something else give it back, later than the end of its block?
        self.kept = False

    def release(self, *, early: bool = False) -> bool:
        """See MongoLock.release(). With ``release="on_commit"`` and inside a transaction: when that has ended."""
        return True if self._stays() else super().release(early=early)

    async def arelease(self, *, early: bool = False) -> bool:
        """See release()."""
        return True if self._stays() else await super().arelease(early=early)

    def _stays(self) -> bool:
        return (self.kept and self.held) or self._waits_for_commit()

    def _waits_for_commit(self) -> bool:
        """Is a transaction to end first? It must not be committed if the lock is known to be lost by then."""
        if self.release_when == "now" or not (self._is_ours() and (opened := open_transactions()) and self.held):
            return False
        if self.release_when is None:
            warn_of_open(opened, self.keys[0], self._grants[0].acquired_from)
            return False
        HeldLock(super().release, self.ensure_held).wait(opened)
        return True

    @overload
    def atomic(self, client: AsyncMongoClient[Any]) -> Atomic[AsyncClientSession]: ...
    @overload
    def atomic(self, client: MongoClient[Any] | None = None, *, using: str | None = None) -> Atomic[ClientSession]: ...
    def atomic(self, client: Any = None, *, using: str | None = None) -> Any:
        """See MongoLock.atomic()."""
        return Atomic(self, client) if client is not None else DjangoAtomic(self, using or self.using)


class LockOptions(TypedDict, total=False):
    """The options of `mongo_lock`, for those that pass them on."""

    lease: float | None
    wait: float | Unset | None
    mode: LockMode
    owner: str | None
    label: str | None
    min_hold: float
    reentrant: bool
    auto_renew: bool
    max_hold: float | None
    on_lost: Callable[[MongoLock], object] | None
    on_release_requested: Callable[[MongoLock], object] | None
    release: Release | None
    using: str | None


_AMBIGUOUS = {"timeout", "ttl", "expire", "expires", "expiry", "blocking_timeout", "lock_timeout", "blocking"}


def mongo_lock(
    *keys: Key,
    lease: float | None = None,
    wait: float | Unset | None = UNSET,
    mode: LockMode = "exclusive",
    owner: str | None = None,
    label: str | None = None,
    min_hold: float = 0,
    reentrant: bool = False,
    auto_renew: bool = True,
    max_hold: float | None = None,
    on_lost: Callable[[MongoLock], object] | None = None,
    on_release_requested: Callable[[MongoLock], object] | None = None,
    release: Release | None = None,
    using: str | None = None,
    **unknown: Any,
) -> MongoLock:
    """A lock on one or several keys, not yet acquired: use it with ``with`` or ``async with``, or `acquire` it.

    keys: text, or saved model instances (``"shop.order:<pk>"``). Several: all or none, acquired in one order.
    lease: seconds that the lock lives after its process has died (MONGOLOCK["LEASE"]); it is renewed until then.
    wait: seconds to wait for it (MONGOLOCK["WAIT"]); 0: a single try; None: without end.
    mode: "exclusive", or "shared" for readers, who exclude only the exclusive.
    owner: who is meant to hold it, such as a task's id, so that it can go on after a crash: whoever asks with the
    owner of a holder whose process is gone for sure (on this machine, in this container) takes its place at once, with
    a new fencing token. While that process may live, it waits in its turn.
    label: a word to the people who look at the locks. min_hold: seconds that the key stays locked from the grant
    on, even if it is released before. reentrant: may this thread or task take a key again that it holds? If not,
    LockReentry tells of it, instead of a wait for oneself. auto_renew: renew in the background; if not, the
    lease ends unless you `extend` it. max_hold: seconds after which it is renewed no more and is lost, for work that
    may hang. on_lost: called with the lock, once, from another thread, when it was lost. on_release_requested: the
    same when somebody asks for its release (`MongoLock.release_requested`). release: "on_commit" to give it back when
    the transactions that are open at the end of the block have ended, by commit or rollback, on all databases of this
    thread; "now" to give it back at once and without a warning of that. using: the DATABASES alias, if not
    MONGOLOCK["DATABASE"].

    Raises TypeError and ValueError for arguments that cannot be meant, before anything is sent.
    """
    _refuse(unknown, LockOptions.__annotations__)
    capacity = 1 if mode == "exclusive" else UNLIMITED
    options = LockOptions(
        lease=lease,
        wait=wait,
        mode=mode,
        owner=owner,
        label=label,
        min_hold=min_hold,
        reentrant=reentrant,
        auto_renew=auto_renew,
        max_hold=max_hold,
        on_lost=on_lost,
        on_release_requested=on_release_requested,
        release=release,
        using=using,
    )
    return _make(keys, mode, capacity, options)


def mongo_semaphore(
    key: Key,
    permits: int,
    *,
    lease: float | None = None,
    wait: float | Unset | None = UNSET,
    owner: str | None = None,
    label: str | None = None,
    min_hold: float = 0,
    reentrant: bool = False,
    auto_renew: bool = True,
    max_hold: float | None = None,
    on_lost: Callable[[MongoLock], object] | None = None,
    on_release_requested: Callable[[MongoLock], object] | None = None,
    release: Release | None = None,
    using: str | None = None,
    **unknown: Any,
) -> MongoLock:
    """A lock that *permits* many may hold at once, each with a lease of its own. The rest is as for `mongo_lock`.

    All who use a key should name the same number of permits; if not, the smallest of those who hold it counts. A thread
    or task has one permit at most: with ``reentrant=True`` it shares that with itself.
    """
    _refuse(unknown, [name for name in LockOptions.__annotations__ if name != "mode"])
    if isinstance(permits, bool) or not isinstance(permits, int):
        raise TypeError(f"permits is a whole number, not {type(permits).__name__}")
    if not 1 <= permits < UNLIMITED:
        raise ValueError(f"permits must be at least 1 and less than {UNLIMITED}, not {permits}")
    options = LockOptions(
        lease=lease,
        wait=wait,
        owner=owner,
        label=label,
        min_hold=min_hold,
        reentrant=reentrant,
        auto_renew=auto_renew,
        max_hold=max_hold,
        on_lost=on_lost,
        on_release_requested=on_release_requested,
        release=release,
        using=using,
    )
    return _make((key,), "semaphore", permits, options)


def check_options(options: Mapping[str, Any], also: Iterable[str] = ()) -> None:
    """Raise TypeError or ValueError for options that cannot be meant. Needs no settings. also: what else there is."""
    known = LockOptions.__annotations__
    _refuse([name for name in options if name not in known], [*known, *also])
    if options.get("lease") is not None:
        check_seconds("lease", options["lease"])
    if not isinstance(options.get("wait", UNSET), Unset):
        check_wait(options["wait"])
    for name in ("owner", "label"):
        check_fact(name, options.get(name))
    check_min_hold(options.get("min_hold", 0))
    check_mode(options.get("mode", "exclusive"))
    if options.get("release") not in (None, *RELEASES):
        raise ValueError(f'release is "on_commit" or "now", not {options["release"]!r}')
    for name in ("on_lost", "on_release_requested"):
        if (callback := options.get(name)) is not None and not callable(callback):
            raise TypeError(f"{name} is called with the lock: it is no {type(callback).__name__}")
    if options.get("max_hold") is not None:
        check_seconds("max_hold", options["max_hold"])


def check_min_hold(value: object) -> float:
    """Return *value* if it is a time to hold a lock at least: seconds, or 0. Raises TypeError, ValueError."""
    return 0.0 if value == 0 and not isinstance(value, bool) else check_seconds("min_hold", value)


def check_mode(mode: object) -> None:
    """Raise ValueError if `mongo_lock` has no such mode."""
    if mode not in ("exclusive", "shared"):
        raise ValueError(f'mode is "exclusive" or "shared", not {mode!r}; for a semaphore use mongo_semaphore()')


def _refuse(unknown: Iterable[str], known: Iterable[str]) -> None:
    for name in unknown:
        if name in _AMBIGUOUS:
            raise TypeError(
                f"{name!r} could mean two things: use lease= (seconds that a lock lives after its process has died) "
                "or wait= (seconds to wait for it; 0: a single try)"
            )
        raise unexpected(name, known)


def _make(keys: tuple[Key, ...], mode: Mode, capacity: int, options: LockOptions) -> DjangoLock:
    if not keys:
        raise TypeError("name at least one key to lock")
    check_options(options)
    settings = get_settings()
    length = settings.LEASE if options["lease"] is None else float(options["lease"])
    wait = options["wait"]
    terms = Terms(
        mode=mode,
        capacity=capacity,
        lease=length,
        drift=settings.CLOCK_MARGIN,
        waiter_lease=min(settings.WAITER_LEASE, length),
        min_hold=check_min_hold(options["min_hold"]),
        owner=check_fact("owner", options["owner"]),
    )
    templates = {check_key(as_key(key), settings.KEY_PREFIX): template_of(key) for key in keys}
    label = check_fact("label", options["label"])
    how = Options(
        terms=terms,
        wait=settings.WAIT if isinstance(wait, Unset) else check_wait(wait),
        reentrant=options["reentrant"],
        auto_renew=options["auto_renew"],
        max_hold=options["max_hold"],
        on_lost=options["on_lost"],
        on_release_requested=options["on_release_requested"],
        templates=templates,
    )
    alias = options["using"] or settings.DATABASE
    session, names = get_backend(alias).session, tuple(sorted(templates))
    return DjangoLock(session, names, how, lambda: _facts(label), release=options["release"], using=alias)


def _facts(label: str | None) -> dict[str, str | int]:
    facts = holder_facts()
    return facts if label is None else {**facts, "label": label}
