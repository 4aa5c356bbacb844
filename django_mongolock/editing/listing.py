"""Which objects of a list of the admin are being edited, and by whom: one read for the whole page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Final
from urllib.parse import unquote

from django.contrib import messages
from django.contrib.admin import SimpleListFilter
from django.core.exceptions import ValidationError
from django.db.models import Model, QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..backends.base import mongo_store
from ..conf import get_settings
from ..engine.text_checks import check_key
from ..exceptions import LockBackendFailed, printable
from ..inspection import display, queries
from ..inspection.snapshot import LockSnapshot, State
from .edit_lock import edit_key

#: How long a list waits for MongoDB, in seconds: it is of use without this column.
TIMEOUT: Final = 2.0
EDITOR: Final = "_mongolock_editor"


def note_editors(objects: Iterable[Model]) -> None:
    """Give each object the text of its column."""
    by_key = {_stored(edit_key(obj)): obj for obj in objects}
    try:
        found = {lock.key: _editor(lock) for lock in _edited({"$in": list(by_key)})}
    except LockBackendFailed:
        found = dict.fromkeys(by_key, "?")
    for key, obj in by_key.items():
        setattr(obj, EDITOR, found.get(key, "–"))


class EditedFilter(SimpleListFilter):
    """The objects that are being edited now: ``list_filter = (EditedFilter,)``."""

    title = gettext_lazy("being edited")
    parameter_name = "being_edited"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """One choice beside all."""
        return [("now", _("Now"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Leave out the others. A primary key that an edit lock only has the hash of is not found."""
        if self.value() is None:
            return queryset
        prefix, keys = _stored(edit_key(queryset.model, "")), []
        try:
            for lock in _edited({"$gte": prefix, "$lt": f"{prefix}\U0010ffff"}):
                with suppress(ValidationError):
                    keys.append(queryset.model._meta.pk.to_python(unquote(lock.key.removeprefix(prefix))))
        except LockBackendFailed:
            messages.warning(request, _("We cannot check at the moment which of these are being edited."))
        return queryset.filter(pk__in=keys)


def _stored(key: str) -> str:
    return check_key(key, get_settings().KEY_PREFIX)


def _edited(keys: dict[str, Any]) -> Iterator[LockSnapshot]:
    query = {"_id": keys, "expires_at": {"$ne": None}}
    for lock in queries.snapshots(mongo_store(), query, holders=1, timeout=TIMEOUT):
        if lock.state is State.HELD:
            yield lock


def _editor(lock: LockSnapshot) -> str:
    (holder, *_others) = lock.holders
    name = printable(holder.user or "") or _("someone else")
    return f"{name} · {display.ago(holder.acquired_at, lock.now)}" if holder.acquired_at else name
