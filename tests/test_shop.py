"""The shop of the test project, with the ad export story, its judge, and the views under locks."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from django.utils import timezone

from testproject.broker import broker_url
from testproject.external.models import Call
from testproject.shop import audit

NOON = datetime(2030, 1, 1, 12, tzinfo=timezone.get_current_timezone())
EXPORT, WITHDRAW = Call.Kind.EXPORT, Call.Kind.WITHDRAW


def call(  # a call that was never saved, because the judge's pure half needs no database
    kind: Call.Kind, version: int, sequence: int | None, *, ad: str = "a", start: float = 0, end: float = 0
) -> Call:
    """Return a planted entry of the external service's log. Times are in seconds after noon."""
    times = {"started_at": NOON + timedelta(seconds=start), "ended_at": NOON + timedelta(seconds=end)}
    return Call(ad_id=ad, kind=kind, version=version, sequence=sequence, **times)


@pytest.mark.parametrize(
    ("calls", "late"),
    [
        ([call(EXPORT, 1, 1), call(EXPORT, 2, 3), call(WITHDRAW, 3, 2)], [1]),
        ([call(EXPORT, 2, 1), call(EXPORT, 1, 2), call(EXPORT, 1, 3), call(EXPORT, 2, 4)], [1, 2]),
        ([call(EXPORT, 1, 1, start=5, end=9), call(EXPORT, 2, 2, start=0, end=1)], []),
        ([call(EXPORT, 1, 1), call(EXPORT, 1, 2)], []),
        ([call(EXPORT, 2, 1), call(EXPORT, 1, None)], []),
        ([call(EXPORT, 2, 1, ad="a"), call(EXPORT, 1, 1, ad="b")], []),
        ([call(WITHDRAW, 1, 1), call(EXPORT, 2, 2)], []),
    ],
    ids=["after deletion", "older content", "by effects", "told twice", "refused", "another ad", "put back later"],
)
def test_overtaken(calls: list[Call], late: list[int]) -> None:
    """The judge finds the calls that took effect after a newer one, and no others."""
    assert audit.overtaken(calls) == [calls[number] for number in late]


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("mongodb://localhost", "mongodb://localhost/q"),
        ("mongodb://a:1,b:2/?replicaSet=rs0", "mongodb://a:1,b:2/q?replicaSet=rs0"),
        ("mongodb+srv://me:pw@c.example/shop?w=1", "mongodb+srv://me:pw@c.example/q?w=1&authSource=shop"),
        ("mongodb://me:pw@a/shop?authSource=admin", "mongodb://me:pw@a/q?authSource=admin"),
        ("mongodb://a/shop", "mongodb://a/q"),
    ],
)
def test_broker_url(uri: str, expected: str) -> None:
    """The broker gets its own database in the same MongoDB, and the user is still looked up where he was."""
    assert broker_url(uri, "q") == expected
