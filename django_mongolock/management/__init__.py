"""What ``manage.py`` runs: commands and checks, and after ``migrate`` what Django's API cannot create: indexes, capped
collections."""

from __future__ import annotations

import logging
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
    """Create them when the lock database is migrated, or the default one: most projects migrate only that.

    A missing right does not stop a deployment: it is logged as a warning, and reported by `check --database`.
    """
    home = get_settings().DATABASE
    if using not in (home, DEFAULT_DB_ALIAS):
        return
    if not isinstance(get_backend(home), MongoBackend):
        return
    try:
        ping(mongo_store(home), get_settings().COMMAND_TIMEOUT)  # an index may take long, an answer may not
        store = mongo_store(home)
        ensure_indexes(store.collection)
        for collection in store.bells.collections:
            bells.make(collection)
        if store.history is not None:
            store.history.make(resize=True)
    except (LockBackendFailed, PyMongoError) as error:
        logger.warning("indexes not made database=%s error=%s", home, type(error).__name__)
