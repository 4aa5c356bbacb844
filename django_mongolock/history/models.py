"""`LockEvent`: the history of the locks as a read-only Django model."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Final, TypeVar

from django.db import models
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from django_mongodb_backend.fields import ObjectIdAutoField
from pymongo.collection import Collection

from ..backends import mongo_store
from ..engine.session.session import off_main_thread
from ..engine.store.errors import bounded
from ..engine.store.mongo import MongoStore
from ..exceptions import printable
from ..inspection.display import badge, milliseconds
from ..inspection.operations import FACTS
from ..inspection.snapshot import Party
from ..models.reading import (
    Number,
    PartyFields,
    ReadOnlyModel,
    ReadOnlyQuerySet,
    ServerTime,
    Text,
    read_moment,
)

__all__ = ["LockEvent"]

T = TypeVar("T")


class Happened(models.TextChoices):
    """The kinds of events.

    The holder's process records the first three. The process that gave up records `DEADLOCK`. The process that acted
    records the others.
    """

    GRANTED = "granted", _("granted")
    RELEASED = "released", _("released")
    LOST = "lost", _("lost")
    DEADLOCK = "deadlock", _("deadlock")
    ASKED = "asked", _("was asked to release")
    FORCED = "forced", _("release forced")


#: An event is shown by a word and a shape. Colour adds nothing to these two.
SHAPES: Final = {
    Happened.GRANTED: "●",
    Happened.RELEASED: "○",
    Happened.LOST: "◐",
    Happened.DEADLOCK: "▲",
    Happened.ASKED: "?",
    Happened.FORCED: "✕",
}


def events_of(store: MongoStore) -> Collection[dict[str, Any]]:
    """Return the collection of the history. It is beside the collection of the locks."""
    name = f"{store.config.collection}_history"
    return store.collection.database.get_collection(name, codec_options=store.collection.codec_options)


@off_main_thread
def read_events(store: MongoStore, timeout: float, read: Callable[[Collection[dict[str, Any]]], T]) -> T:
    """Call *read* with the collection, within *timeout* seconds. Raises LockBackendFailed."""
    collection = events_of(store)
    with bounded(timeout, store.client, needs=f"find on the collection {collection.name}"):
        return read(collection)


class LockEventQuerySet(ReadOnlyQuerySet):
    """Events to read."""

    def recent(self, limit: int = 100, *, skip: int = 0, timeout: float = 5.0) -> list[LockEvent]:
        """Return the latest of these events, or the first in their order, by an index. Raises LockBackendFailed."""
        if (query := self.as_query()) is None:
            return []
        stages: list[dict[str, Any]] = [
            {"$match": query[0]},
            {"$sort": query[1]},
            {"$skip": skip},
            {"$limit": limit},
            {"$addFields": {"now": "$$NOW"}},
        ]
        found = read_events(mongo_store(self.db), timeout, lambda events: list(events.aggregate(stages)))
        return [LockEvent.from_document(document, self.db) for document in found]

    def count_up_to(self, limit: int, timeout: float) -> int:
        """Count these events, up to *limit*. Raises LockBackendFailed."""
        if (query := self.as_query()) is None:
            return 0
        return read_events(mongo_store(self.db), timeout, lambda events: events.count_documents(query[0], limit=limit))


class LockEvent(ReadOnlyModel, PartyFields):
    """An event in the life of a lock, one of `Happened`.

    With MONGOLOCK["HISTORY"], the process involved writes the event a moment later. The write is not certain. The
    events of the last second of a process are lost with the process, and new events push out the oldest. An event is no
    proof.
    """

    not_deleted = "events are not deleted: new ones push out the oldest"
    not_written = "the history of locks is written by the engine only: see MONGOLOCK['HISTORY']"

    id = ObjectIdAutoField(primary_key=True, db_column="_id")
    at = ServerTime(_("when"), help_text=_("according to the server's clock"))
    key = Text(_("key"), max_length=512)
    event = Text(_("event"), max_length=16, choices=Happened.choices)
    waited_ms = Number(_("waited"), null=True, help_text=_("milliseconds"))
    held_ms = Number(_("held"), null=True, help_text=_("milliseconds"))
    by = Text(_("by"), max_length=256, null=True, help_text=_("who asked for the release, or forced it"))
    reason = Text(_("reason"), max_length=256, null=True)

    #: The server's time when the event was read, for objects from `recent`.
    now: datetime | None

    objects = models.Manager.from_queryset(LockEventQuerySet)()

    class Meta(ReadOnlyModel.Meta):
        db_table = "mongolock_locks_history"
        ordering = ("-at", "-id")
        verbose_name = _("lock event")
        verbose_name_plural = _("lock events")

    def __str__(self) -> str:
        return printable(f"{self.key}: {self.event}")

    @property
    def party(self) -> Party:
        """The process involved in the event."""
        return Party(**{name: getattr(self, name) for name in FACTS})

    @property
    def badge(self) -> SafeString:
        """The kind of the event as HTML."""
        if self.event not in Happened.values:
            return format_html("{}", printable(self.event or "?"))
        what = Happened(self.event)
        return badge(f"mongolock-event mongolock-event-{what}", SHAPES[what], what.label)

    @property
    def lengths(self) -> str:
        """The times waited and held, in words."""
        facts = [gettext("waited %s") % milliseconds(self.waited_ms)] if self.waited_ms else []
        facts += [gettext("held %s") % milliseconds(self.held_ms)] if self.held_ms is not None else []
        return " · ".join(facts)

    @property
    def reasons(self) -> str:
        """The person and the reason, in words."""
        facts = [gettext("by %s") % self.by] if self.by else []
        return printable(" · ".join([*facts, *([self.reason] if self.reason else [])]))

    @property
    def details(self) -> str:
        """The times waited and held, the person and the reason, in words."""
        return " · ".join(filter(None, (self.lengths, self.reasons))) or "–"

    @classmethod
    def from_document(cls, document: dict[str, Any], using: str) -> LockEvent:
        """Return the event of this document."""
        fields = cls._meta.concrete_fields
        values = [
            field.from_db_value(value) if hasattr(field, "from_db_value") else value
            for field, value in ((field, document.get(str(field.column))) for field in fields)
        ]
        event: LockEvent = cls.from_db(using, [field.attname for field in fields], values)
        event.now = read_moment(document["now"])
        return event
