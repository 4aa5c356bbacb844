"""Fencing tokens for data that is kept elsewhere: the data remembers the newest token, and refuses older ones.

A lease cannot stop a process that was paused past its end. What it writes afterwards carries an old token.
"""

from __future__ import annotations

from typing import Any, TypeVar

from django.db import models
from django.db.models import Model, Q, QuerySet

from .engine.lock import MongoLock
from .exceptions import StaleToken

__all__ = ["FencingTokenField", "afenced_update", "fenced_update"]

M = TypeVar("M", bound=Model)


class FencingTokenField(models.BigIntegerField):  # type: ignore[type-arg]  # its types exist for checkers only
    """Where a row keeps the largest fencing token that has written it. Starts at 0; not for forms."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"default": 0, "editable": False, **options})


def fenced_update(queryset: QuerySet[M], token: int | MongoLock, *, field: str = "fencing_token", **values: Any) -> int:
    """Update the rows of *queryset* that no later holder of the lock has written; return how many.

    token: the lock, or its `fencing_token`. field: where the rows keep theirs; it is set along with *values*. Values
    may be expressions. On any database, and atomic: the comparison is part of the one UPDATE.

    Raises StaleToken if a row has a newer token. Of several rows, those with an older one are then updated; in a
    transaction, let the error leave it. The same token may write again. The key of the lock must be the same wherever
    the field is written: tokens of different keys say nothing about each other.
    """
    number, older, newer = _plan(queryset, token, field, values)
    updated: int = older.update(**values, **{field: number})
    if (found := newer.first()) is not None:
        raise StaleToken(number, found, field)
    return updated


async def afenced_update(
    queryset: QuerySet[M], token: int | MongoLock, *, field: str = "fencing_token", **values: Any
) -> int:
    """See fenced_update()."""
    number, older, newer = _plan(queryset, token, field, values)
    updated: int = await older.aupdate(**values, **{field: number})
    if (found := await newer.afirst()) is not None:
        raise StaleToken(number, found, field)
    return updated


def _plan(
    queryset: QuerySet[M], token: int | MongoLock, field: str, values: dict[str, Any]
) -> tuple[int, QuerySet[M], QuerySet[Any]]:
    """The token, the rows that it may write, and the newer tokens of those that it may not."""
    if not isinstance(queryset, (QuerySet, models.Manager)):
        raise TypeError(
            "fenced_update() takes a queryset, also for one row: Order.objects.filter(pk=order.pk). "
            f"It is no {type(queryset).__name__}"
        )
    if field in values:
        raise TypeError(f"{field} is what fenced_update() sets itself: give the token as the second argument")
    queryset.model._meta.get_field(field)  # raises FieldDoesNotExist
    number = token.fencing_token if isinstance(token, MongoLock) else token
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"token is a lock or its fencing_token, not {type(token).__name__}")
    older = queryset.filter(Q(**{f"{field}__lte": number}) | Q(**{f"{field}__isnull": True}))
    newer = queryset.filter(**{f"{field}__gt": number}).order_by().values_list(field, flat=True)
    return number, older, newer
