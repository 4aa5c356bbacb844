"""The shop of the test project: the ad export story, its judge, and the views under locks."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connections
from django.test import AsyncClient, Client
from django.utils import timezone
from pytest_django import Settings
from pytest_django.live_server_helper import LiveServer

from django_mongolock import mongo_lock
from django_mongolock.models import Lock
from testproject.broker import broker_url
from testproject.celery import app
from testproject.external import views as external_views
from testproject.external.models import Call, ShownAd
from testproject.mongo import database
from testproject.shop import audit, services
from testproject.shop.locking import ad_lock
from testproject.shop.models import Ad, Order, Seller

NOON = datetime(2030, 1, 1, 12, tzinfo=timezone.get_current_timezone())
WITH_MONGO = pytest.mark.django_db(databases=["default", "mongo"], transaction=True)
EXPORT, WITHDRAW = Call.Kind.EXPORT, Call.Kind.WITHDRAW


def call(  # a call that was never saved: the judge's pure half needs no database
    kind: Call.Kind, version: int, sequence: int | None, *, ad: str = "a", start: float = 0, end: float = 0
) -> Call:
    """A planted entry of the external service's log; times in seconds after noon."""
    times = {"started_at": NOON + timedelta(seconds=start), "ended_at": NOON + timedelta(seconds=end)}
    return Call(ad_id=ad, kind=kind, version=version, sequence=sequence, **times)


class TestOvertaken:
    """The judge finds calls that took effect after a newer one, and no others."""

    def test_export_after_deletion(self) -> None:
        """An export that arrives after the withdrawal of a deleted ad is a wrong re-export."""
        late = call(EXPORT, 2, 3)
        assert audit.overtaken([call(EXPORT, 1, 1), late, call(WITHDRAW, 3, 2)]) == [late]

    def test_older_content_after_newer(self) -> None:
        """Content of an older version, shown after that of a newer one, counts as well; each time."""
        late = [call(EXPORT, 1, 2), call(EXPORT, 1, 3)]
        assert audit.overtaken([call(EXPORT, 2, 1), *late, call(EXPORT, 2, 4)]) == late

    def test_order_is_that_of_the_effects(self) -> None:
        """Not the times decide but the service's own numbering."""
        calls = [call(EXPORT, 1, 1, start=5, end=9), call(EXPORT, 2, 2, start=0, end=1)]
        assert audit.overtaken(calls) == []

    @pytest.mark.parametrize(
        "calls",
        [
            [call(EXPORT, 1, 1), call(EXPORT, 1, 2)],
            [call(EXPORT, 2, 1), call(EXPORT, 1, None)],
            [call(EXPORT, 2, 1, ad="a"), call(EXPORT, 1, 1, ad="b")],
            [call(WITHDRAW, 1, 1), call(EXPORT, 2, 2)],
        ],
        ids=["told twice", "refused", "another ad", "put back later"],
    )
    def test_innocent(self, calls: list[Call]) -> None:
        """What may happen under locks too is not held against anybody."""
        assert audit.overtaken(calls) == []


class TestOverlaps:
    """The judge finds two calls for one ad that were under way at once."""

    def test_found(self) -> None:
        """Also one that began long before, with a short one in between; a refused call counts."""
        long = call(EXPORT, 1, None, start=0, end=10)
        short, last = call(EXPORT, 2, 1, start=2, end=3), call(EXPORT, 3, 2, start=9, end=12)
        assert audit.overlaps([last, short, long]) == [(long, short), (long, last)]

    def test_innocent(self) -> None:
        """One that begins as the other ends, or concerns another ad, does not overlap."""
        calls = [call(EXPORT, 1, 1, end=1), call(EXPORT, 2, 2, start=1, end=2), call(EXPORT, 1, 1, ad="b", end=3)]
        assert audit.overlaps(calls) == []


@WITH_MONGO
class TestJudge:
    """The judge's other half reads the databases."""

    def test_final_states(self) -> None:
        """It finds ads that are shown and must not be, are not and must be, or show the wrong content."""
        right, missing, outdated, undead, hidden = (new_ad(title=str(number)) for number in range(5))
        for ad in (right, outdated, undead):
            show(ad)
        services.update_ad(str(outdated.pk), "7", price=5)
        for ad in (undead, hidden):
            services.delete_ad(str(ad.pk), "7")
        assert audit.wrong_finals() == [str(ad.pk) for ad in (undead, outdated, missing)]  # the last changed first

    def test_double_charges(self) -> None:
        """It finds orders for which money was taken twice."""
        buyer = User.objects.create(username="b")
        Order.objects.create(buyer=buyer, item="x", price=1, charges=1)
        twice = Order.objects.create(buyer=buyer, item="x", price=1, charges=2)
        assert audit.judge().double_charges == [twice.pk]

    def test_verdict(self) -> None:
        """It tells wrong exports from wrong withdrawals, and can leave out what is long past."""
        for planted in (call(EXPORT, 3, 1), call(EXPORT, 2, 2), call(WITHDRAW, 1, 3, start=1, end=2)):
            planted.save()
        found = audit.judge()
        assert (found.calls, len(found.wrong_exports), len(found.wrong_withdrawals)) == (3, 1, 1)
        assert not found.clean
        assert audit.judge(since=NOON + timedelta(seconds=1)).clean

    def test_clean(self) -> None:
        """Nothing done, nothing wrong."""
        assert audit.judge().clean


def new_ad(**fields: Any) -> Ad:
    """An ad of the user 7."""
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

    def test_seller_settings(self) -> None:
        """A seller's switch withdraws all his ads and nobody else's, and puts them back."""
        mine = {str(new_ad().pk), str(new_ad().pk)}
        other = services.create_ad("8", "A tent", "", 1)
        services.export_ad(str(other.pk))
        services.change_seller("7", exports=False)
        assert services.export_ads_of("7") == dict.fromkeys(mine, "withdrawn")
        assert [ad.pk for ad in ShownAd.objects.filter(shown=True)] == [str(other.pk)]
        services.change_seller("7", exports=True)
        assert services.export_ads_of("7") == dict.fromkeys(mine, "exported")
        assert audit.judge().clean

    def test_retry(self, external: Settings) -> None:
        """A refused export is written down as failed, and the retry job repeats it."""
        ad_id = str(new_ad().pk)
        external.EXTERNAL_FAILURES = 1.0
        assert services.export_ad(ad_id) == "failed"
        external.EXTERNAL_FAILURES = 0.0
        assert services.retry_exports() == {ad_id: "exported"}
        assert services.retry_exports() == {}

    def test_no_service(self, external: Settings) -> None:
        """A service that does not answer at all is a failed export too."""
        external.EXTERNAL_URL = "http://127.0.0.1:9/external"
        assert services.export_ad(str(new_ad().pk)) == "failed"

    def test_lost_event(self) -> None:
        """A change whose event was lost is exported by the retry job, but not before its time."""
        ad_id = str(new_ad().pk)
        assert services.retry_exports() == {}
        Ad.objects.filter(pk=ad_id).update(updated_at=timezone.now() - timedelta(minutes=1))
        assert services.retry_exports() == {ad_id: "exported"}

    def test_busy_ad_is_left(self) -> None:
        """The retry job leaves an ad to the flow that has its lock."""
        ad_id = str(new_ad().pk)
        Ad.objects.update(export_status=Ad.ExportStatus.FAILED)
        with mongo_lock(f"ad:{ad_id}"), ThreadPoolExecutor(1) as another:
            assert another.submit(services.retry_exports).result() == {ad_id: "busy"}

    def test_deleted_for_good(self) -> None:
        """Nobody changes an ad after its deletion, nor somebody else's."""
        ad_id = str(new_ad().pk)
        assert not services.update_ad(ad_id, "8", price=1)
        assert services.delete_ad(ad_id, "7")
        assert not services.update_ad(ad_id, "7", price=1)
        assert services.opt_ad(ad_id, "7", opted_in=True) is None


def export_under_lock(ad_id: str) -> str:
    """Export as every flow does."""
    with ad_lock(ad_id, wait=10):
        return services.export_ad(ad_id)


@WITH_MONGO
class TestStory:
    """Two flows at one ad: without the lock they overtake each other, with it they do not."""

    @pytest.mark.parametrize("locking", [True, False])
    def test_slow_export_and_deletion(self, external: Settings, monkeypatch: pytest.MonkeyPatch, locking: bool) -> None:
        """An ad is deleted while a slow export of it is under way: the story in its smallest form."""
        external.SHOP_LOCKING = locking
        delays = iter([0.5, 0.0])
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

    @pytest.mark.long
    @pytest.mark.parametrize("locking", [True, False])
    def test_processes(self, external: Settings, locking: bool) -> None:
        """Four processes change, delete and export five ads at random for a while: only locks keep them apart."""
        external.EXTERNAL_DELAY = (0.01, 0.05)
        external.EXTERNAL_FAILURES = 0.05
        ads = [str(new_ad().pk) for _ in range(5)]
        processes = [start_flow(external.EXTERNAL_URL, locking, *ads) for _ in range(4)]
        errors = [process.communicate(timeout=60)[1] for process in processes]
        assert [process.returncode for process in processes] == [0] * 4, errors
        external.EXTERNAL_FAILURES = 0.0
        services.retry_exports()
        found = audit.judge()
        assert found.calls > 100
        assert found.clean == locking, found.counts()
        assert bool(found.overlaps) != locking


FLOW = """
import random, sys
import django
django.setup()
from testproject.shop import services
from tests.test_shop import export_under_lock
for number in range(25):
    ad = random.choice(sys.argv[1:])
    if random.random() < 0.03:
        services.delete_ad(ad, "7")
    elif random.random() < 0.1:
        services.change_seller("7", exports=random.random() < 0.7)
        services.export_ads_of("7")
        continue
    else:
        services.update_ad(ad, "7", price=random.randint(1, 99), opted_in=random.random() < 0.7)
    export_under_lock(ad)
services.export_ads_of("7")
"""


def start_flow(external_url: str, locking: bool, *ads: str) -> subprocess.Popen[str]:
    """Start a process that runs FLOW on the test's databases."""
    env = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "testproject.settings",
        "MONGODB_NAME": connections["mongo"].settings_dict["NAME"],
        "EXTERNAL_URL": external_url,
        "SHOP_LOCKING": str(locking),
    }
    return subprocess.Popen([sys.executable, "-c", FLOW, *ads], env=env, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def seller(monkeypatch: pytest.MonkeyPatch, client: Client) -> User:
    """A user who is logged in; tasks run at once instead of in a worker."""
    monkeypatch.setitem(app.conf, "task_always_eager", True)
    user = User.objects.create(username="anna")
    client.force_login(user)
    return user


def send(client: Client, method: str, path: str, **body: Any) -> Any:
    """Send JSON, ask for JSON."""
    return client.generic(
        method, path, json.dumps(body), content_type="application/json", HTTP_ACCEPT="application/json"
    )


@contextmanager
def held_elsewhere(key: str) -> Iterator[None]:
    """Hold *key* in another thread, as another flow would."""
    free = threading.Event()

    def hold(held: threading.Event) -> None:
        with mongo_lock(key):
            held.set()
            assert free.wait(30)

    with ThreadPoolExecutor(1) as another:
        held = threading.Event()
        flow = another.submit(hold, held)
        assert held.wait(5)
        try:
            yield
        finally:
            free.set()
        flow.result()


@WITH_MONGO
@pytest.mark.usefixtures("external", "seller")
class TestAdViews:
    """The API that sellers use."""

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

    def test_opt(self, client: Client, seller: User) -> None:
        """Opting out exports at once; while another flow has the ad, the answer is 423 with Retry-After."""
        ad = services.create_ad(str(seller.pk), "A tent", "", 10)
        assert send(client, "POST", f"/api/ads/{ad.pk}/opt/", opted_in=False).json()["export_status"] == "withdrawn"
        with held_elsewhere(f"ad:{ad.pk}"):
            busy = send(client, "POST", f"/api/ads/{ad.pk}/opt/", opted_in=True)
        assert busy.status_code == 423
        assert int(busy["Retry-After"]) > 0
        ad.refresh_from_db()
        assert not ad.opted_in

    def test_seller_switch(self, client: Client, seller: User) -> None:
        """One switch for all ads of a seller."""
        ad = services.create_ad(str(seller.pk), "A tent", "", 10)
        assert send(client, "POST", "/api/seller/", exports=False).json() == {"ads": 1}
        assert not Seller.objects.get(pk=str(seller.pk)).exports
        ad.refresh_from_db()
        assert ad.export_status == "withdrawn"

    @pytest.mark.parametrize("body", ["{", "[]", '{"title": "", "price": 3}', '{"title": "x", "price": -1}'])
    def test_bad_input(self, client: Client, body: str) -> None:
        """Wrong input is refused and changes nothing."""
        answer = client.post("/api/ads/", body, content_type="application/json")
        assert answer.status_code == 400
        assert not Ad.objects.exists()

    def test_anonymous(self) -> None:
        """Who is not logged in is sent to the login page."""
        assert send(Client(), "POST", "/api/ads/", title="x", price=1)["Location"].startswith("/login/")

    def test_start_page(self, client: Client, seller: User) -> None:
        """The start page shows ads, orders and the judgement, and says which ads are locked."""
        ad = services.create_ad(str(seller.pk), "A <b>globe</b>", "", 10)
        Order.objects.create(buyer=seller, item="piano", price=1)
        others = Lock.objects.held().count()  # such as a job's that runs once a day
        with held_elsewhere(f"ad:{ad.pk}"):
            page = client.get("/").content.decode()
        assert "A &lt;b&gt;globe" in page
        assert "piano" in page
        assert f"Locks held now</dt><dd>{others + 1}<" in page


@WITH_MONGO
class TestOrderViews:
    """Orders are paid once and shipped once."""

    def test_double_click(self, seller: User, client: Client) -> None:
        """Of two clicks on "pay" at once, one takes the money and one meets the lock."""
        order = send(client, "POST", "/api/orders/", item="lamp", price="9.50").json()["order"]
        barrier, browsers = threading.Barrier(2), [Client(), Client()]
        for browser in browsers:  # one after the other: SQLite in memory has no two writers
            browser.force_login(seller)
        with ThreadPoolExecutor(2) as pool:
            clicks = [pool.submit(click, browser, order, barrier) for browser in browsers]
        assert sorted(each.result() for each in clicks) == [200, 423]
        assert Order.objects.get(pk=order).charges == 1

    def test_once_only(self, seller: User, client: Client) -> None:
        """A later click meets the order's state; somebody else's order is not there."""
        order = Order.objects.create(buyer=seller, item="lamp", price=1)
        path = f"/api/orders/{order.pk}"
        assert send(client, "POST", f"{path}/ship/").status_code == 409
        assert send(client, "POST", f"{path}/pay/").status_code == 200
        assert send(client, "POST", f"{path}/pay/").status_code == 409
        assert send(client, "POST", f"{path}/ship/").json() == {"order": str(order.pk), "state": "shipped"}
        assert send(client, "POST", f"/api/orders/{order.pk + 1}/pay/").status_code == 404
        assert send(client, "POST", "/api/orders/beef/pay/").status_code == 404

    def test_one_key_for_one_order(self, seller: User, client: Client) -> None:
        """Two ways to write an order's number are one lock."""
        order = Order.objects.create(buyer=seller, item="lamp", price=1)
        with held_elsewhere(f"order:{order.pk}"):
            assert send(client, "POST", f"/api/orders/00{order.pk}/pay/").status_code == 423

    async def test_async_view(self, seller: User) -> None:
        """The async view waits for the lock of the sync one and then does its work; 423 after its wait."""
        order = await Order.objects.acreate(buyer=seller, item="lamp", price=1, state="paid")
        browser = AsyncClient(headers={"accept": "application/json"})
        await browser.aforce_login(seller)
        async with mongo_lock(f"order:{order.pk}"):
            shipping = asyncio.create_task(browser.post(f"/api/orders/{order.pk}/ship/"))
            await asyncio.sleep(0.2)
            assert not shipping.done()
        assert (await shipping).status_code == 200


def click(browser: Client, order: str, barrier: threading.Barrier) -> int:
    """Click on "pay" when the other does."""
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


@WITH_MONGO
def test_each_model_in_its_place() -> None:
    """Migrations put the ads into MongoDB and the accounts into SQL, and nothing into both."""
    in_mongo = {name for name in database().list_collection_names() if name.startswith(("shop", "auth", "external"))}
    in_sql = {name for name in connections["default"].introspection.table_names() if not name.startswith("django")}
    assert in_mongo == {"shop_ad", "shop_seller", "external_call", "external_shownad"}
    assert {"shop_order", "auth_user"} <= in_sql
    assert not in_sql & in_mongo
