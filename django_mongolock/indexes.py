"""Has ``migrate`` make the indexes of the locks collection, which Django's own index API cannot (a TTL index)."""

from __future__ import annotations

import logging
from typing import Any

from django.db import DEFAULT_DB_ALIAS
from pymongo.errors import PyMongoError

from .backends.base import get_backend, mongo_store
from .backends.mongo import MongoBackend
from .conf import get_settings
from .engine.indexes import ensure_indexes
from .engine.survey import ping
from .exceptions import LockBackendError

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
        ensure_indexes(mongo_store(home).collection)
    except (LockBackendError, PyMongoError) as error:
        logger.warning("indexes not made database=%s error=%s", home, type(error).__name__)
