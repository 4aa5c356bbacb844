"""Which models live in MongoDB: those that say so by their base class."""

from typing import Any

from django.apps import apps
from django.conf import settings
from django.db import models

from testproject.mongo import MongoModel


class MongoModelRouter:
    """Send each MongoModel to MongoDB.

    What else is kept off that alias, MongoLockRouter knows: it stands after this one in DATABASE_ROUTERS.
    """

    def db_for_read(self, model: type[models.Model], **_hints: Any) -> str | None:
        """Return the Mongo alias for a MongoModel, no opinion for others."""
        return settings.SHOP_MONGO_ALIAS if issubclass(model, MongoModel) else None

    db_for_write = db_for_read

    def allow_migrate(self, db: str, app_label: str, model_name: str | None = None, **_hints: Any) -> bool | None:
        """Migrate a MongoModel there and nowhere else, the rates wherever they are asked for; no opinion for others."""
        if app_label == "rates":
            return True
        if model_name is None or not _is_mongo_model(app_label, model_name):
            return None
        return bool(db == settings.SHOP_MONGO_ALIAS)


def _is_mongo_model(app_label: str, model_name: str) -> bool:
    try:
        return issubclass(apps.get_model(app_label, model_name), MongoModel)
    except LookupError:  # a model of an old migration that is gone
        return False
