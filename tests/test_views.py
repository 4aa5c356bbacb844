"""`mongo_locked` on views, as functions and classes, sync and async, with contention as HTTP and with
ATOMIC_REQUESTS."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Callable, Iterator
from io import BytesIO
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import PermissionDenied
from django.core.handlers.asgi import ASGIRequest
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client, RequestFactory
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from ninja import NinjaAPI
from pytest_django import Settings
from rest_framework.decorators import api_view
from rest_framework.views import APIView

from django_mongolock import LockBackendFailed, LockNotAcquired, mongo_lock, mongo_locked
from django_mongolock.decorator import calls
from django_mongolock.decorator.policies import CallFacts, as_policy, find_request
from django_mongolock.decorator.views import make_response
from django_mongolock.engine.rule.options import LockOptions
from django_mongolock.signals import lock_released
from django_mongolock.testing import MemoryLocks
from tests.support.looking import held_elsewhere, holders
from tests.support.row_files import Rows, atomic_rows, write_row

pytestmark = pytest.mark.urls(__name__)


@mongo_locked("view:{name}", wait=0, on_contention="respond")
def function(request: HttpRequest, name: str) -> HttpResponse:
    raise AssertionError


@mongo_locked()
class WithoutAKey(View):
    def get(self, request: HttpRequest, name: str) -> HttpResponse:
        return HttpResponse(str(len(holders(f"{__name__}.WithoutAKey.dispatch"))))


# Views that write one row, for the tests of transactions. The views are given their locks in `TRANSACTIONAL`.


def write(request: Any, name: str) -> HttpResponse:
    write_row("file", name)
    if "savepoint" in request.GET:
        with transaction.atomic(using="file"):
            write_row("file", "inner")
            transaction.set_rollback(True, using="file")
    if "fail" in request.GET:
        raise ZeroDivisionError
    if "forbidden" in request.GET:
        raise PermissionDenied
    return HttpResponse("written")


def naive(request: HttpRequest, name: str) -> HttpResponse:
    """Write a row as most people would at first. The lock is released before Django commits."""
    with mongo_lock(f"row:{name}"):
        return write(request, name)


lock_row = mongo_locked("row:{name}")
non_atomic = transaction.non_atomic_requests(using="file")


def with_helper(request: HttpRequest, name: str) -> HttpResponse:
    """Call a locked helper from an unlocked view."""
    return lock_row(write)(request, name)


def a_view() -> Callable[[Any, str], HttpResponse]:
    """Make a new view, because Django marks the function itself."""

    def view(request: Any, name: str) -> HttpResponse:
        return write(request, name)

    return view


def get(self: Any, request: Any, name: str) -> HttpResponse:
    return write(request, name)


async def aget(self: Any, request: Any, name: str) -> HttpResponse:
    return HttpResponse()


def a_class(base: Any = View, get: Any = get) -> Any:
    """Make a new view class, because the lock changes the class itself."""
    return type("Made", (base,), {"get": get})


@non_atomic
@lock_row
async def async_view(request: HttpRequest, name: str) -> HttpResponse:
    """Open a transaction in a thread, because Django has none around async views."""

    def inside() -> HttpResponse:
        with transaction.atomic(using="file"):
            return write(request, name)

    return await sync_to_async(inside)()


def has_transaction(*call: Any, **kwargs: Any) -> HttpResponse:
    return HttpResponse(str(connections["file"].in_atomic_block))


#: Views that answer whether a transaction is open while another caller holds the lock.
waiting = mongo_locked("row:{name}", wait=0, on_contention=has_transaction)

#: The lock is inside of the transaction, below the maker of the view.
INSIDE = ("below_api_view", "api_method", "ninja")
TRANSACTIONAL: dict[str, Any] = {
    "above_api_view": lock_row(api_view(["GET"])(a_view())),
    "below_api_view": api_view(["GET"])(lock_row(a_view())),
    "api_method": a_class(APIView, lock_row(get)).as_view(),
    "api_class": lock_row(a_class(APIView)).as_view(),
    "async_own": async_view,
    "naive": naive,
    "function": lock_row(a_view()),
    "two": mongo_locked("outer:{name}")(lock_row(a_view())),
    "waits": waiting(a_view()),
    "waits_inside": mongo_locked("outer:{name}")(waiting(a_view())),
    "class": lock_row(a_class()).as_view(),
    "method_decorator": method_decorator(lock_row, name="dispatch")(a_class()).as_view(),
    "method": a_class(get=lock_row(get)).as_view(),
    "helper": with_helper,
    "none_below": lock_row(non_atomic(a_view())),
    "none_above": non_atomic(lock_row(a_view())),
    "none_class": method_decorator(non_atomic, name="dispatch")(lock_row(a_class())).as_view(),
    "none_method": method_decorator(non_atomic, name="dispatch")(a_class(get=lock_row(get))).as_view(),
    "async": lock_row(a_class(get=aget).as_view()),
    "async_class": lock_row(a_class(get=aget)).as_view(),
}
ninja = NinjaAPI(urls_namespace="test_views")
ninja.get("/{name}/")(lock_row(a_view()))

urlpatterns = [
    path("function/<name>/", function),
    path("without-a-key/<name>/", WithoutAKey.as_view()),
    *(path(f"write-{kind}/<name>/", view) for kind, view in TRANSACTIONAL.items()),
    path("write-ninja/", ninja.urls),
]


class TestViewClasses:
    def test_classes_have_keys_of_their_own(self, name: str) -> None:
        """Without a key, each view class is its own lock, though all inherit one dispatch()."""
        assert Client().get(f"/without-a-key/{name}/").content == b"1"

    def test_async_dispatch(self, name: str) -> None:
        """A view class is async if its dispatch() is. A GraphQL view, for example, has no methods for those of HTTP."""
        made: Any = lock_row(type("Made", (View,), {"dispatch": aget}))
        assert asyncio.run(made().dispatch(RequestFactory().get("/"), name=name)).status_code == 200

    def test_undecided_dispatch(self, name: str) -> None:
        """dispatch() of an async view class is no coroutine function. Decorating it is an error that says so."""
        view: Any = method_decorator(lock_row, name="dispatch")(a_class(get=aget)).as_view()
        with pytest.raises(TypeError, match="on the view class instead of its dispatch"):
            asyncio.run(view(RequestFactory().get("/"), name=name))


class TestResponse:
    """The response to a client when the lock is busy."""

    @pytest.mark.parametrize(
        ("accept", "kind"),
        [
            ({}, "text/html"),
            ({"accept": "*/*"}, "text/html"),
            ({"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}, "text/html"),
            ({"accept": "text/plain"}, "text/plain"),
            ({"accept": "application/json"}, "application/json"),
            ({"accept": "application/json, text/plain, */*"}, "application/json"),
            ({"accept": "text/html;q=0.5, application/json"}, "application/json"),
            ({"accept": "image/png"}, "text/plain"),
        ],
    )
    def test_accept(self, name: str, accept: dict[str, str], kind: str) -> None:
        """The response is JSON, a page or text, as the client prefers. The response names neither key nor holder, and
        is not cached."""
        with held_elsewhere(f"view:{name}", label="secret label", owner="secret owner", lease=5):
            answer = Client().get(f"/function/{name}/", headers=accept)
        assert answer.status_code == 423
        assert answer["Content-Type"].startswith(kind)
        assert 1 <= int(answer["Retry-After"]) <= 6
        assert answer["Cache-Control"] == "no-store"
        text = answer.content.decode()
        assert "try again" in text
        assert name not in text
        assert "secret" not in text
        if kind == "application/json":
            assert json.loads(text)["code"] == "locked"
            assert json.loads(text)["retry_after"] == int(answer["Retry-After"])

    def test_status(self, name: str, settings: Settings) -> None:
        settings.MONGOLOCK = {**settings.MONGOLOCK, "CONTENTION_STATUS": 409}
        with held_elsewhere(f"view:{name}"):
            assert Client().get(f"/function/{name}/").status_code == 409

    @pytest.mark.long
    @pytest.mark.usefixtures("away")
    def test_store_away(self, name: str) -> None:
        """The response is 503 with Retry-After while MongoDB cannot be reached."""
        answer = Client().get(f"/function/{name}/", headers={"accept": "application/json"})
        assert answer.status_code == 503
        assert int(answer["Retry-After"]) > 0
        assert answer.json()["code"] == "unavailable"

    def test_store_away_is_no_contention(self) -> None:
        """Only "respond" has an answer to an outage. No work is skipped because the store cannot be reached."""
        error = LockBackendFailed("away")
        for policy in ("raise", "skip", "retry", lambda error: "handled"):
            with pytest.raises(LockBackendFailed):
                as_policy(policy).refused(error, CallFacts(LockOptions(), (), {}))

    @pytest.mark.parametrize(
        ("usual", "held_for", "left", "said"),
        [
            (None, math.inf, 0.0, "1"),
            (None, math.inf, 20.0, "20"),
            (None, 4.0, 20.0, "4"),
            (10.0, 4.0, 20.0, "6"),
            (10.0, 14.0, 20.0, "14"),
            (10.0, 4.0, 3.0, "3"),
            (0.2, 0.1, 20.0, "1"),
        ],
    )
    def test_retry_after(self, usual: float | None, held_for: float, left: float, said: str) -> None:
        """Retry-After is the usual duration of such holds, or else the time held so far once more. The limits are the
        rest of the lease and one second."""
        error = LockNotAcquired("key", retry_after=left)
        error.usual, error.held_for = usual, held_for
        assert make_response(RequestFactory().get("/"), error)["Retry-After"] == said

    def test_usual(self, mongolock: MemoryLocks, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        """A function learns its usual hold from calls that ran."""
        times = itertools.count(0, 8)
        monkeypatch.setattr(calls, "clock", SimpleNamespace(now=lambda: next(times)))
        view: Any = mongo_locked("view:{name}", wait=0, on_contention="respond", lease=60)(
            lambda request, name: HttpResponse()
        )
        for _ in "123":
            view(RequestFactory().get("/"), name)
        with mongolock.hold(f"view:{name}", lease=60):
            assert view(RequestFactory().get("/"), name)["Retry-After"] == "8"
            mongolock.advance(5)
            assert view(RequestFactory().get("/"), name)["Retry-After"] == "3"

    def test_a_minimum_hold(self, mongolock: MemoryLocks, name: str) -> None:
        """A client comes back at the end of the minimum hold, however short the work was."""
        view: Any = mongo_locked("view:{name}", wait=0, on_contention="respond", min_hold=50)(
            lambda request, name: HttpResponse()
        )
        assert view(RequestFactory().get("/"), name).status_code == 200
        mongolock.advance(10)
        assert view(RequestFactory().get("/"), name)["Retry-After"] == "40"


class TestFindRequest:
    REQUEST: ClassVar[HttpRequest] = RequestFactory().get("/")

    def test_places(self) -> None:
        """Keys can use the first or second argument of the view, by name, or a request inside one of Django REST
        framework."""

        class Wrapped:
            def __init__(self, request: HttpRequest) -> None:
                self._request = request

        view = View()
        view.setup(self.REQUEST)
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
            ((self.REQUEST,), {}),
            ((object(), self.REQUEST), {}),
            ((), {"request": self.REQUEST}),
            ((view, 5), {}),
            ((Wrapped(self.REQUEST),), {}),
        ]
        for args, kwargs in calls:
            assert find_request(args, kwargs) is self.REQUEST
        assert isinstance(find_request((ASGIRequest({"method": "GET", "path": "/"}, BytesIO()),), {}), ASGIRequest)

    def test_nothing_is_touched(self) -> None:
        """No attribute of an argument that could cost a query is read, and lazy ones stay lazy."""
        from django.utils.functional import SimpleLazyObject

        class Ticket:
            @property
            def request(self) -> HttpRequest:
                raise AssertionError("looked up")

            def __getattr__(self, name: str) -> Any:
                raise AssertionError(name)

        def look_up() -> Any:
            raise AssertionError("looked up")

        assert find_request((Ticket(), SimpleLazyObject(look_up)), {"request": None}) is None
        assert find_request((), {}) is None


rows = pytest.fixture(atomic_rows)


@pytest.fixture
def at_release(rows: Rows) -> Iterator[list[tuple[str, list[str]]]]:
    """Return the list of the kinds of keys and the rows, as a second connection sees them at each release."""
    seen: list[tuple[str, list[str]]] = []

    def look(*, key: str, **event: Any) -> None:
        seen.append((key.partition(":")[0], rows()))

    lock_released.connect(look)
    yield seen
    lock_released.disconnect(look)


class TestAtomicRequests:
    """F47: The order is acquire, commit, release, as seen through a second connection to a real file."""

    LOCKED = (
        *("function", "class", "method_decorator", "above_api_view", "api_class", "async_own"),
        *("method", "helper", *INSIDE),
    )

    @pytest.mark.parametrize("kind", LOCKED)
    def test_order(self, kind: str, name: str, at_release: Any, rows: Any) -> None:
        """An error rolls back before the lock is released. Afterwards the file can be written at once, and the next
        holder sees the rows written under the lock. A rollback of an inner savepoint changes nothing of that."""
        with pytest.raises(ZeroDivisionError):
            Client().get(f"/write-{kind}/{name}/?fail")
        assert at_release == [("row", [])]
        assert rows() == []
        assert not connections["file"].in_atomic_block
        Client().get(f"/write-{kind}/{name}/?savepoint")
        Client().get(f"/write-{kind}/{name}/")
        assert at_release[1:] == [("row", [name]), ("row", [name, name])]

    @pytest.mark.filterwarnings("ignore:.*was released inside the transaction")
    def test_naive(self, name: str, at_release: Any, rows: Any) -> None:
        """This test finds a decorator that releases before the commit, such as this one."""
        Client().get(f"/write-naive/{name}/")
        assert at_release == [("row", [])]
        assert rows() == [name]

    @pytest.mark.parametrize("kind", ["below_api_view", "api_method", "api_class", "above_api_view"])
    def test_api_exception(self, kind: str, name: str, at_release: Any, rows: Any) -> None:
        """An error response of Django REST framework is rolled back before the release, too."""
        assert Client().get(f"/write-{kind}/{name}/?forbidden").status_code == 403
        assert at_release == [("row", [])]
        assert rows() == []

    def test_two_locks(self, name: str, at_release: Any) -> None:
        """With two locks on a view, both are released after the commit."""
        Client().get(f"/write-two/{name}/")
        assert at_release == [("row", [name]), ("outer", [name])]

    @pytest.mark.parametrize("kind", ["waits", "waits_inside"])
    def test_busy(self, kind: str, name: str, rows: Any) -> None:
        """No transaction is open while a view waits for its lock, or while it holds one and waits for another."""
        with held_elsewhere(f"row:{name}"):
            assert Client().get(f"/write-{kind}/{name}/").content == b"False"

    @pytest.mark.parametrize("kind", ["none_below", "none_above", "none_class", "none_method"])
    def test_non_atomic_requests(self, kind: str, name: str, rows: Any) -> None:
        """A view without a transaction has none above or below the lock. The view's writes stay."""
        with pytest.raises(ZeroDivisionError):
            Client().get(f"/write-{kind}/{name}/?fail")
        assert rows() == [name]

    async def test_asgi(self, name: str, at_release: Any) -> None:
        """The async handler runs sync views in threads. The order is the same."""
        await AsyncClient().get(f"/write-function/{name}/")
        await AsyncClient().get(f"/write-method/{name}/")
        assert at_release == [("row", [name]), ("row", [name, name])]

    @pytest.mark.parametrize("kind", ["async", "async_class"])
    def test_async(self, kind: str, name: str, rows: Any) -> None:
        """Django has no transactions for async views and refuses them. The lock does not hide that."""
        with pytest.raises(RuntimeError, match="cannot use ATOMIC_REQUESTS with async views"):
            Client().get(f"/write-{kind}/{name}/")
