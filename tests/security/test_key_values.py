"""A value from outside has one meaning or none. The forms of a template's fields, and values that make no key."""

import json
import time
import tracemalloc
import uuid
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from typing import Any

import pytest
from bson import ObjectId
from django.core.checks import CheckMessage
from django.db import models
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import include, path, re_path
from django.utils.decorators import method_decorator
from django.views import View
from hypothesis import example, given
from hypothesis import strategies as st
from pytest_django import Settings
from rest_framework.decorators import api_view
from rest_framework.viewsets import ViewSet

from django_mongolock import LockNotAcquired, mongo_lock, mongo_locked, once_per
from django_mongolock.exceptions import LockKeyInvalid
from django_mongolock.keys import KeyTemplate, lock_key
from django_mongolock.management.checks import check_views
from testproject.shop.models import Order
from tests.support.lock_fixtures import WITH_MONGO
from tests.support.looking import held_elsewhere

ID = uuid.UUID("0b9f7a4e-6f1c-4f5d-9a3e-0c1d2e3f4a5b")
HEX = "65f0c0ffee65f0c0ffee65f0"
FORMS = ["shop.Order", "shop.Ad", "shop.Seller", "int", "uuid", "slug"]


class TestForms:
    """F72: All spellings of a value are one key, and an invalid value is refused."""

    @pytest.mark.parametrize(
        ("form", "spellings", "key"),
        [
            ("shop.Order", [1, "1", "01", "+1", " 1", "\u0661", "1\n", "0_1"], "x:1"),
            ("int", [1, "1", "01", "+1", " 1", "\u0661"], "x:1"),
            ("uuid", [ID, str(ID), str(ID).upper(), f"{{{ID}}}", ID.hex, f"urn:uuid:{ID}"], f"x:{ID}"),
            ("shop.Ad", [ObjectId(HEX), HEX, HEX.upper()], f"x:{HEX}"),
            ("shop.Seller", ["a:b"], "x:a%3Ab"),
            ("slug", ["a-B_1"], "x:a-B_1"),
        ],
    )
    def test_one_key(self, form: str, spellings: list[Any], key: str) -> None:
        """F72: A row, a number or a UUID has one key, however it is written."""
        assert {str(lock_key(f"x:{{a:{form}}}", a=value)) for value in spellings} == {key}

    @pytest.mark.parametrize(
        ("form", "values"),
        [
            ("shop.Order", ["", "x", "1.5", "1 2", "9" * 5_000, float("inf"), float("nan"), [1], b"\xff"]),
            ("int", ["", "x", "1.5", 1.5, True, "9" * 5_000, ID]),
            ("uuid", ["", "x", 5, "0" * 33, str(ID) + "\n"]),
            ("slug", ["", "a b", "a:b", "a/b", "é", "a\n", "a" * 3_000]),
            ("shop.Ad", ["", "x", HEX[1:], b"0" * 11]),
        ],
    )
    def test_no_value(self, form: str, values: list[Any]) -> None:
        """An invalid value is refused in a short text that names the template."""
        for value in values:
            with pytest.raises(LockKeyInvalid, match="key template 'x:") as refusal:
                lock_key(f"x:{{a:{form}}}", a=value)
            assert len(str(refusal.value)) < 300

    @pytest.mark.long
    @given(st.text() | st.integers() | st.floats() | st.binary() | st.booleans() | st.none(), st.sampled_from(FORMS))
    @example("\ud800", "shop.Order")
    @example("\0", "uuid")
    def test_anything(self, value: Any, form: str) -> None:
        """F75: Every value of a request makes a key or LockKeyInvalid. A key that is made has its form."""
        try:
            key = str(lock_key(f"x:{{a:{form}}}", a=value))
        except LockKeyInvalid:
            return
        assert str(lock_key(f"x:{{a:{form}}}", a=key[2:])) == key or form == "shop.Seller"

    def test_a_row_has_the_key_of_its_instance(self) -> None:
        assert lock_key("shop.order:{a:shop.Order}", a="05") == "shop.order:5"
        work = mongo_locked("shop.order:{a:shop.Order}", wait=0)(print_nothing)
        with held_elsewhere(Order(pk=5)), pytest.raises(LockNotAcquired):
            work("05")

    def test_no_such_form(self) -> None:
        with pytest.raises(ValueError, match=r"key template 'x:\{a:shop.Odrer\}'.*Odrer"):
            KeyTemplate("x:{a:shop.Odrer}")
        with pytest.raises(ValueError, match="No installed app"):
            KeyTemplate("x:{a:nowhere.Order}")

    def test_composite_key(self) -> None:

        class Row(models.Model):  # noqa: DJ008 - never shown
            pk = models.CompositePrimaryKey("order", "number")
            order = models.IntegerField()
            number = models.IntegerField()

            class Meta:
                app_label = "tests_forms"

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("django_mongolock.keys.apps.get_model", lambda label: Row)
            with pytest.raises(ValueError, match="composite primary key: give each part a field of its own"):
                KeyTemplate("x:{a:shop.Row}")

    def test_a_format_is_still_a_format(self) -> None:
        assert lock_key("x:{a:_.2f}:{b:x>3}:{c:%Y.%m}", a=1234.5, b="i", c=date(2030, 1, 2)) == "x:1_234.50:xxi:2030.01"


def print_nothing(a: str) -> None: ...


class TestForgottenF:
    """A plain key with a field in it would be one lock for every value."""

    @pytest.mark.parametrize(
        "key", ["order:{order_id}", "{a}", "a:{order.pk}", "a:{rows[0]}:{b}", "a:{b!r}", "a:{b:>5}"]
    )
    def test_refused(self, key: str) -> None:
        """A bad plain key is refused everywhere, with an error that names the cure."""
        uses: list[Callable[[], object]] = [
            lambda: mongo_lock(key),
            lambda: mongo_lock("other", key),
            mongo_locked(key=lambda: key)(lambda: None),
        ]
        for use in uses:
            with pytest.raises(LockKeyInvalid, match=r"which nothing fills: make it with lock_key\("):
                use()

    @pytest.mark.parametrize("key", ["a:{}", "a:{0}", "{", "}", '{"a": 1}', "a:{ b }", "a{1:2}", "{}{}"])
    def test_other_braces(self, key: str) -> None:
        assert mongo_lock(key).key == key

    def test_braces_in_a_value(self) -> None:
        """F145: In a key made from a template, a value with braces is text. An f-string looks like a forgotten one, and
        its error names the alternative for any value."""
        visitor = "{order_id}"
        with pytest.raises(LockKeyInvalid, match=r"make it with lock_key.*braces in a value are data") as refused:
            mongo_lock(f"note:{visitor}")
        assert "f-string" not in str(refused.value)
        assert mongo_lock(lock_key("note:{text}", text=visitor)).key == "note:{order_id}"
        assert mongo_locked("note:{text}")(lambda text: "ran")(visitor) == "ran"
        assert mongo_lock(lock_key("x:{a}", a="{b}")).key == "x:{b}"
        assert mongo_lock(lock_key("x:{{a}}")).key == "x:{a}"
        assert mongo_locked("x:{{a}}")(lambda: "ran")() == "ran"  # a template with braces as text


class TestCost:
    """A key from a request costs as little as any other request."""

    @pytest.mark.parametrize(
        ("template", "values"),
        [
            ("x:{v:{w}}", {"v": "a", "w": 10**9}),
            ("x:{v:{w}}", {"v": "a", "w": "\u0661" + "\u0660" * 9}),
            ("x:{v:.{w}f}", {"v": 1.0, "w": 10**9}),
            ("x:{v:{w}}", {"v": 5, "w": "0999999999d"}),
            ("x:{v:f}", {"v": Decimal("1E+400000000")}),
            ("x:{v:f}", {"v": Decimal("1E-400000000")}),
            ("x:{v:{w}}", {"v": date(2030, 1, 1), "w": "%Y" * 10_000_000}),
            ("x:{v!r}", {"v": "\u0301" * 30_000_000}),
            ("x:{v!a}", {"v": b"\xff" * 30_000_000}),
        ],
    )
    def test_memory(self, template: str, values: dict[str, Any]) -> None:
        tracemalloc.start()
        try:
            started = time.thread_time()
            with pytest.raises(LockKeyInvalid):
                lock_key(template, **values)
            assert time.thread_time() - started < 1
            assert tracemalloc.get_traced_memory()[1] < 1_000_000
        finally:
            tracemalloc.stop()


# Views. Every kind of view, under "respond".


def locked(template: Any = "seen:{name}", **options: Any) -> Any:
    """The decorator of all of them."""
    return mongo_locked(template, **{"wait": 0, "on_contention": "respond", **options})


def view(request: HttpRequest, name: str) -> HttpResponse:
    return HttpResponse("ran")


async def aview(request: HttpRequest, name: str) -> HttpResponse:
    return HttpResponse("ran")


def get(self: Any, request: HttpRequest, name: str) -> HttpResponse:
    return HttpResponse("ran")


class Plain(View):
    get = get


def plain() -> Any:
    """Return a new class that may be decorated."""
    return type("Plain", (Plain,), {})


class OnMethod(View):
    get = locked()(get)


class Rest(ViewSet):  # type: ignore[misc]  # it has no types
    get = locked()(get)


function, of_model = locked()(view), locked("seen:{name:shop.Order}")(view)
VIEWS: dict[str, Callable[..., Any]] = {
    "function": function,
    "afunction": locked()(aview),
    "class": locked()(plain()).as_view(),
    "method": OnMethod.as_view(),
    "decorated": method_decorator(locked(), name="dispatch")(plain()).as_view(),
    "viewset": Rest.as_view({"get": "get"}),
    "rest": api_view(["GET"])(locked()(view)),
    "personal": locked("seen:{request.user.pk}:{name}")(view),
    "searching": locked("seen:{request.GET[q]}:{name}")(view),
    "by_function": mongo_locked(key=lambda request, name: f"seen:{name}", on_contention="respond")(view),
    "model": of_model,
}
urlpatterns = [re_path(rf"(?s)^{kind}/(?P<name>.+)\Z", view) for kind, view in VIEWS.items()]
NO_KEYS = ["x" * 600, "%00", "a%0Ab", "a%E2%80%A8b", "%C2%85", "%1B%5B2J"]


@WITH_MONGO
@pytest.mark.django_db
@pytest.mark.urls(__name__)
class TestViews:
    """F75: An address whose values make no key is the client's mistake."""

    @pytest.mark.parametrize("kind", VIEWS)
    def test_400(self, kind: str) -> None:
        """F75: A text that is too long, or has NUL, newlines or control characters, gets 400. The response shows no
        stack trace and no key."""
        client = Client(raise_request_exception=False)
        for name in NO_KEYS:
            response = client.get(f"/{kind}/{name}")
            assert response.status_code == 400, (name, response.content)
            assert "Retry-After" not in response
            assert b"seen" not in response.content

    def test_json(self) -> None:
        response = Client().get(f"/function/{NO_KEYS[0]}", headers={"Accept": "application/json"})
        assert json.loads(response.content)["code"] == "invalid"
        assert response["Cache-Control"] == "no-store"

    def test_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        """A template that fits no request at all is found in the log."""
        Client().get("/personal/a")
        assert "a request makes no lock key" in caplog.text
        assert "'request.user.pk' is None" in caplog.text

    def test_the_own_error_of_a_view(self) -> None:
        """An error of the view itself stays an error 500, because it is a mistake in the code."""

        @mongo_locked("own:{name}", on_contention="respond")
        def wrong(request: HttpRequest, name: str) -> HttpResponse:
            mongo_lock("a\0b")
            return HttpResponse()

        with pytest.raises(LockKeyInvalid):
            wrong(HttpRequest(), "a")

    def test_other_policies(self) -> None:
        """Without a response to give, LockKeyInvalid is raised, and no work is skipped."""
        for policy in ("raise", "skip", lambda *args, **kwargs: "busy"):
            with pytest.raises(LockKeyInvalid):
                mongo_locked("x:{a}", on_contention=policy)(print_nothing)("\0")
        with pytest.raises(LockKeyInvalid):
            once_per("x:{a}", hours=1)(print_nothing)("\0")


# The check


def warnings(*patterns: Any) -> list[CheckMessage]:
    """Return the messages of the check about these addresses."""
    with pytest.MonkeyPatch.context() as patch:
        resolver = type("Resolver", (), {"url_patterns": list(patterns)})
        patch.setattr("django_mongolock.management.checks.get_resolver", resolver)
        return check_views(app_configs=None)


WITH_TEXT = {"function", "afunction", "class", "method", "decorated", "viewset"}


class TestCheck:
    """W010: A view has a key with text from the address."""

    @pytest.mark.parametrize(
        "address",
        [
            *(path("a/<str:name>/", VIEWS[kind]) for kind in VIEWS if kind in WITH_TEXT),
            path("a/<name>/", function),
            path("a/<path:name>/", function),
            re_path(r"^a/(?P<name>\d+)/$", function),
            path("a/<str:name>/", include([path("", function), path("b/", of_model)])),
        ],
    )
    def test_every_kind_of_view(self, address: Any) -> None:
        """The check finds functions, classes, methods and decorated ones, below other addresses, too. The text may have
        a converter or none, or come from a regular expression, because its digits have many spellings as well."""
        [found] = warnings(address)
        assert found.id == "mongolock.W010"
        assert all(part in str(found) for part in ("'seen:{name}'", "name>", "{name:app.Model}", "{name!s}"))

    @pytest.mark.parametrize(
        "address",
        [
            *(path(f"<{kind}:name>", function) for kind in ("int", "uuid", "slug")),
            path("<str:name>", of_model),
            path("<str:other>", function),
            path("<str:name>", mongo_locked("a:{name!s}")(lambda request, name: HttpResponse())),
            path("", lambda request: HttpResponse()),
        ],
    )
    def test_nothing_to_say(self, address: Any) -> None:
        """Values that a converter or a form brings into one spelling cause no message. Slugs and texts declared as
        exact cause none, either."""
        assert warnings(address) == []

    def test_this_project(self, settings: Settings) -> None:
        """The demo causes no message. A project without addresses, or with broken ones, is left to Django's checks."""
        assert check_views(app_configs=None) == []
        settings.ROOT_URLCONF = "nowhere.urls"
        assert check_views(app_configs=None) == []
        del settings.ROOT_URLCONF
        assert check_views(app_configs=None) == []
