"""The examples in the pages on the decorator and on transactions are run, and do what the pages say."""

# ruff: noqa: S102 - what is executed are our own pages

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connection, connections, models, transaction
from django.test import RequestFactory, override_settings
from django.test.utils import isolate_apps
from pymongo import AsyncMongoClient, MongoClient
from pytest_django import Settings
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from django_mongolock import LockNotAcquired, mongo_lock
from django_mongolock.signals import lock_released
from testproject.mongo import MongoModel
from testproject.shop.models import Order
from tests.support.looking import held_elsewhere, holders
from tests.test_docs_topics import app, blocks, run

__all__ = ["app"]
pytestmark = pytest.mark.django_db(databases=["default", "mongo"], transaction=True)


@pytest.fixture
def soon(settings: Settings) -> None:
    """Nobody waits for a lock that is busy."""
    settings.MONGOLOCK = {**settings.MONGOLOCK, "WAIT": 0, "SHORT_WAIT": 0}


@pytest.mark.usefixtures("app", "soon")
class TestDecorator:
    """docs/reference/decorator.md"""

    @pytest.fixture
    def names(self) -> dict[str, Any]:
        """What the page has defined."""
        return run("reference/decorator.md")

    @pytest.mark.long
    def test_functions_and_tasks(self, names: dict[str, Any]) -> None:
        """They run under the lock; a busy one raises, also in a task that is called directly."""
        invoice = SimpleNamespace(pk=5)
        assert names["send"](invoice) == "sent invoice 5"
        assert names["export_ad"](7) == names["export_ad"].apply((7,)).get() == "exported ad 7"
        with held_elsewhere("invoice:5", "ad:7"):
            with pytest.raises(LockNotAcquired) as refusal:
                names["send"](invoice)
            assert refusal.value.retry_after
            with pytest.raises(LockNotAcquired):
                names["export_ad"](7)
            assert names["send"](SimpleNamespace(pk=6)) == "sent invoice 6"

    def test_views(self, names: dict[str, Any], rf: RequestFactory) -> None:
        """They answer; 423 with Retry-After where the lock is busy, without the key."""
        pay, account = names["pay"], names["AccountView"].as_view()
        assert pay(rf.post("/"), order_id=5).content == b"paid order 5"
        assert account(rf.get("/"), pk=5).content == b"account 5"
        with held_elsewhere("order:5", "account:5"):
            for busy in (pay(rf.post("/"), order_id=5), account(rf.get("/"), pk=5)):
                assert busy.status_code == 423
                assert int(busy["Retry-After"]) > 0
                assert b":5" not in busy.content

    @pytest.mark.long
    def test_rest_framework(self, names: dict[str, Any], rf: RequestFactory) -> None:
        """With the setting of the page, the handler answers for a lock inside of a view; without it, nobody does."""

        class Inside(APIView):  # type: ignore[misc]  # it has no types
            authentication_classes = ()
            permission_classes = ()

            def get(self, request: Request) -> Response:
                with mongo_lock("inside"):
                    return Response("done")

        def ask() -> Any:
            return Inside.as_view()(rf.get("/"))

        with held_elsewhere("inside"), pytest.raises(LockNotAcquired):
            ask()
        with override_settings(REST_FRAMEWORK=names["REST_FRAMEWORK"]):
            assert ask().data == "done"
            with held_elsewhere("inside"):
                assert ask().status_code == 423


class TestTransactions:
    """docs/howto/transactions.md"""

    def test_order(self) -> None:
        """Right is after the commit, wrong is before it and warns, "on_commit" is after it again."""
        seen: list[str] = []

        def pay(order: str) -> None:
            assert connection.in_atomic_block
            assert len(holders("order:5")) == 1
            seen.append(f"paid {order}")

        def note(**facts: Any) -> None:
            seen.append("released too soon" if connection.in_atomic_block else "released")

        names: dict[str, Any] = {"pay": pay, "order": "it"}
        order, on_commit, *_ = blocks("howto/transactions.md")
        lock_released.connect(note)
        try:
            with pytest.warns(RuntimeWarning) as warned:
                exec(order, names)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                exec(on_commit, names)
        finally:
            lock_released.disconnect(note)
        assert seen == ["paid it", "released", "paid it", "released too soon", "paid it", "released"]
        (warning,) = warned
        assert str(warning.message).startswith(
            "the lock 'order:5' was released inside the transaction that is open on 'default'"
        )
        assert warning.filename == "howto/transactions.md"

    @pytest.fixture
    def client(self, mongo: MongoClient[dict[str, Any]]) -> Iterator[MongoClient[dict[str, Any]]]:
        """PyMongo, with an account in the database of the page."""
        mongo.drop_database("shop")
        mongo.shop.accounts.insert_one({"_id": 5, "balance": 100})
        yield mongo
        mongo.drop_database("shop")

    @pytest.fixture
    def locks_alias(self) -> Iterator[Any]:
        """The connection of the locks under the name that it has on the page, with empty collections."""
        mongo: Any = connections["mongo"]
        for name in ("docs_accounts", "log"):  # not every server makes one in a transaction
            mongo.database.create_collection(name)
        connections["locks"] = mongo
        yield mongo
        del connections["locks"]
        for name in ("docs_accounts", "log"):
            mongo.database.drop_collection(name)

    @pytest.mark.long
    @isolate_apps("testproject.shop")
    def test_lock_atomic(self, client: MongoClient[dict[str, Any]], locks_alias: Any, mongo_uri: str) -> None:
        """The ORM, PyMongo and a coroutine each commit; so does what is given to `run_atomic`."""

        class Account(MongoModel):
            id = models.IntegerField(primary_key=True, db_column="_id")
            balance = models.IntegerField()

            class Meta:
                app_label = "shop"
                db_table = "docs_accounts"

        accounts: Any = Account
        accounts.objects.create(pk=5, balance=100)
        names: dict[str, Any] = {"Account": Account, "client": client, "mongo_lock": mongo_lock}
        _, _, both, coroutine, again, *_ = blocks("howto/transactions.md")

        exec(both, names)
        assert (accounts.objects.get().balance, locks_alias.database["log"].count_documents({})) == (90, 1)
        assert client.shop.accounts.find_one() == {"_id": 5, "balance": 90}

        exec(coroutine, names)

        async def withdraw() -> None:
            async with AsyncMongoClient[dict[str, Any]](mongo_uri) as coroutines:
                await names["withdraw"](coroutines)

        asyncio.run(withdraw())
        assert client.shop.accounts.find_one() == {"_id": 5, "balance": 80}

        exec(again, names)
        assert accounts.objects.get().balance == 80
        assert holders("account:5") == []

        accounts.objects.create(pk=7, balance=0)
        transfer = blocks("howto/transactions.md")[5]
        exec(transfer, names)
        names["F"] = models.F
        names["transfer"](5, 7, 30)
        names["transfer"](7, 5, 10)
        with pytest.raises(ValueError, match="not enough"):
            names["transfer"](5, 7, 1_000)
        assert [accounts.objects.get(pk=pk).balance for pk in (5, 7)] == [60, 20]
        assert holders("account:5") == holders("account:7") == []

    def test_for_update(self, django_user_model: Any) -> None:
        """Both locks of the example are held until the commit, and after an error until the rollback."""
        buyer = django_user_model.objects.create(username="anna")
        order = Order.objects.create(buyer=buyer, item="x", price=5)
        keys = [f"shop.order:{order.pk}", f"auth.user:{buyer.pk}"]
        held: list[bool] = []

        def pay(order: Any) -> None:
            held.extend(bool(holders(key)) for key in keys)

        names: dict[str, Any] = {"mongo_lock": mongo_lock, "transaction": transaction, "pay": pay}
        exec(blocks("howto/transactions.md")[6], names)
        with transaction.atomic():
            names["settle"](order)
            held.extend(bool(holders(key)) for key in keys)
        assert held == [True] * 4
        assert [holders(key) for key in keys] == [[], []]
