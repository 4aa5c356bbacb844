"""`LockEvent`: the history of the locks as a Django model, to look at."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NoReturn

from django.db import NotSupportedError, models
from django.utils.translation import gettext_lazy as _
from django_mongodb_backend.fields import ObjectIdAutoField

from ..backends.base import mongo_store
from ..engine import history
from ..inspect.display import EVENTS
from .fields import Moment, Number, Text
from .read_only import LookingManager, LookingQuerySet

_NOT_WRITTEN = "the history of locks is written by the engine only: see MONGOLOCK['HISTORY']"


class LockEventQuerySet(LookingQuerySet):
    """Events to look at."""

    not_deleted = "events are not deleted: new ones push out the oldest"
    not_written = _NOT_WRITTEN

    def recent(self, limit: int = 100, *, skip: int = 0, timeout: float = 5.0) -> list[LockEvent]:
        """The latest of these, or the first in the order that was given; read by an index. Raises LockBackendFailed."""
        if (query := self.as_query()) is None:
            return []
        found = history.read(mongo_store(self.db), *query, skip=skip, limit=limit, timeout=timeout)
        return [LockEvent.from_document(document, self.db) for document in found]

    def count_up_to(self, limit: int, timeout: float) -> int:
        """How many there are, but do not count beyond *limit*. Raises LockBackendFailed."""
        query = self.as_query()
        return 0 if query is None else history.count(mongo_store(self.db), query[0], limit, timeout)


class LockEvent(models.Model):
    """Something that happened to a lock: one of `engine.history.Happened`.

    Written if MONGOLOCK["HISTORY"] says so, by the process that it happened to, a moment later and not for sure: what a
    process noted in its last second dies with it, and new events push out the oldest. It proves nothing.
    """

    id = ObjectIdAutoField(primary_key=True, db_column="_id")
    at = Moment(_("when"), help_text=_("by the server's clock"))
    key = Text(_("key"), max_length=512)
    event = Text(_("what"), max_length=16, choices=[(what.value, word) for what, word in EVENTS.items()])
    token = Number(_("fencing token"), null=True)
    mode = Text(_("mode"), max_length=16, null=True)
    owner = Text(_("owner"), max_length=256, null=True)
    label = Text(_("label"), max_length=256, null=True)
    place = Text(_("view or task"), max_length=256, null=True)
    user = Text(_("user"), max_length=256, null=True)
    host = Text(_("host"), max_length=256, null=True)
    pid = Number(_("process"), null=True)
    thread = Text(_("thread"), max_length=256, null=True)
    waited_ms = Number(_("waited"), null=True, help_text=_("milliseconds"))
    held_ms = Number(_("held"), null=True, help_text=_("milliseconds"))
    by = Text(_("by"), max_length=256, null=True, help_text=_("who asked for the release, forced it or cleared it"))
    reason = Text(_("reason"), max_length=256, null=True)

    #: The server's time when it was read, for objects that come from `recent`.
    now: datetime

    objects = LookingManager.from_queryset(LockEventQuerySet)()

    class Meta:
        managed = False
        db_table = "mongolock_locks_history"
        ordering = ("-at", "-id")
        verbose_name = _("lock event")
        verbose_name_plural = _("lock events")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.key}: {self.event}"

    def save(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported: only the engine writes."""
        raise NotSupportedError(_NOT_WRITTEN)

    def delete(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported: new events push out the oldest."""
        raise NotSupportedError(LockEventQuerySet.not_deleted)

    @classmethod
    def from_document(cls, document: dict[str, Any], using: str) -> LockEvent:
        """The event that this document tells of."""
        fields = cls._meta.concrete_fields
        values = [
            field.from_db_value(value) if hasattr(field, "from_db_value") else value
            for field, value in ((field, document.get(str(field.column))) for field in fields)
        ]
        event: LockEvent = cls.from_db(using, [field.attname for field in fields], values)
        event.now = document["now"]
        return event
