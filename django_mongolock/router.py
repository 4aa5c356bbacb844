"""The router that keeps the lock model in its MongoDB, and the migrations of other apps out of it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, router
from django.db.models import Model

from .conf import get_settings, raw_settings

__all__ = ["MongoLockRouter"]

#: The apps whose models are read from the database of the locks.
LABELS: Final = {"django_mongolock"}
#: The entry for DATABASE_ROUTERS.
ROUTER: Final = f"{__name__}.MongoLockRouter"


class MongoLockRouter:
    """The router of the lock models. Put ``"django_mongolock.router.MongoLockRouter"`` first in DATABASE_ROUTERS.

    The models of the locks are read from MONGOLOCK["DATABASE"]. Unless that is the default database, other apps are not
    migrated there. Their migrations do not run on MongoDB, and neither does the creation of their permissions. A
    project that keeps models of its own in the same alias puts its own router before this one. If MongoDB is the
    default database, the router is added by itself.
    """

    def db_for_read(self, model: type[Model], **hints: Any) -> str | None:
        return get_settings().DATABASE if model._meta.app_label in LABELS else None

    def db_for_write(self, model: type[Model], **hints: Any) -> str | None:
        return self.db_for_read(model, **hints)

    def allow_migrate(self, db: str, app_label: str, model_name: str | None = None, **hints: Any) -> bool | None:
        try:
            home: object = raw_settings().get("DATABASE", "")  # another wrong setting changes nothing here
        except ImproperlyConfigured:
            return None  # the checks report it
        if app_label in LABELS:
            # The models only read. Nothing is made for them, and `dumpdata` and `loaddata` leave them out.
            return db == home and model_name is None
        return False if db == home and home != DEFAULT_DB_ALIAS else None


def add_router() -> None:
    """Add the router to the project's if the project need not name it, because `dumpdata` asks the routers what to
    leave out.
    """
    with suppress(ImproperlyConfigured):  # the checks report it
        if get_settings().DATABASE == DEFAULT_DB_ALIAS:
            router.routers.append(MongoLockRouter())
