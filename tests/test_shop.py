"""The shop of the test project: the ad export story, its judge, and the views under locks."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connections
from django.test import Client
from django.utils import timezone
from pytest_django import Settings
from pytest_django.live_server_helper import LiveServer

from testproject.broker import broker_url
from testproject.celery import app
from testproject.external import views as external_views
from testproject.external.models import Call, ShownAd
from testproject.shop import audit, services
from testproject.shop.locking import ad_lock
from testproject.shop.models import Ad, Order

NOON = datetime(2030, 1, 1, 12, tzinfo=timezone.get_current_timezone())
WITH_MONGO = pytest.mark.django_db(databases=["default", "mongo"], transaction=True)
EXPORT, WITHDRAW = Call.Kind.EXPORT, Call.Kind.WITHDRAW


def call(  # a call that was never saved: the judge's pure half needs no database
    kind: Call.Kind, version: int, sequence: int | None, *, ad: str = "a", start: float = 0, end: float = 0
) -> Call:
    """A planted entry of the external service's log; times in seconds after noon."""
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


@WITH_MONGO
class TestJudge:
    def test_final_states(self) -> None:
        """It finds ads that are shown and must not be, are not and must be, or show the wrong content."""
        right, missing, outdated, undead, hidden = (new_ad(title=str(number)) for number in range(5))
        for ad in (right, outdated, undead):
            show(ad)
        services.update_ad(str(outdated.pk), "7", price=5)
        for ad in (undead, hidden):
            services.delete_ad(str(ad.pk), "7")
        assert audit.wrong_finals() == [str(ad.pk) for ad in (undead, outdated, missing)]  # the last changed first


@WITH_MONGO
def test_verdict() -> None:
    """The judge tells wrong exports from wrong withdrawals and double charges, and can leave out what is long past."""
    assert audit.judge().clean
    buyer = User.objects.create(username="b")
    Order.objects.create(buyer=buyer, item="x", price=1, charges=1)
    twice = Order.objects.create(buyer=buyer, item="x", price=1, charges=2)
    for planted in (call(EXPORT, 3, 1), call(EXPORT, 2, 2), call(WITHDRAW, 1, 3, start=1, end=2)):
        planted.save()
    found = audit.judge()
    assert (found.calls, len(found.wrong_exports), len(found.wrong_withdrawals)) == (3, 1, 1)
    assert (found.double_charges, found.clean) == ([twice.pk], False)
    twice.delete()
    assert audit.judge(since=NOON + timedelta(seconds=1)).clean


def new_ad(**fields: Any) -> Ad:
    return services.create_ad("7", **{"title": "A lamp", "body": "", "price": 9, **fields})


def show(ad: Ad) -> None:
    """Let the external service have this ad as it is."""
    content = {"title": ad.title, "body": ad.body, "price": ad.price}
    ShownAd.objects.create(ad_id=str(ad.pk), shown=True, version=ad.document_version, content=content)


@pytest.fixture
def external(live_server: LiveServer, settings: Settings) -> Settings:
    """The external service, for real, over HTTP; quick and without failures."""
    settings.EXTERNAL_URL = f"{live_server.url}/external"
    settings.EXTERNAL_FAILURES = 0.0
    settings.EXTERNAL_DELAY = (0.0, 0.0)
    return settings


@WITH_MONGO
@pytest.mark.usefixtures("external")
class TestExport:
    """One flow at a time does what it should."""

    def test_a_life(self) -> None:
        """Created, changed, opted out, opted in, deleted: the service has what each state demands."""
        ad_id = str(new_ad().pk)
        assert services.export_ad(ad_id) == "exported"
        services.update_ad(ad_id, "7", price=8)
        assert services.export_ad(ad_id) == "exported"
        assert ShownAd.objects.get(pk=ad_id).content == {"title": "A lamp", "body": "", "price": 8}
        assert services.opt_ad(ad_id, "7", opted_in=False) == "withdrawn"
        assert services.opt_ad(ad_id, "7", opted_in=True) == "exported"
        services.delete_ad(ad_id, "7")
        assert services.export_ad(ad_id) == "withdrawn"
        assert audit.judge().clean
        assert not Ad.objects.unsettled().exists()

    def test_retry(self, external: Settings) -> None:
        """A refused export is written down as failed, and the retry job repeats it."""
        ad_id = str(new_ad().pk)
        external.EXTERNAL_FAILURES = 1.0
        assert services.export_ad(ad_id) == "failed"
        external.EXTERNAL_FAILURES = 0.0
        assert services.retry_exports() == {ad_id: "exported"}
        assert services.retry_exports() == {}
        external.EXTERNAL_URL = "http://127.0.0.1:9/external"
        assert services.export_ad(ad_id) == "failed"


def export_under_lock(ad_id: str) -> str:
    with ad_lock(ad_id, wait=10):
        return services.export_ad(ad_id)


@WITH_MONGO
class TestStory:
    """Two flows at one ad: without the lock they overtake each other, with it they do not."""

    @pytest.mark.parametrize("locking", [True, False])
    def test_slow_export_and_deletion(self, external: Settings, monkeypatch: pytest.MonkeyPatch, locking: bool) -> None:
        """An ad is deleted while a slow export of it is under way: the story in its smallest form."""
        external.SHOP_LOCKING = locking
        delays = iter([0.2, 0.0])
        begun = threading.Event()

        def slow_then_quick() -> float:
            begun.set()
            return next(delays)

        monkeypatch.setattr(external_views, "delay", slow_then_quick)
        ad_id = str(new_ad().pk)
        with ThreadPoolExecutor(2) as flows:
            flows.submit(export_under_lock, ad_id)
            assert begun.wait(5)
            services.delete_ad(ad_id, "7")
            flows.submit(export_under_lock, ad_id)
        found = audit.judge()
        assert (len(found.wrong_exports), len(found.overlaps), len(found.wrong_finals)) == (
            (0, 0, 0) if locking else (1, 1, 1)
        )


@pytest.fixture
def seller(monkeypatch: pytest.MonkeyPatch, client: Client) -> User:
    """A user who is logged in; tasks run at once instead of in a worker."""
    monkeypatch.setitem(app.conf, "task_always_eager", True)
    user = User.objects.create(username="anna")
    client.force_login(user)
    return user


def send(client: Client, method: str, path: str, **body: Any) -> Any:
    return client.generic(
        method, path, json.dumps(body), content_type="application/json", HTTP_ACCEPT="application/json"
    )


@WITH_MONGO
@pytest.mark.usefixtures("external", "seller")
class TestAdViews:
    def test_create_change_delete(self, client: Client) -> None:
        """Each change is accepted, and its task brings the external service up to date."""
        ad = send(client, "POST", "/api/ads/", title="A canoe", price=40).json()["ad"]
        assert ShownAd.objects.get(pk=ad).content["price"] == 40
        assert send(client, "PATCH", f"/api/ads/{ad}/", price=30).status_code == 202
        assert ShownAd.objects.get(pk=ad).content == {"title": "A canoe", "body": "", "price": 30}
        assert send(client, "DELETE", f"/api/ads/{ad}/").status_code == 202
        assert not ShownAd.objects.get(pk=ad).shown
        assert send(client, "PATCH", f"/api/ads/{ad}/", price=20).status_code == 404
        assert audit.judge().clean


@WITH_MONGO
class TestOrderViews:
    def test_double_click(self, seller: User, client: Client) -> None:
        """Of two clicks on "pay" at once, one takes the money, and the other meets the lock or the state."""
        order = send(client, "POST", "/api/orders/", item="lamp", price="9.50").json()["order"]
        barrier, browsers = threading.Barrier(2), [Client(), Client()]
        for browser in browsers:  # one after the other: SQLite in memory has no two writers
            browser.force_login(seller)
        with ThreadPoolExecutor(2) as pool:
            clicks = [pool.submit(click, browser, order, barrier) for browser in browsers]
        done, refused = sorted(each.result() for each in clicks)
        assert done == 200
        assert refused in {409, 423}  # it came a moment later, when the order was paid
        assert Order.objects.get(pk=order).charges == 1


def click(browser: Client, order: str, barrier: threading.Barrier) -> int:
    barrier.wait(10)
    status: int = send(browser, "POST", f"/api/orders/{order}/pay/").status_code
    connections.close_all()
    return status


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
