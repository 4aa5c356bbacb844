"""Sends models to MongoDB according to their base class."""

from typing import Any

from django.apps import apps
from django.conf import settings
from django.db import models

from testproject.mongo import MongoModel


class MongoModelRouter:
    """Send each MongoModel to MongoDB.

    MongoLockRouter is the next one in DATABASE_ROUTERS, and keeps other models off that alias.
    """

    def db_for_read(self, model: type[models.Model], **_hints: Any) -> str | None:
        """Return the Mongo alias for a MongoModel, no opinion for others."""
        return settings.SHOP_MONGO_ALIAS if issubclass(model, MongoModel) else None

    db_for_write = db_for_read

    def allow_migrate(self, db: str, app_label: str, model_name: str | None = None, **_hints: Any) -> bool | None:
        """Migrate a MongoModel there and nowhere else, and the rates on any database. Other models are left to other
        routers."""
        if app_label == "rates":
            return True
        if model_name is None or not _is_mongo_model(app_label, model_name):
            return None
        return bool(db == settings.SHOP_MONGO_ALIAS)


def _is_mongo_model(app_label: str, model_name: str) -> bool:
    try:
        return issubclass(apps.get_model(app_label, model_name), MongoModel)
    except LookupError:  # a model of an old migration that no longer exists
        return False
