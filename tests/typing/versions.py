"""The types of versions, checked by mypy and never run (see tests/test_typing.py)."""

from __future__ import annotations

from typing import Any, assert_type

from pymongo.asynchronous.collection import AsyncCollection
from pymongo.collection import Collection

from django_mongolock.versions import retry_on_conflict
from testproject.rates.models import Rate


@retry_on_conflict
def plain(pk: str, by: int = 1) -> Rate:
    return Rate.objects.get(pk=pk)


@retry_on_conflict(attempts=3, using="default")
async def later(pk: str) -> int:
    return (await Rate.objects.aget(pk=pk)).version


async def check(collection: Collection[dict[str, Any]], other: AsyncCollection[dict[str, Any]]) -> None:
    assert_type(plain("EUR", by=2), Rate)
    assert_type(await later("EUR"), int)
    assert_type(plain("EUR").version, int)


def wrong(collection: Collection[dict[str, Any]]) -> None:
    plain(5)  # type: ignore[arg-type]
    retry_on_conflict(attempts="3")  # type: ignore[call-overload]
