"""A writer reads the latest rate, writes the new one, and appends the replaced one to the history."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from django.db import connections, transaction
from django_mongodb_backend import transaction as mongo_transaction

from django_mongolock.versions import retry_on_conflict
from testproject.rates.models import PastRate, PlainRate, Rate


@retry_on_conflict(attempts=100, backoff=0.01, longest=0.2)
def set_rate(name: str, value: int, using: str = "default") -> None:
    """Give the currency a new rate, and move the replaced one to the history. Either both happen, or neither."""
    with atomic(using):
        rate = Rate.objects.using(using).get(pk=name)
        replaced, rate.value = rate.value, value
        rate.save()
        PastRate.objects.using(using).create(name=name, value=replaced)


def atomic(using: str) -> AbstractContextManager[Any]:
    """Return a transaction. Django's own does nothing on MongoDB."""
    kind: Any = mongo_transaction if connections[using].vendor == "mongodb" else transaction
    found: AbstractContextManager[Any] = kind.atomic(using=using)
    return found


def set_rate_plainly(name: str, value: int, using: str = "default") -> None:
    """Do the same in the usual way, without a version."""
    rate = PlainRate.objects.using(using).get(pk=name)
    replaced, rate.value = rate.value, value
    rate.save()
    PastRate.objects.using(using).create(name=name, value=replaced)
