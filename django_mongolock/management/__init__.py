"""The commands and checks of ``manage.py``, and the steps after ``migrate`` that Django's API lacks.

These steps create indexes and capped collections.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from django.db import DEFAULT_DB_ALIAS
from pymongo.errors import PyMongoError

from ..backends import MongoBackend, get_backend, mongo_store
from ..conf import get_settings
from ..engine.store import bells
from ..engine.store.layout import ensure_indexes
from ..exceptions import LockBackendFailed
from ..inspection.queries import ping

logger = logging.getLogger("django_mongolock")


def make_indexes_after_migrate(*, using: str, **kwargs: Any) -> None:
    """Create the indexes and the collections when the lock database or the default database is migrated.

    Most projects migrate only the default database. A missing right does not stop a deployment. The right is logged as
    a warning, and reported by `check --database`.
    """
    home = get_settings().DATABASE
    if using not in (home, DEFAULT_DB_ALIAS):
        return
    if not isinstance(get_backend(home), MongoBackend):
        return
    store = mongo_store(home)
    try:
        ping(store, get_settings().COMMAND_TIMEOUT)  # an index may take long, an answer may not
    except LockBackendFailed as error:
        _warn("all", home, error)
        return
    # No step depends on another one.
    steps: list[tuple[str, Callable[[], None]]] = [("indexes", partial(ensure_indexes, store.collection))]
    steps += [("bells", partial(bells.make, collection)) for collection in store.bells.collections]
    steps += [("history", partial(store.history.make, resize=True))] if store.history is not None else []
    for what, make in steps:
        try:
            make()
        except PyMongoError as error:
            _warn(what, home, error)


def _warn(what: str, home: str, error: Exception) -> None:
    logger.warning("not made by migrate what=%s database=%s error=%s", what, home, type(error).__name__)
