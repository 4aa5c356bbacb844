"""A writer: read the latest rate, write the new one, append the one that it replaced to the history."""

from __future__ import annotations

from django_mongolock.versions import retry_on_conflict
from testproject.rates.models import PastRate, PlainRate, Rate


@retry_on_conflict(attempts=100, backoff=0.01, longest=0.2)
def set_rate(name: str, value: int, using: str = "default") -> None:
    """Give the currency a new rate. After a conflict, read again."""
    rate = Rate.objects.using(using).get(pk=name)
    replaced, rate.value = rate.value, value
    rate.save()
    PastRate.objects.using(using).create(name=name, value=replaced)


def set_rate_plainly(name: str, value: int, using: str = "default") -> None:
    """Do the same in the usual way, without a version."""
    rate = PlainRate.objects.using(using).get(pk=name)
    replaced, rate.value = rate.value, value
    rate.save()
    PastRate.objects.using(using).create(name=name, value=replaced)
