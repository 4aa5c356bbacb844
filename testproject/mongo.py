"""The shop's side of MongoDB, with its models and the database itself."""

from typing import Any

from django.conf import settings
from django.db import connections, models
from pymongo.database import Database


class MongoModel(models.Model):
    """A model whose documents live on the alias ``SHOP_MONGO_ALIAS``."""

    class Meta:
        abstract = True


def database() -> Database[dict[str, Any]]:
    """Return PyMongo's view of that alias, for features that the ORM lacks."""
    connection: Any = connections[settings.SHOP_MONGO_ALIAS]
    found: Database[dict[str, Any]] = connection.database
    return found
