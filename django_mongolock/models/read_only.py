"""Reading, through Django's ORM, documents that only the engine writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from django.core.exceptions import EmptyResultSet, ImproperlyConfigured
from django.db import NotSupportedError, models

from ..backends.base import mongo_store
from ..backends.mongo import database_settings
from ..router import ROUTER

if TYPE_CHECKING:  # the backend is not typed
    Manager = models.Manager[Any]
    Lookup = models.Lookup[Any]

    class MongoQuerySet(models.QuerySet[Any]):
        def _clone(self) -> Any: ...
else:
    from django_mongodb_backend.queryset import MongoQuerySet

    Manager, Lookup = models.Manager, models.Lookup


class Condition(Lookup):
    """A condition in MongoDB's form, for `filter()`. An index may serve it."""

    prepare_rhs = False
    can_use_path = True

    def __init__(self, query: dict[str, Any]) -> None:
        super().__init__(models.Value(True), query)

    def as_mql_path(self, compiler: Any, connection: Any) -> dict[str, Any]:
        query: dict[str, Any] = self.rhs
        return query


class ReadOnlyQuerySet(MongoQuerySet):
    """Filters, orders and counts like any other; writes nothing."""

    @property
    def db(self) -> str:
        """The alias to read from. Raises ImproperlyConfigured where no router has sent it to MongoDB."""
        alias: str = super().db
        try:
            database_settings(alias)
        except ImproperlyConfigured as error:
            cure = f'put "{ROUTER}" first into DATABASE_ROUTERS'
            raise ImproperlyConfigured(
                f"{self.model.__name__} would be read from {alias!r}: {cure} ({error})"
            ) from None
        return alias

    def as_query(self) -> tuple[dict[str, Any], dict[str, int]] | None:
        """The condition and the order in MongoDB's form; None if no document can match.

        The backend's own pipeline copies the field that it sorts by, and so sorts without an index.
        """
        compiler = self.query.get_compiler(using=self.db)
        compiler.pre_sql_setup()
        try:
            query = compiler.build_query()
        except EmptyResultSet:
            return None
        return query.match_mql, query.ordering

    def delete(self, *args: Any) -> NoReturn:
        """Not supported: locks that were renewed or granted in the meantime would be deleted too."""
        raise NotSupportedError(self.model.not_deleted)

    def update(self, *args: Any, **values: Any) -> NoReturn:
        """Not supported: only the engine writes."""
        raise NotSupportedError(self.model.not_written)

    bulk_create = bulk_update = update
    # What Model.save_base() and loaddata call.
    _insert = _update = update
    _raw_delete = delete  # type: ignore[assignment]


class ReadOnlyManager(Manager):
    """Raises an error where the locks are not in MongoDB, instead of finding none."""

    def get_queryset(self) -> models.QuerySet[Any]:
        mongo_store(self._db)
        return super().get_queryset()


class ReadOnlyModel(models.Model):
    """A model that is not written through the ORM, neither by an instance nor by any manager."""

    #: The texts of the errors: why, and what to do instead.
    not_deleted: ClassVar[str]
    not_written: ClassVar[str]

    class Meta:
        abstract = True
        managed = False
        base_manager_name = "objects"
        default_permissions = ("view",)

    def save(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported: only the engine writes."""
        raise NotSupportedError(self.not_written)

    save_base = save

    def delete(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported: see ReadOnlyQuerySet.delete()."""
        raise NotSupportedError(self.not_deleted)
