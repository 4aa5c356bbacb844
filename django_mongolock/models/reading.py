"""Reading documents of the engine through Django's ORM.

The fields read any document and never raise. A value of the wrong type is read as None. A document in the collection of
locks may be damaged, or may belong to another program. Such a document must not hide the other results of a query.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn

from django.conf import settings
from django.core.exceptions import EmptyResultSet, ImproperlyConfigured
from django.db import NotSupportedError, models
from django.utils import timezone
from django.utils.functional import cached_property
from django.utils.translation import gettext_lazy as _
from django_mongodb_backend.fields import EmbeddedModelArrayField
from django_mongodb_backend.models import EmbeddedModel

from ..backends import mongo_store
from ..inspection.snapshot import MOMENTS, Party, read_number, read_parties, with_local_time
from ..router import ROUTER

if TYPE_CHECKING:  # the backend is not typed
    Lookup = models.Lookup[Any]

    CharField = models.CharField[Any, Any]
    BigIntegerField = models.BigIntegerField[Any, Any]
    DateTimeField = models.DateTimeField[Any, Any]

    class MongoQuerySet(models.QuerySet[Any]):
        def _clone(self) -> Any: ...
else:
    from django.db.models import BigIntegerField, CharField, DateTimeField, Lookup
    from django_mongodb_backend.queryset import MongoQuerySet


class Condition(Lookup):
    """A condition in MongoDB's form, for `filter()`. An index may serve it."""

    prepare_rhs = False
    can_use_path = True

    def __init__(self, query: dict[str, Any]) -> None:
        super().__init__(models.Value(True), query)

    def as_mql_path(self, compiler: Any, connection: Any) -> dict[str, Any]:
        query: dict[str, Any] = self.rhs
        return query


#: The stages of a query with only a condition and an order.
_PLAIN: Final = {"$match", "$project", "$addFields", "$sort"}


class ReadOnlyQuerySet(MongoQuerySet):
    """A queryset that filters, orders and counts like any other, and writes nothing."""

    @property
    def db(self) -> str:
        """The alias to read from.

        Raises ImproperlyConfigured if no router sends the model to MongoDB. Raises LockBackendFailed if the locks are
        in memory.
        """
        alias: str = super().db
        try:
            mongo_store(alias)
        except ImproperlyConfigured as error:
            cure = f'put "{ROUTER}" first into DATABASE_ROUTERS'
            raise ImproperlyConfigured(
                f"{self.model.__name__} would be read from {alias!r}: {cure} ({error})"
            ) from None
        return alias

    def as_query(self) -> tuple[dict[str, Any], dict[str, int]] | None:
        """Return the condition and the order in MongoDB's form, or None if no document can match.

        The backend's own pipeline copies the sort field, and therefore sorts without an index. Raises NotSupportedError
        for a query with more than a condition and an order by fields.
        """
        compiler = self.query.get_compiler(using=self.db)
        compiler.pre_sql_setup()
        try:
            query = compiler.build_query()
        except EmptyResultSet:
            return None
        stages = {name for stage in query.get_pipeline() for name in stage}
        if stages - _PLAIN or query.ordering.keys() - {field.column for field in self.model._meta.fields}:
            raise NotSupportedError(
                "only a condition and an order by fields can be read so: no slice, union, subquery or expression"
            )
        return query.match_mql, query.ordering

    def delete(self, *args: Any) -> NoReturn:
        """Raise NotSupportedError. A deletion would also remove locks that were renewed or granted in the meantime."""
        raise NotSupportedError(self.model.not_deleted)

    def update(self, *args: Any, **values: Any) -> NoReturn:
        """Raise NotSupportedError. Only the engine writes."""
        raise NotSupportedError(self.model.not_written)

    bulk_create = bulk_update = update
    # Model.save_base() and loaddata call these methods.
    _insert = _update = update
    _raw_delete = delete  # type: ignore[assignment]


class ReadOnlyModel(models.Model):
    """A model that neither an instance nor a manager writes through the ORM."""

    #: The texts of the errors, with the reason and the alternative.
    not_deleted: ClassVar[str]
    not_written: ClassVar[str]

    class Meta:
        abstract = True
        managed = False
        base_manager_name = "objects"
        default_permissions = ("view",)

    def save(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotSupportedError. Only the engine writes."""
        raise NotSupportedError(self.not_written)

    save_base = save

    def delete(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotSupportedError. See ReadOnlyQuerySet.delete()."""
        raise NotSupportedError(self.not_deleted)


def read_moment(value: object) -> datetime | None:
    """Return a moment in the form of the project's settings. The backend reads moments without a time zone."""
    if not isinstance(value, datetime):
        return None
    moment = value if timezone.is_aware(value) else value.replace(tzinfo=UTC)
    return moment if settings.USE_TZ else timezone.make_naive(with_local_time(moment))


class Text(CharField):
    """Text, or None."""

    def from_db_value(self, value: object, *args: object) -> str | None:
        return value if isinstance(value, str) else None


class Number(BigIntegerField):
    """A whole number, or None."""

    def get_internal_type(self) -> str:
        return "LockNumber"  # the backend converts the types that it knows, and raises

    @cached_property
    def validators(self) -> list[Any]:
        """No validators. Django would look for the range of that type in the default database."""
        return []

    def from_db_value(self, value: object, *args: object) -> int | None:
        return read_number(value)


class ServerTime(DateTimeField):
    """A moment by the server's clock, or None. With USE_TZ = False the moment is naive local time, otherwise it is
    aware.
    """

    def get_internal_type(self) -> str:
        return "LockMoment"

    def from_db_value(self, value: object, *args: object) -> datetime | None:
        return read_moment(value)

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        """Return the moment in UTC. Projects that use local time store UTC too."""
        if not isinstance(value, datetime):
            return value
        return (value if timezone.is_aware(value) else timezone.make_aware(value)).astimezone(UTC)


class Parties(EmbeddedModelArrayField):  # type: ignore[misc]
    """Holders or waiters, read as `Party`. Anything that is no list is read as []."""

    def get_internal_type(self) -> str:
        return "LockEntries"

    def _from_db_value(self, value: object, *args: object) -> list[Party]:
        def read(party: Party) -> Party:
            moments: Any = {name: read_moment(getattr(party, name)) for name in MOMENTS}
            return replace(party, **moments)

        return [read(party) for party in read_parties(value)]

    from_db_value = _from_db_value  # the field of the backend calls it by both names


class PartyFields(models.Model):
    """The common fields of holders and waiters, including the facts that an app may record."""

    mode = Text(_("mode"), max_length=16, null=True)
    owner = Text(_("owner"), max_length=256, null=True)
    label = Text(_("label"), max_length=256, null=True)
    place = Text(_("view or task"), max_length=256, null=True)
    user = Text(_("user"), max_length=256, null=True)
    host = Text(_("host"), max_length=256, null=True)
    pid = Number(_("process"), null=True)
    thread = Text(_("thread"), max_length=256, null=True)
    token = Number(_("fencing token"), null=True)

    class Meta:
        abstract = True


class Entry(PartyFields, EmbeddedModel):  # type: ignore[misc, django-manager-missing]  # noqa: DJ008 - no objects are made
    """The fields of a holder or a waiter that a query may name, as in ``holders__owner``. They are read as `Party`."""

    grant = Text(_("grant"), max_length=64)
    session = Text(_("session"), max_length=32, help_text=_("the process, under a name of its own"))
    worker = Text(_("thread or task"), max_length=256, null=True)
    capacity = Number(_("capacity"))
    lease = Number(_("lease"), help_text=_("milliseconds"))
    since = ServerTime(_("requested"))
    until = ServerTime(_("until"), help_text=_("when it ends unless it is renewed"))
    acquired_at = ServerTime(_("acquired"))
    more_permits = Number(_("more permits"), null=True, help_text=_("how many it takes beyond one"))
    behind = Number(_("behind it"), null=True, help_text=_("how many more of its process wait"))

    class Meta:
        managed = False
        default_permissions = ()
