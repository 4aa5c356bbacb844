"""Checks of the app."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from django.apps import AppConfig
from django.core.checks import CheckMessage, Tags, register
from pymongo.errors import PyMongoError

from ..backends.base import get_backend, mongo_store
from ..backends.mongo import MongoBackend
from ..checks import has_wrong_settings
from ..conf import get_settings, warning
from ..engine.store import layout
from ..engine.store.mongo import MongoStore
from ..inspection.server import missing_rights
from .writer import events_of

#: What a process needs on the history.
RIGHTS: Final = ("find", "insert")


@register(Tags.database)
def check_history(
    *, app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None, **kwargs: Any
) -> list[CheckMessage]:
    """Check that the collection of the history is there, and may be written."""
    if has_wrong_settings():
        return []
    alias = get_settings().DATABASE
    if alias not in (databases or ()) or not isinstance(get_backend(alias), MongoBackend):
        return []
    store = mongo_store(alias)
    if store.history is None or not (problem := _problem(store)):
        return []
    return [
        warning(
            "W110",
            f"The history of the locks cannot be kept: {problem}.",
            f"Run manage.py migrate --database {alias} as a user who may create collections. Before that, drop a "
            "collection that is not capped. If a right is missing, grant find and insert on the collection.",
        )
    ]


def _problem(store: MongoStore) -> str:
    """Why the history cannot be kept; "" if it can. Another check reports a server that does not answer."""
    collection = events_of(store)
    try:
        if not layout.exists(store.collection):
            return ""  # `migrate` makes both, and the check of the locks says so
        if missing := missing_rights(collection, RIGHTS):
            return f"the user lacks {' and '.join(missing)} on the collection {collection.name}"
        if not layout.exists(collection):
            return f"there is no collection {collection.name}"
        if layout.stays_open(collection) is None:
            return f"the collection {collection.name} is not a capped one"
    except PyMongoError:
        pass
    return ""
