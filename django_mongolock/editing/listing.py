"""Which objects of a list of the admin are being edited, and by whom: one read for the whole page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from django.db.models import Model
from django.utils.translation import gettext as _

from ..backends.base import mongo_store
from ..conf import get_settings
from ..engine.text_checks import check_key
from ..exceptions import LockBackendFailed, printable
from ..inspection import display, queries
from ..inspection.snapshot import LockSnapshot, ShownState
from .edit_lock import edit_key

#: How long a list waits for MongoDB, in seconds: it is of use without this column.
TIMEOUT: Final = 2.0
EDITOR: Final = "_mongolock_editor"


def note_editors(objects: Iterable[Model]) -> None:
    """Give each object the text of its column."""
    by_key = {check_key(edit_key(obj), get_settings().KEY_PREFIX): obj for obj in objects}
    query = {"_id": {"$in": list(by_key)}, "expires_at": {"$ne": None}}
    try:
        found = queries.snapshots(mongo_store(), query, holders=1, timeout=TIMEOUT)
        texts = {lock.key: _editor(lock) for lock in found if lock.state is ShownState.HELD}
    except LockBackendFailed:
        texts = dict.fromkeys(by_key, "?")
    for key, obj in by_key.items():
        setattr(obj, EDITOR, texts.get(key, "–"))


def _editor(lock: LockSnapshot) -> str:
    (holder, *_others) = lock.holders
    name = printable(holder.user or "") or _("someone else")
    return f"{name} · {display.ago(holder.acquired_at, lock.now)}" if holder.acquired_at else name
