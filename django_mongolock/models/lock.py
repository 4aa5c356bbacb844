"""`Lock`: the engine's documents as a Django model, for looking and for force release; never for locking."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NoReturn, Unpack

from django.db import NotSupportedError, models
from django.db.models import Func, Q
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _
from django_mongodb_backend.models import EmbeddedModel

from ..backends.base import mongo_store
from ..exceptions import LockDocumentDamaged
from ..inspect import operations
from ..inspect.patterns import KeyMatch
from ..inspect.snapshot import Bounds, Seen, count, survey
from ..signals import lock_forced, send
from .fields import Entries, Moment, Number, Text
from .lock_event import LockEvent
from .read_only import LookingManager, LookingQuerySet

__all__ = ["Holder", "Lock", "LockEvent", "LockQuerySet", "Waiter"]

logger = logging.getLogger("django_mongolock")

#: Far longer than the place in a queue of somebody who has died.
_LONGEST_PATIENCE: Final = timedelta(hours=1)
LONG_AGO: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Entry(EmbeddedModel):  # type: ignore[misc]
    """Somebody who holds a lock or waits for it. Times are by the server's clock."""

    grant = Text(_("grant"), max_length=64)
    session = Text(_("session"), max_length=32, help_text=_("the process, by a name of its own"))
    mode = Text(_("mode"), max_length=16)
    capacity = Number(_("capacity"))
    owner = Text(_("owner"), max_length=256, null=True)
    label = Text(_("label"), max_length=256, null=True)
    place = Text(_("view or task"), max_length=256, null=True)
    user = Text(_("user"), max_length=256, null=True)
    host = Text(_("host"), max_length=256, null=True)
    pid = Number(_("process"), null=True)
    thread = Text(_("thread"), max_length=256, null=True)
    lease = Number(_("lease"), help_text=_("milliseconds"))
    since = Moment(_("asked for"))
    until = Moment(_("until"), help_text=_("when it ends unless it is renewed"))

    class Meta:
        abstract = True


class Holder(Entry):
    """Somebody who holds a lock."""

    acquired_at = Moment(_("acquired"))
    token = Number(_("fencing token"))

    class Meta:
        managed = False
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.place or self.label or self.thread}, {self.host} {self.pid}"


class Waiter(Entry):
    """Somebody who waits for a lock, first of those in its process who want it in the same way."""

    behind = Number(_("behind it"), null=True, help_text=_("how many more of its process wait"))

    class Meta:
        managed = False
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.place or self.label or self.thread}, {self.host} {self.pid}"


class WasReleased(Func):
    """Was it released, and only kept for a minimum hold?"""

    output_field = models.BooleanField()

    def as_mql_expr(self, compiler: Any, connection: Any) -> dict[str, Any]:
        entries = {"$cond": [{"$isArray": "$holders"}, "$holders", []]}
        return {"$in": ["date", {"$map": {"input": entries, "in": {"$type": "$$this.released"}}}]}


class HasLivingWaiters(Func):
    """Is there somebody in the queue whose place has not run out? Judged by the server, whatever the field holds."""

    output_field = models.BooleanField()

    def as_mql_expr(self, compiler: Any, connection: Any) -> dict[str, Any]:
        entries = {"$cond": [{"$isArray": "$waiters"}, "$waiters", []]}
        living = {"$anyElementTrue": {"$map": {"input": entries, "as": "e", "in": {"$gt": ["$$e.until", "$$NOW"]}}}}
        return {"$and": [{"$ne": ["$waiters", []]}, living]}  # most queues are empty: that is told at once


def key_condition(match: KeyMatch) -> Q:
    """The condition that a key is like that."""
    lookups = {"key__gte": match.low, "key__lt": match.high, "key__regex": match.regex}
    return Q(**{lookup: value for lookup, value in lookups.items() if value})


class LockQuerySet(LookingQuerySet):
    """Locks to look at. What is held is decided by the server's clock, in the query."""

    not_deleted = "locks are not deleted: use force_release(), or manage.py clear_stale_locks"
    not_written = "locks change only by the engine's own rule: use mongo_lock() and force_release()"

    #: Whose grants are meant, for `force_release`.
    _owner: str | None = None

    def held(self) -> LockQuerySet:
        """Locks that somebody holds now."""
        return self.leased().filter(expires_at__gt=Now())

    def stale(self) -> LockQuerySet:
        """Locks whose lease is over and that nobody released. The next who asks gets them."""
        return self.leased().filter(~WasReleased(), expires_at__lte=Now())

    def free(self) -> LockQuerySet:
        """Locks that nobody holds, and whose documents are still kept."""
        return self.filter(expires_at__isnull=True)

    def waited_for(self) -> LockQuerySet:
        """Locks that somebody waits for.

        Whoever waits gets a lock soon after its lease is over: so nobody waits for one that has been stale for long.
        """
        return self.leased().filter(HasLivingWaiters(), expires_at__gt=Now() - _LONGEST_PATIENCE)

    def leased(self) -> LockQuerySet:
        """Locks that are held or stale.

        The condition keeps every search in the index away from the many documents that have null there; the server's
        time does not do that for "stale", nor for anything once somebody has put an array into that field.
        """
        return self.filter(expires_at__gt=LONG_AGO)

    def owned_by(self, owner: str) -> LockQuerySet:
        """Locks that *owner* holds (`owner=`). `force_release` then takes them from this owner only."""
        found = self.leased().filter(holders__owner=owner)
        found._owner = owner
        return found

    def _clone(self) -> LockQuerySet:
        clone: LockQuerySet = super()._clone()
        clone._owner = self._owner
        return clone

    def matching(self, match: KeyMatch) -> LockQuerySet:
        """Locks whose keys are like that: see `inspect.patterns`."""
        return self.filter(key_condition(match))

    def survey(self, **bounds: Unpack[Bounds]) -> Iterator[Lock]:
        """These locks, each with what the server says of it just now in `seen`; nothing else of them is read.

        Bounded in size, and judged by the server's clock. Raises LockBackendFailed.
        """
        if (query := self.as_query()) is not None:
            for seen in survey(mongo_store(self.db), *query, **bounds):
                yield Lock.as_seen(seen, self.db)

    def count_up_to(self, limit: int, timeout: float) -> int:
        """How many there are, but do not count beyond *limit*. Raises LockBackendFailed."""
        query = self.as_query()
        return 0 if query is None else count(mongo_store(self.db), query[0], limit, timeout)

    def force_release(self, *, by: str = "", reason: str = "") -> int:
        """Take each of these locks from its holders; return how many were taken.

        Each holder learns of it at its next renewal. What it does until then is only stopped where its fencing
        token is compared. A lock whose document is damaged is left, and a warning logged. by, reason: who does it and
        why, for the log, the history and the signal `lock_forced`.
        """
        return sum(_force_release(lock, self._owner, by, reason) for lock in self.iterator())

    def ask_to_release(self, requested_by: str) -> int:
        """Ask the holders of each of these locks to release it, in the name of *requested_by*; return how many were
        asked.

        They learn of it at their next renewal (`MongoLock.release_requested`), and do as they see fit.
        """
        return sum(lock.ask_to_release(requested_by) for lock in self.leased().iterator())


def _force_release(lock: Lock, owner: str | None, by: str, reason: str) -> bool:
    try:
        return lock.force_release(owner, by=by, reason=reason)
    except LockDocumentDamaged as error:
        logger.warning("not released key=%s problem=%s", error.key, error.problem)
        return False


class Lock(models.Model):
    """One key and what is known of it. The counters run for as long as the document lives (MONGOLOCK["RETENTION"]).

    A value that is not of its kind, in a document that somebody damaged, reads as None, or [] for a list.
    """

    key = models.CharField(_("key"), primary_key=True, db_column="_id", max_length=512)
    holders = Entries(Holder, verbose_name=_("holders"))
    waiters = Entries(Waiter, verbose_name=_("waiters"))
    token = Number(_("last fencing token"))
    expires_at = Moment(
        _("lease ends"), null=True, help_text=_("when the last of its leases ends; empty if nobody holds it")
    )
    purge_at = Moment(_("kept until"), help_text=_("when the document may go if nobody uses it"))
    acquisitions = Number(_("acquisitions"))
    contended = Number(_("contended"), help_text=_("acquisitions that had to wait"))
    expired = Number(_("expired"), help_text=_("leases that ended without a release"))
    waited_ms = Number(_("waited"), help_text=_("milliseconds, all acquisitions together"))
    held_ms = Number(_("held"), help_text=_("milliseconds, all grants together"))
    longest_wait_ms = Number(_("longest wait"), help_text=_("milliseconds"))
    longest_hold_ms = Number(_("longest hold"), help_text=_("milliseconds"))

    objects = LookingManager.from_queryset(LockQuerySet)()

    #: What the server said of the lock, for objects that come from `survey`.
    seen: Seen

    class Meta:
        managed = False
        db_table = "mongolock_locks"
        ordering = ("key",)
        verbose_name = _("lock")
        verbose_name_plural = _("locks")
        default_permissions = ("view",)
        permissions = (
            ("ask_release_lock", _("Can ask for the release of a lock")),
            ("force_release_lock", _("Can force the release of a lock")),
            ("clear_document_lock", _("Can clear stale locks in documents")),
            ("take_over_edit_lock", _("Can take over a form that somebody else edits")),
            ("view_lock_status", _("Can read the status of the locks, for monitoring")),
        )

    def __str__(self) -> str:
        return str(self.key)

    def save(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported: locks change only by the engine's own rule."""
        raise NotSupportedError("locks are not saved through the ORM: use mongo_lock()")

    def delete(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported: see LockQuerySet.delete()."""
        raise NotSupportedError("locks are not deleted: use force_release(), or manage.py clear_stale_locks")

    @property
    def waiting(self) -> int:
        """How many wait for the lock: threads and tasks, not processes."""
        return sum(1 + (waiter.behind or 0) for waiter in self.waiters)

    @classmethod
    def as_seen(cls, seen: Seen, using: str) -> Lock:
        """The lock that `survey` saw, without its fields."""
        lock: Lock = cls.from_db(using, ["key"], [seen.key])
        lock.seen = seen
        return lock

    def force_release(
        self, owner: str | None = None, *, token: int | None = None, by: str = "", reason: str = ""
    ) -> bool:
        """Take the lock from those who held it when this object was read; return whether it was taken.

        owner, token: only from this one. A grant that was given since then is left alone. by, reason: who does it and
        why, for the log, the history and the signal `lock_forced`. Raises LockDocumentDamaged, LockBackendFailed.
        """
        using = self._state.db
        grants = [
            holder.grant
            for holder in self.holders
            if holder.grant and owner in (None, holder.owner) and token in (None, holder.token)
        ]
        store = mongo_store(using)
        taken = bool(grants and operations.force_release(store, self.key, grants, by=by, reason=reason))
        if taken:
            send(lock_forced, key=self.key, using=using, by=by, reason=reason)
        return taken

    def ask_to_release(self, requested_by: str, *, token: int | None = None) -> int:
        """Ask its holders to release this lock, in the name of *requested_by*; return how many were asked.

        token: only the one with this fencing token, which had it when this object was read. Raises LockDocumentDamaged,
        LockBackendFailed.
        """
        grants = None if token is None else [holder.grant for holder in self.holders if holder.token == token]
        return operations.ask_to_release(mongo_store(self._state.db), self.key, requested_by, grants=grants)
