"""Has ``migrate`` make what Django's own API cannot: the TTL index of the locks, and the collection of the history."""

from __future__ import annotations

import logging
from typing import Any

from django.db import DEFAULT_DB_ALIAS
from pymongo.errors import PyMongoError

from ..backends.base import get_backend, mongo_store
from ..backends.mongo import MongoBackend
from ..conf import get_settings
from ..engine import history
from ..engine.indexes import ensure_indexes
from ..exceptions import LockBackendFailed
from ..inspect.snapshot import ping

logger = logging.getLogger("django_mongolock")


def make_indexes_after_migrate(*, using: str, **kwargs: Any) -> None:
    """Make them when the lock database is migrated, and also when only the default one is: most projects stop there.

    A missing right is no reason to stop a deployment: a warning says so, and `check --database` repeats it.
    """
    home = get_settings().DATABASE
    if using not in (home, DEFAULT_DB_ALIAS):
        return
    if not isinstance(get_backend(home), MongoBackend):
        return
    try:
        ping(mongo_store(home), get_settings().COMMAND_TIMEOUT)  # an index may take its time, an answer may not
        store = mongo_store(home)
        ensure_indexes(store.collection)
        if size := store.config.history:
            events = history.events(store)
            history.make(events.database, events.name, size, resize=True)
    except (LockBackendFailed, PyMongoError) as error:
        logger.warning("indexes not made database=%s error=%s", home, type(error).__name__)
