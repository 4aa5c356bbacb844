"""The facts that a lock records about its holder by itself, such as its place and its user."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser, User
from django.core.handlers.wsgi import WSGIRequest
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import AsyncClient, Client, RequestFactory
from django.urls import include, path
from django.utils.functional import SimpleLazyObject

from django_mongolock import mongo_lock, mongo_locked
from django_mongolock.context import LockContextMiddleware, current_request, holder_facts, serving
from tests.support.looking import holder, new_key

pytestmark = pytest.mark.urls(__name__)


def facts_of_a_lock() -> dict[str, Any]:
    """Return the facts in the document of a lock taken here."""
    key = new_key()
    with mongo_lock(key):
        found = holder(key)
    return {name: found.get(name) for name in ("place", "user", "thread", "label")}


def inside(request: HttpRequest) -> HttpResponse:
    """Take a lock somewhere inside. Only the middleware knows the view there."""
    return JsonResponse(facts_of_a_lock())


async def afacts_of_a_lock() -> dict[str, Any]:
    """See facts_of_a_lock()."""
    key = new_key()
    async with mongo_lock(key):
        found = holder(key)
    return {name: found.get(name) for name in ("place", "user", "thread")}


async def ainside(request: HttpRequest) -> HttpResponse:
    return JsonResponse(await afacts_of_a_lock())


async def ainside_known(request: HttpRequest) -> HttpResponse:
    await request.auser()
    return await ainside(request)


@mongo_locked("decorated:{name}")
def decorated(request: HttpRequest, name: str) -> HttpResponse:
    return JsonResponse({"user": holder(f"decorated:{name}").get("user")})


inner = [path("inside/", inside, name="inside")]
urlpatterns = [
    path("inside/", inside, name="inside"),
    path("ainside/", ainside),
    path("ainside-known/", ainside_known),
    path("decorated/<name>/", decorated),
    path("inner/", include((inner, "app"), namespace="space")),
]


@pytest.fixture
def user(transactional_db: None) -> User:
    return User.objects.create_user("ann@example.org", password="x")


def logged_in(user: User) -> Client:
    client = Client()
    client.force_login(user)
    return client


class TestPlace:
    @pytest.mark.parametrize(
        ("address", "place"),
        [
            ("/inside/", "view inside"),
            ("/inner/inside/", "view space:inside"),
            ("/ainside/", f"view {__name__}.ainside"),
        ],
    )
    def test_view(self, address: str, place: str) -> None:
        """The middleware reports the view to locks anywhere inside, by its name in the URLs, or else by its dotted
        path. This works under both handlers, for both kinds of views. Afterwards no view is reported."""
        assert Client().get(address).json()["place"] == place
        assert current_request.get() is None
        assert asyncio.run(AsyncClient().get(address)).json()["place"] == place
        assert "place" not in holder_facts()

    def test_without_the_middleware(self, name: str) -> None:
        """A decorated view reports itself to its own lock and to locks inside. Before the URL is resolved, the method
        and the path are recorded."""

        def view(request: HttpRequest, name: str) -> HttpResponse:
            return HttpResponse(f"{holder(name)['place']}, {facts_of_a_lock()['place']}")

        async def aview(request: HttpRequest, name: str) -> HttpResponse:
            return HttpResponse(f"{holder(name)['place']}, {(await afacts_of_a_lock())['place']}")

        request, decorate = RequestFactory().get("/here"), mongo_locked("{name}")
        for answer in (decorate(view)(request, name), asyncio.run(decorate(aview)(request, name))):
            assert answer.content == b"GET /here, GET /here"

    def test_after_an_error(self) -> None:
        """A request that failed leaves nothing behind."""

        def fail(request: HttpRequest) -> HttpResponse:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            LockContextMiddleware(fail)(RequestFactory().get("/"))
        assert current_request.get() is None

    async def test_middleware_is_both(self) -> None:
        """The middleware is sync or async like its wrapped function. Concurrent requests do not mix."""

        async def get_response(request: HttpRequest) -> HttpResponse:
            await asyncio.sleep(0.01)
            return HttpResponse(str(holder_facts()["place"]))

        middleware = LockContextMiddleware(get_response)
        assert asyncio.iscoroutinefunction(middleware)
        answers: Any = await asyncio.gather(*(middleware(RequestFactory().get(f"/{n}")) for n in range(5)))
        assert [answer.content.decode() for answer in answers] == [f"GET /{n}" for n in range(5)]
        assert not asyncio.iscoroutinefunction(LockContextMiddleware(lambda request: HttpResponse()))


class TestUser:
    @pytest.mark.long
    def test_logged_in(self, user: User) -> None:
        """The user of a login session is recorded in sync views."""
        assert logged_in(user).get("/inside/").json()["user"] == "ann@example.org"
        assert logged_in(user).get("/decorated/x/").json()["user"] == "ann@example.org"

    def test_anonymous(self, transactional_db: None) -> None:
        """Without a login no user is recorded, with or without a cookie."""
        assert Client().get("/inside/").json()["user"] is None
        client = Client()
        client.cookies["sessionid"] = "x" * 32
        assert client.get("/inside/").json()["user"] is None

    def test_async(self, user: User) -> None:
        """A coroutine does not look the user up, because that would block. A user who is already known is recorded."""
        client = logged_in(user)
        assert client.get("/ainside/").json()["user"] is None
        assert client.get("/ainside-known/").json()["user"] == "ann@example.org"

    @pytest.mark.parametrize(("user", "name"), [(User(username="bob"), "bob"), (AnonymousUser(), None), (None, None)])
    def test_set_by_others(self, user: Any, name: str | None) -> None:
        """A user from token authentication on the request is recorded, without a session."""
        request = RequestFactory().get("/")
        request.user = user
        assert facts_within(request).get("user") == name

    def test_failing_lookup(self) -> None:
        def fail() -> Any:
            raise ZeroDivisionError

        request = RequestFactory().get("/")
        request.COOKIES["sessionid"] = "x"
        request.user = SimpleLazyObject(fail)  # type: ignore[assignment]
        assert "user" not in facts_within(request)

    def test_hostile_name(self) -> None:
        """F54: A name with anything in it is stored as text, cut and cleaned."""
        request = RequestFactory().get("/")
        request.user = User(username="$token\x00\ud800<b>" + "x" * 500)
        with serving(request):
            found = facts_of_a_lock()["user"]
        assert found.startswith("$token??<b>xxx")
        assert len(found) == 256


def facts_within(request: WSGIRequest) -> dict[str, Any]:
    with serving(request):
        return holder_facts()


class TestWorker:
    def test_thread(self) -> None:
        """The thread's name is that of the caller's thread, not of the thread that sends the command."""
        assert facts_of_a_lock()["thread"] == threading.current_thread().name
        with ThreadPoolExecutor(1, thread_name_prefix="counting") as thread:
            assert thread.submit(facts_of_a_lock).result()["thread"] == "counting_0"

    async def test_asyncio_task(self) -> None:
        """The task's name is that of the calling task."""
        found = await asyncio.create_task(afacts_of_a_lock(), name="counting coins")
        assert found["thread"] == "counting coins"
