"""Model fields that read whatever stands in a document, and never raise: what is not of their kind, they read as None.

A document of the locks collection may be damaged, or somebody else's. That must not hide the others of a query.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.db import models
from django.utils import timezone
from django.utils.functional import cached_property
from django_mongodb_backend.fields import EmbeddedModelArrayField

if TYPE_CHECKING:
    CharField = models.CharField[Any, Any]
    BigIntegerField = models.BigIntegerField[Any, Any]
    DateTimeField = models.DateTimeField[Any, Any]
    Lookup = models.Lookup[Any]
else:
    Lookup = models.Lookup
    CharField, BigIntegerField, DateTimeField = models.CharField, models.BigIntegerField, models.DateTimeField


class Text(CharField):
    """Text, or None."""

    def from_db_value(self, value: object, *args: object) -> str | None:
        return value if isinstance(value, str) else None


class Number(BigIntegerField):
    """A whole number, or None."""

    def get_internal_type(self) -> str:
        return "LockNumber"  # the backend converts by this name, and raises: a name of our own keeps it away

    @cached_property
    def validators(self) -> list[Any]:
        """None: Django would look for the range of that type in the default database."""
        return []

    def from_db_value(self, value: object, *args: object) -> int | None:
        return int(value) if isinstance(value, int) and not isinstance(value, bool) else None


class Moment(DateTimeField):
    """A moment that the server wrote by its own clock, or None. Aware; with USE_TZ = False in local time."""

    def get_internal_type(self) -> str:
        return "LockMoment"

    def from_db_value(self, value: object, *args: object) -> datetime | None:
        if not isinstance(value, datetime):
            return None
        moment = value if timezone.is_aware(value) else value.replace(tzinfo=UTC)
        return moment if settings.USE_TZ else timezone.make_naive(moment)

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        """Moments are stored in UTC, also in projects that go by local time."""
        if not isinstance(value, datetime):
            return value
        return (value if timezone.is_aware(value) else timezone.make_aware(value)).astimezone(UTC)


class Having(Lookup):
    """``holders__having=[{"host": "web-1"}, {"user": "anna"}]``: is there an entry with all facts of one of these?

    A query rather than an expression: one look at each entry, and whatever else stands in the document is no error.
    """

    lookup_name = "having"
    prepare_rhs = False
    can_use_path = True

    def as_mql_path(self, compiler: Any, connection: Any) -> dict[str, Any]:
        wanted = [{name: {"$eq": value} for name, value in facts.items()} for facts in self.rhs]
        return {self.lhs.target.column: {"$elemMatch": {"$or": wanted}}}


class Entries(EmbeddedModelArrayField):  # type: ignore[misc]
    """Holders or waiters; [] where there is no such list."""

    def _get_lookup(self, lookup_name: str) -> Any:
        return Having if lookup_name == Having.lookup_name else super()._get_lookup(lookup_name)

    def get_internal_type(self) -> str:
        return "LockEntries"

    def from_db_value(self, value: object, *args: object) -> list[models.Model]:
        return [self._read(item) for item in value if isinstance(item, dict)] if isinstance(value, list) else []

    def _from_db_value(self, value: object, *args: object) -> list[models.Model]:
        return Entries.from_db_value(self, value)

    def _read(self, item: dict[str, Any]) -> models.Model:
        fields = [field for field in self.embedded_model._meta.fields if hasattr(field, "from_db_value")]
        made: models.Model = self.embedded_model(
            **{field.attname: field.from_db_value(item.get(field.column)) for field in fields}
        )
        return made
