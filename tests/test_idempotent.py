"""`idempotent`: what is sent again is not done again, by views of every kind and tasks, in MongoDB and in memory."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from celery import Celery
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.management import call_command
from django.db import IntegrityError, connections, transaction
from django.http import FileResponse, Http404, HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.test import Client, RequestFactory
from django.test.client import BOUNDARY, MULTIPART_CONTENT, encode_multipart
from django.urls import path
from django.utils.decorators import method_decorator
from django.utils.functional import SimpleLazyObject
from django.views import View
from ninja import NinjaAPI
from ninja.security import HttpBearer
from pytest_django import Settings
from rest_framework.authentication import BaseAuthentication
from rest_framework.decorators import api_view, authentication_classes
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from django_mongolock import SKIPPED, LockLost, lock_info, mongo_lock
from django_mongolock.backends import get_backend, mongo_store
from django_mongolock.decorator import views
from django_mongolock.decorator.calls import LockedFunction
from django_mongolock.exceptions import LockBackendFailed, LockMisused, LockNotAcquired
from django_mongolock.idempotency import idempotent
from django_mongolock.idempotency.calls import MARGIN, Results, results_beside
from django_mongolock.keys import LockKey
from django_mongolock.testing import override_locks
from django_mongolock.testing.memory_server import MemoryResults, MemoryStore
from tests.support.looking import held_elsewhere, new_key
from tests.support.row_files import Rows, atomic_rows, write_row
from tests.support.waiting import eventually

pytestmark = pytest.mark.urls(__name__)

#: How often each thing was done, by the text of the request or the name of the task.
done: dict[str, int] = {}


def do(name: str) -> int:
    done[name] = done.get(name, 0) + 1
    return done[name]


@pytest.fixture(params=["mongo", "memory"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "mongo":
        yield "mongo"
    else:
        with override_locks():
            yield "memory"


def sent(key: str | None, body: Any = "a", path: str = "/charge/", **options: Any) -> HttpRequest:
    """A request with *key*. options: its method, content_type and headers, and attributes for it."""
    headers = {"Accept": "application/json"} | ({} if key is None else {"Idempotency-Key": key})
    headers |= options.pop("headers", {})
    method, content_type = options.pop("method", "POST"), options.pop("content_type", "text/plain")
    request = RequestFactory().generic(method, path, body, content_type, headers=headers)
    vars(request).update(options)
    return request


def answer(view: Any, request: HttpRequest) -> Any:
    """The response of *view*; a coroutine is run."""
    made = view(request)
    return asyncio.run(made) if asyncio.iscoroutine(made) else made


def post(view: Any, key: str | None, body: Any = "a", path: str = "/charge/", **options: Any) -> Any:
    return answer(view, sent(key, body, path, **options))


def me(request: HttpRequest) -> str:
    return "me"


def charge(request: HttpRequest) -> HttpResponse:
    made = JsonResponse({"times": do(request.body.decode())}, status=201)
    made.headers["Location"] = "/charges/1/"
    made.headers["X-Dollar"] = "$purge_at"
    made.set_cookie("secret", "of the first")
    made.headers["Set-Cookie"] = "another=of the first"
    made.headers["Date"] = "Mon, 23 Nov 2026 12:00:00 GMT"
    return made


def as_async(view: Callable[[HttpRequest], HttpResponse]) -> Any:
    @functools.wraps(view)
    async def aview(request: HttpRequest) -> HttpResponse:
        await asyncio.sleep(0)
        return view(request)

    return aview


def as_it_is(view: Callable[[HttpRequest], HttpResponse]) -> Any:
    return view


@pytest.fixture(params=[as_it_is, as_async], ids=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> Any:
    """Makes of a view one of this kind."""
    return request.param


@pytest.fixture
def view(kind: Any, backend: str) -> Any:
    return idempotent(client=me)(kind(charge))


def code(response: Any) -> str:
    return str(json.loads(response.content)["code"])


def times(response: Any) -> int:
    return int(json.loads(response.content)["times"])


class TestViews:
    """The draft of the IETF: draft-ietf-httpapi-idempotency-key-header-07."""

    def test_the_first_response_is_kept(self, view: Any, key: str) -> None:
        """It is done once; status, headers and body come again, with a mark. Cookies and the date do not."""
        first, again = post(view, key, key), post(view, key, key)
        assert (first.status_code, first.content, done[key]) == (201, b'{"times": 1}', 1)
        assert (again.status_code, again.content) == (201, first.content)
        headers = {"Location": "/charges/1/", "Content-Type": "application/json", "X-Dollar": "$purge_at"}
        assert headers.items() <= again.headers.items()
        assert ("Idempotent-Replayed" in first, again["Idempotent-Replayed"]) == (False, "true")
        assert first.cookies
        assert not again.cookies
        assert not {"Set-Cookie", "Date"} & again.headers.keys()

    @pytest.mark.parametrize("change", [{"body": "b"}, {"method": "PUT"}, {"path": "/refund/"}, {"path": "/charge/?x"}])
    def test_another_request_with_the_same_key(self, view: Any, key: str, change: dict[str, Any]) -> None:
        post(view, key, key)
        before = dict(done)
        refused = post(view, key, **{"body": key, **change})
        assert (refused.status_code, code(refused), done) == (422, "key_reused", before)

    def test_the_page_of_an_async_view(self, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is rendered outside of the event loop, as the project's own may load the user."""

        def render(*arguments: Any) -> str:
            with pytest.raises(RuntimeError):
                asyncio.get_running_loop()
            return "refused"

        monkeypatch.setattr(views, "render_to_string", render)
        view = idempotent(client=me)(as_async(charge))
        answers = [post(view, key, body, headers={"Accept": "text/html"}) for body in (key, "other")]
        assert [each.content for each in answers] == [b'{"times": 1}', b"refused"]

    def test_no_key(self, view: Any, key: str) -> None:
        refused = post(view, None, key)
        assert (refused.status_code, code(refused), key in done) == (400, "missing_key", False)
        assert "Idempotency-Key" in json.loads(refused.content)["detail"]
        assert json.loads(refused.content)["retry_after"] is None  # it never works

    @pytest.mark.parametrize(
        "wrong",
        ["", '"', '""', '"a', 'a"', '"a";b=1', "a,b", '"a","b"', "ä", "a b", '"\\x"', "a" * 256, f'"{"a" * 256}"'],
    )
    def test_an_unreadable_key(self, wrong: str) -> None:
        """400. Two headers arrive as one with a comma."""
        refused = post(idempotent(client=me)(charge), wrong, "unreadable")
        assert (refused.status_code, code(refused), "unreadable" in done) == (400, "invalid_key", False)

    @pytest.mark.parametrize(
        ("one", "other"),
        [("{}", '"{}"'), ("\\{}", '"\\\\{}"'), ("{}:/$[0]", '"{}:/$[0]"')],
        ids=["plain", "escaped", "signs"],
    )
    def test_forms_of_a_key(self, key: str, one: str, other: str) -> None:
        """A String of the draft, in quotes, is the same key as what most clients send."""
        view = idempotent(client=me)(charge)
        assert [post(view, form.format(key), key).status_code for form in (one, other)] == [201, 201]
        assert done[key] == 1

    def test_not_required(self, kind: Any, key: str) -> None:
        """Without a key, a request runs each time; with one, once; an unreadable one is refused all the same."""
        view = idempotent(client=me, required=False)(kind(charge))
        assert [times(post(view, sent, key)) for sent in (None, None, key, key)] == [1, 2, 3, 3]
        assert post(view, "a,b", key).status_code == 400

    @pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "TRACE"])
    def test_safe_methods(self, view: Any, key: str, method: str) -> None:
        """They run each time, with a key or without."""
        for sent in (None, key, key):
            assert post(view, sent, key, method=method).status_code == 201
        assert done[key] == 3

    def test_header(self, key: str) -> None:
        view = idempotent(client=me, header="X-Request-Id")(charge)
        for _ in "12":
            assert post(view, None, key, headers={"X-Request-Id": key}).content == b'{"times": 1}'
        assert "X-Request-Id" in str(post(view, key, key).content)

    def test_keep(self, key: str) -> None:
        """After its time a response is forgotten, by the clock of the server."""
        view = idempotent(client=me, keep=timedelta(hours=1))(charge)
        with override_locks() as locks:
            post(view, key, key)
            locks.advance(3_500)
            assert post(view, key, "other").status_code == 422
            locks.advance(200)
            assert post(view, key, key).content == b'{"times": 2}'

    def test_what_is_stored(self, key: str) -> None:
        """Neither the key of the client nor who it is can be read in MongoDB; what is kept goes by itself."""
        name = uuid.uuid4().hex
        before = {document["_id"] for document in results_beside(mongo_store().collection).find()}
        post(idempotent()(charge), key, key, user=user(name))
        (stored,) = [each for each in results_beside(mongo_store().collection).find() if each["_id"] not in before]
        assert key not in stored["_id"]
        assert name not in str({**stored, "result": None})
        assert stored["_id"].startswith("idempotent:")
        assert stored["purge_at"]
        assert stored["result"]["body"] == b'{"times": 1}'

    def test_commands(self, key: str, commands: Any) -> None:
        """A first request sends four commands, a later one three."""
        view = idempotent(client=me)(charge)
        with mongo_lock(new_key()):
            pass
        commands.sent.clear()
        post(view, key, key)
        assert commands.names() == ["findAndModify", "findAndModify", "findAndModify", "update"]
        commands.sent.clear()
        post(view, key, key)
        assert len(commands.names()) == 3

    def test_prefix(self, settings: Settings, key: str) -> None:
        """Two projects in one database do not see each other's results. Each sees its own, also while one reads it."""
        view = idempotent(client=me)(charge)
        post(view, key, key)
        settings.MONGOLOCK = {**settings.MONGOLOCK, "KEY_PREFIX": "other:"}
        assert times(post(view, key, key)) == 2
        with held_elsewhere(lock_key_of(view, sent(key, key))):
            assert times(post(view, key, key)) == 2


class TestBodies:
    @staticmethod
    def upload(key: str, content: bytes = b"x", name: str = "a.txt", boundary: str = BOUNDARY) -> HttpRequest:
        body = encode_multipart(boundary, {"n": "1", "file": SimpleUploadedFile(name, content)})
        return sent(key, body, content_type=MULTIPART_CONTENT.replace(BOUNDARY, boundary))

    @staticmethod
    def read(request: HttpRequest) -> HttpResponse:
        file: Any = request.FILES["file"]
        return HttpResponse(file.read() + request.POST["n"].encode())

    def test_files(self, key: str) -> None:
        """A form with files is compared by what is in it: a client makes new separators for each request."""
        view = idempotent(client=me)(self.read)
        first, again = view(self.upload(key)), view(self.upload(key, boundary="other"))
        assert (first.content, again.content, again["Idempotent-Replayed"]) == (b"x1", b"x1", "true")
        for other in (self.upload(key, b"y"), self.upload(key, name="b.txt"), self.upload(key, b"x" * 5_000_000)):
            assert view(other).status_code == 422

    def test_a_form_that_is_put(self, key: str) -> None:
        """F129: Django does not read a form that is not sent by POST; it is compared by what is in it all the same."""
        view: Any = idempotent(client=me)(lambda request: HttpResponse(request.body[:2]))

        def send(boundary: str, body: bytes = b"", content: bytes = b"x") -> Any:
            request = self.upload(key, content, boundary=boundary)
            kind = request.META["CONTENT_TYPE"]
            return post(view, key, body or request.body, method="PUT", content_type=kind)

        assert [send(boundary).content for boundary in ("one", "two")] == [b"--", b"--"]
        assert [send("one", content=b"y").status_code, send("one", b"broken").status_code] == [422, 422]

    def test_read_before(self, key: str) -> None:
        """A body that something has read as a stream cannot be compared: the error says who has to do what."""

        def view(request: HttpRequest) -> HttpResponse:
            request.read(1)
            return idempotent(client=me)(charge)(request)

        with pytest.raises(LockMisused, match=r"read request\.body first"):
            post(view, key)


class TestResults:
    @pytest.mark.parametrize(
        ("status", "headers", "kept"),
        [(200, {}, True), (302, {}, True), (409, {}, True), (410, {}, True)]
        + [(status, {}, False) for status in (408, 423, 425, 429, 500, 503)]
        + [(409, {"Retry-After": "1"}, False)],
    )
    def test_kept(self, key: str, status: int, headers: dict[str, str], kept: bool) -> None:
        """Also a refusal: it was the answer. One that means "try again" is not kept: the next request runs."""

        def view(request: HttpRequest) -> HttpResponse:
            return HttpResponse(status=status, headers=headers) if do(key) == 1 else HttpResponse(status=201)

        made = idempotent(client=me)(view)
        later = status if kept else 201
        assert [post(made, key).status_code for _ in "123"] == [status, later, later]
        assert done[key] == (1 if kept else 2)

    def test_an_exception(self, backend: str, key: str, kind: Any) -> None:
        """It is not kept, and binds the key to nothing."""

        def fail(request: HttpRequest) -> HttpResponse:
            if do(key) == 1:
                raise ZeroDivisionError
            return HttpResponse("ok")

        view = idempotent(client=me)(kind(fail))
        with pytest.raises(ZeroDivisionError):
            post(view, key)
        assert [post(view, key, "other").content for _ in "12"] == [b"ok", b"ok"]
        assert done[key] == 2

    @pytest.mark.parametrize(
        "make", [lambda: StreamingHttpResponse(["a"]), lambda: FileResponse([b"a"])], ids=["stream", "file"]
    )
    def test_streaming(self, key: str, make: Callable[[], Any]) -> None:
        """It has no end that could be kept: the error names the cure."""
        view = idempotent(client=me)(lambda request: make())
        with pytest.raises(LockMisused, match="return an HttpResponse, or take @idempotent off"):
            post(view, key)

    def test_too_large(self, backend: str, key: str, caplog: pytest.LogCaptureFixture) -> None:
        """It is not done again: a later request learns that it was done. The log says so, too."""
        view = idempotent(client=me)(lambda request: HttpResponse("x" * 1_000_000, headers={"n": do(key)}))
        assert len(post(view, key).content) == 1_000_000
        gone = [post(view, key) for _ in "12"]
        assert [(each.status_code, code(each), "Retry-After" in each) for each in gone] == [
            (410, "not_kept", False)
        ] * 2
        assert done[key] == 1
        assert "too large" in caplog.text
        plain = post(view, key, headers={"Accept": "text/plain"})
        assert (plain.status_code, plain.headers["Content-Type"]) == (410, "text/plain; charset=utf-8")

    def test_bytes(self, backend: str, key: str) -> None:
        """A body is kept as it is; a response without a type has none later."""

        def view(request: HttpRequest) -> HttpResponse:
            made = HttpResponse(b"$now\xff\x00")
            del made["Content-Type"]
            return made

        made = idempotent(client=me)(view)
        assert [(post(made, key).content, "Content-Type" in post(made, key)) for _ in "12"] == [
            (b"$now\xff\x00", False)
        ] * 2

    def test_template_response(self, backend: str, kind: Any, key: str) -> None:
        """It is rendered outside of the event loop, as by Django."""
        template: Any = engines["django"].from_string("{{ n }} times")

        def count() -> int:
            with pytest.raises(RuntimeError):
                asyncio.get_running_loop()
            return do(key)

        view = idempotent(client=me)(kind(lambda request: TemplateResponse(request, template, {"n": count})))
        assert [post(view, key).content for _ in "12"] == [b"1 times", b"1 times"]

    def test_no_answer_when_it_is_to_be_kept(self, key: str, caplog: pytest.LogCaptureFixture) -> None:
        """It is done: the client gets its response, and the log says that it may be done again."""
        with override_locks() as locks:
            away = locks.unavailable()
            view = idempotent(client=me)(lambda request: (away.__enter__(), HttpResponse("done"))[1])
            assert post(view, key).content == b"done"
            away.__exit__(None, None, None)
        assert "a result is not kept" in caplog.text

    def test_no_answer_whether_it_was_done(
        self, view: Any, key: str, backend: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """503, as without an answer to the lock: it has not begun. A task comes back."""

        def fail(*args: object) -> None:
            raise LockBackendFailed("an election", key)

        monkeypatch.setattr(Results if backend == "mongo" else MemoryResults, "begin", fail)
        assert (post(view, key, key).status_code, key in done) == (503, False)
        task: Any = idempotent(key="a:{name}")(do)
        with pytest.raises(LockBackendFailed, match="an election"):
            task(key)

    def test_inside_of_itself(self, key: str, backend: str) -> None:
        """One idempotent view calls another with the same request: the error names the cure."""
        inner: Any = idempotent(client=me)(charge)

        def call_another(request: HttpRequest) -> Any:
            return inner(request)

        with pytest.raises(LockMisused, match="decorate one of them"):
            post(idempotent(client=me)(call_another), key, key)


class TestParallel:
    def test_threads(self, view: Any, key: str) -> None:
        """Another one gets 409 with Retry-After at once, and once the first has ended, its response."""
        go_on = threading.Event()

        def slow(request: HttpRequest) -> HttpResponse:
            assert go_on.wait(20)
            return charge(request)

        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(post, idempotent(client=me)(slow), key, key)
            assert eventually(lambda: lock_info(str(lock_key_of(view, sent(key, key)))).state == "held")
            refused = post(view, key, key)
            go_on.set()
        assert (refused.status_code, code(refused)) == (409, "in_progress")
        assert int(refused["Retry-After"]) >= 1
        assert [first.result().content, post(view, key, key).content] == [b'{"times": 1}'] * 2
        assert done[key] == 1

    def test_many_who_come_later(self, view: Any, key: str) -> None:
        """A request that comes while another one gets the response gets it as well."""
        post(view, key, key)
        with held_elsewhere(lock_key_of(view, sent(key, key))):
            assert [post(view, key, body).status_code for body in (key, "other")] == [201, 422]


def lock_key_of(view: Any, request: HttpRequest) -> LockKey:
    """The key under which the view serves this request."""
    (function,) = [cell.cell_contents for cell in view.__closure__ if isinstance(cell.cell_contents, LockedFunction)]
    call: Any = function._call((request,), {})
    call.prepare()
    key: LockKey = call.key
    return key


class TestFencing:
    """P9: a run that lost its lock stores nothing."""

    def test_lost(self, key: str) -> None:
        """It learns of the loss before it ends: LockLost, and the next request runs."""
        with override_locks() as locks:

            def view(request: HttpRequest) -> HttpResponse:
                if do(key) == 1:
                    (held,) = locks.held()
                    locks.lose(held)
                return HttpResponse(str(done[key]))

            made = idempotent(client=me)(view)
            with pytest.raises(LockLost):
                post(made, key)
            assert [post(made, key).content for _ in "12"] == [b"2", b"2"]

    def test_overtaken(self, key: str, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """It does not learn of it: another has run, and the server refuses the write of the first."""
        monkeypatch.setattr("django_mongolock.engine.lock.state.LockState.ensure_held", lambda self: None)

        def run(request: HttpRequest) -> HttpResponse:
            if (number := do(key)) == 1:
                stored = mongo_store().collection
                (held,) = stored.find({"holders.label": {"$regex": "overtaken"}})
                stored.delete_one({"_id": held["_id"]})  # as force release and a clean-up leave it
                with ThreadPoolExecutor(1) as pool:
                    assert pool.submit(post, view, key).result(20).content == b"2"
            return HttpResponse(str(number))

        view = idempotent(client=me)(kind(run))
        with pytest.raises(LockLost, match="another run has begun"):
            post(view, key)
        assert post(view, key).content == b"2"

    def test_a_late_beginner(self, key: str) -> None:
        """Its lock was lost before its first command arrived, and another runs: it does not run."""
        view = idempotent(client=me)(charge)
        results = Results(results_beside(mongo_store().collection))
        results.begin(str(lock_key_of(view, sent(key, key))), 2**62, 60)
        with pytest.raises(LockLost, match="another run has begun"):
            post(view, key, key)
        assert key not in done

    @pytest.fixture
    def results(self, backend: str) -> Any:
        store = get_backend().session().store
        return store.results if isinstance(store, MemoryStore) else Results(results_beside(mongo_store().collection))

    def test_rules(self, results: Any, key: str) -> None:
        """Both stores: an older token neither takes the mark nor stores; what is kept stays until its time is over."""
        assert results.find(key) is None
        assert results.begin(key, 5, 60)["token"] == 5
        assert results.find(key) is None
        assert results.begin(key, 4, 60)["token"] == 5
        assert results.keep(key, 4, {"n": 4}, 60) is False
        assert results.keep(key, 5, {"n": "$token"}, 60) is True
        assert results.begin(key, 6, 60)["result"] == results.find(key)["result"] == {"n": "$token"}
        assert results.keep(key, 5, {"n": 5}, 0.001) is True
        assert eventually(lambda: results.find(key) is None)
        again = results.begin(key, 7, 60)
        assert ("result" in again, again["token"]) == (False, 7)
        assert results.keep(key, 5, {"n": 5}, 60) is False

    def test_a_mark(self, key: str) -> None:
        """F130: what a run leaves without a result lives for as long as its lease and a margin, and
        `clear_stale_locks` removes it then. A run that takes longer keeps its result all the same."""
        results, stored = Results(results_beside(mongo_store().collection)), results_beside(mongo_store().collection)

        def fail(request: HttpRequest) -> HttpResponse:
            raise Http404

        with pytest.raises(Http404):
            post(idempotent(client=me, lease=60)(fail), key)
        marks = stored.find({"_id": {"$regex": "^idempotent:"}, "result": {"$exists": False}})
        mark = max(marks, key=lambda each: each["purge_at"])
        assert 60 < (mark["purge_at"] - datetime.now(UTC)).total_seconds() < 60 + 2 * MARGIN
        begun = results.begin(key, 5, -2 * MARGIN)
        assert begun["token"] == 5
        call_command("clear_stale_locks", interactive=False, stdout=StringIO())
        assert stored.find_one({"_id": key}) is None
        assert stored.find_one({"_id": mark["_id"]}) == mark
        assert results.keep(key, 5, {"n": 5}, 60) is True
        assert results.begin(key, 6, 60)["result"] == {"n": 5}


def session(key: str | None, *, exists: bool = True) -> Any:
    return SimpleNamespace(session_key=key, exists=lambda key: exists)


def user(pk: Any, is_authenticated: bool = True) -> Any:
    return SimpleNamespace(is_authenticated=is_authenticated, pk=pk)


class TestClients:
    def test_hosts(self, view: Any, key: str, settings: Settings) -> None:
        """The response of one host is not that of another: tenants may have users of the same name."""
        settings.ALLOWED_HOSTS = ["a.example", "b.example"]

        answers = [post(view, key, key, headers={"Host": f"{name}.example"}) for name in "aba"]
        assert [each.status_code for each in answers] == [201, 422, 201]
        assert done[key] == 1

    @pytest.mark.parametrize(
        "clients",
        [
            [{"session": session("a")}, {"session": session("b")}],
            [{"session": session("1"), "user": user(None, False)}, {"session": session("1"), "user": user("1")}],
            [{"auth": "token"}, {"auth": SimpleNamespace(pk=1)}, {"auth": SimpleNamespace(pk=2)}],
        ],
        ids=["sessions of visitors", "a user is no session", "what a framework has found out"],
    )
    def test_each_has_its_own(self, key: str, clients: list[dict[str, Any]]) -> None:
        view, numbers = idempotent()(charge), list(range(1, len(clients) + 1))
        for _ in "12":
            assert [times(post(view, key, key, **each)) for each in clients] == numbers

    def test_a_user_that_is_loaded_late(self, key: str, kind: Any) -> None:
        """F125: `request.user` counts, sync and async alike, and is loaded outside of the event loop."""

        def load() -> Any:
            with pytest.raises(RuntimeError):
                asyncio.get_running_loop()
            return user(7)

        async def anonymous() -> Any:
            return user(None, is_authenticated=False)

        view = idempotent()(kind(charge))
        facts: tuple[dict[str, Any], ...] = ({}, {"auser": anonymous})
        for more in facts:
            assert post(view, key, key, user=SimpleLazyObject(load), **more).content == b'{"times": 1}'

    @pytest.mark.parametrize(
        "facts",
        [
            {},
            {"session": session(None)},
            {"session": session("made up", exists=False)},
            {"auth": {"sub": "1"}, "session": session("a")},
        ],
        ids=["nothing", "a new session", "a made-up session", "an unknown kind of authentication"],
    )
    def test_unknown(self, key: str, kind: Any, facts: Any, caplog: pytest.LogCaptureFixture) -> None:
        """403, and the log names the cure. A session that this response would begin is not that of a second try; F130:
        nor does one count that only a cookie says."""
        refused = post(idempotent()(kind(charge)), key, key, **facts)
        assert (refused.status_code, code(refused), key in done) == (403, "anonymous", False)
        assert "client=" in caplog.text

    @pytest.mark.parametrize("name", [None, "", 5])
    def test_a_client_without_a_name(self, key: str, name: Any) -> None:
        with pytest.raises(LockMisused, match="must return a name"):
            post(idempotent(client=lambda request: name)(charge), key)

    @pytest.mark.django_db
    @pytest.mark.parametrize("path", ["/function/", "/async/", "/class/", "/method/"])
    def test_django(self, path: str, key: str, django_user_model: Any) -> None:
        """With Django's middleware, for every kind of view."""
        for number, name in enumerate("ab", 1):
            client = Client(headers={"Idempotency-Key": key})
            client.force_login(django_user_model.objects.create(username=name))
            for _ in range(2):
                answer = client.post(path, key, content_type="text/plain")
                assert answer.json() == {"times": number}, answer
        stranger = Client(headers={"Idempotency-Key": key})
        for _ in range(2):
            assert stranger.post(path, key, content_type="text/plain").status_code == 403
            stranger.cookies["sessionid"] = "a" * 32


@idempotent(client=me)
def write(request: HttpRequest) -> HttpResponse:
    """Writes a row, in the transaction of the request."""
    write_row("file", request.body.decode())
    if "fail" in request.GET:
        raise ZeroDivisionError
    if "hook" in request.GET:
        transaction.on_commit(fail_after_commit, using="file")
    return HttpResponse("written")


def fail_after_commit() -> None:
    raise ConnectionError


def write_inside(name: str) -> None:
    """Writes a row, in a transaction of its own; afterwards, the broker is down."""
    with transaction.atomic("file"):
        write_row("file", name)
        transaction.on_commit(fail_after_commit, using="file")


rows = pytest.fixture(atomic_rows)


class TestTransactions:
    """A response is kept after the commit."""

    def test_atomic_requests(self, rows: Rows, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Others see what was written when it is kept; an error rolls back, and the next request runs."""
        seen: list[list[str]] = []
        keep = Results.keep

        def look(*args: Any) -> bool:
            seen.append(rows())
            return keep(*args)

        monkeypatch.setattr(Results, "keep", look)
        client = Client(headers={"Idempotency-Key": key})
        with pytest.raises(ZeroDivisionError):
            client.post("/write/?fail", key, content_type="text/plain")
        assert (rows(), seen) == ([], [])
        for _ in range(2):
            assert client.post("/write/", key, content_type="text/plain").content == b"written"
        assert (rows(), seen) == ([key], [[key]])

    def test_mongodb_is_named_first(self, rows: Rows, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of two databases with ATOMIC_REQUESTS, that which has a transaction counts: its commit fails, and the next
        request runs."""
        monkeypatch.setitem(connections.settings["mongo"], "ATOMIC_REQUESTS", True)
        file: Any = connections["file"]
        commits: Iterator[Any] = iter([IntegrityError])
        commit = file._commit

        def fail_once() -> None:
            for error in commits:
                raise error
            commit()

        monkeypatch.setattr(file, "_commit", fail_once)
        client = Client(headers={"Idempotency-Key": key})
        with pytest.raises(IntegrityError):
            client.post("/write/", key, content_type="text/plain")
        assert rows() == []
        again = client.post("/write/", key, content_type="text/plain")
        assert ("Idempotent-Replayed" in again, rows()) == (False, [key])

    def test_an_error_after_the_commit(self, rows: Rows, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """F123: the response is kept before any function of `on_commit` is called; it is not done again."""
        seen: list[bool] = []

        def look() -> None:
            kept = results_beside(mongo_store().collection).find_one({"result.body": b"written"})
            seen.append(kept is not None)
            raise ConnectionError

        monkeypatch.setattr(f"{__name__}.fail_after_commit", look)
        results_beside(mongo_store().collection).delete_many({})
        client = Client(headers={"Idempotency-Key": key})
        with pytest.raises(ConnectionError):
            client.post("/write/?hook", key, content_type="text/plain")
        again = client.post("/write/?hook", key, content_type="text/plain")
        assert (again.content, again["Idempotent-Replayed"]) == (b"written", "true")
        assert (rows(), seen) == ([key], [True])

    def test_an_error_after_a_commit_inside(self, rows: Rows, key: str) -> None:
        """F123: where the function itself commits, there is no result yet: the fact is kept."""

        def view(request: HttpRequest) -> HttpResponse:
            write_inside(f"{key} view")
            return HttpResponse("written")

        async def aview(request: HttpRequest) -> HttpResponse:
            await sync_to_async(write_inside)(f"{key} async")
            return HttpResponse("written")

        for each in (view, aview):
            locked, sent_key = idempotent(client=me)(each), new_key()
            with pytest.raises(ConnectionError):
                post(locked, sent_key)
            assert [post(locked, sent_key).status_code for _ in "12"] == [410, 410]
        task: Any = idempotent(key="a:{name}")(write_inside)
        with pytest.raises(ConnectionError):
            task(key)
        assert [task(key), task(key)] == [SKIPPED, SKIPPED]
        assert sorted(rows()) == [key, f"{key} async", f"{key} view"]

    def test_inside(self, rows: Rows, key: str) -> None:
        """Inside of a transaction it would be kept before the commit: refused before anything is done."""
        with transaction.atomic("file"), pytest.raises(LockMisused, match="open the transaction inside of it"):
            post(idempotent(client=me)(charge), key, key)
        assert key not in done


class Tokens(BaseAuthentication):  # type: ignore[misc]
    def authenticate(self, request: Request) -> Any:
        name = request.headers.get("Authorization")
        return (user(name), None) if name else None


@api_view(["POST"])  # type: ignore[untyped-decorator]
@authentication_classes([Tokens])  # type: ignore[untyped-decorator]
@idempotent()
def by_function(request: Request) -> Response:
    return Response({"times": do(request.data["name"])}, status=201, headers={"Location": "/1/"})


class ByMethod(APIView):  # type: ignore[misc]
    authentication_classes = (Tokens,)

    @idempotent()
    def post(self, request: Request) -> Response:
        if request.data.get("wrong"):
            raise ValidationError("wrong")
        return Response({"times": do(request.data["name"])}, status=201, headers={"Location": "/1/"})


class Bearer(HttpBearer):
    def authenticate(self, request: HttpRequest, token: str) -> str:
        return token


api = NinjaAPI(urls_namespace="idempotent", auth=Bearer())


@api.post("/sync/")
@idempotent()
def operation(request: HttpRequest, response: HttpResponse) -> HttpResponse:
    made = api.create_response(request, {"times": do(json.loads(request.body)["name"])}, status=201)
    made.headers["Location"] = "/1/"
    return made


@api.post("/value/")
@idempotent()
def value(request: HttpRequest) -> dict[str, int]:
    return {"a": 1}


@idempotent()
class OnClass(View):
    def post(self, request: HttpRequest) -> HttpResponse:
        return charge(request)


@method_decorator(idempotent(), name="post")
class OnMethod(View):
    def post(self, request: HttpRequest) -> HttpResponse:
        return charge(request)


urlpatterns = [
    path("function/", idempotent()(charge)),
    path("async/", idempotent()(as_async(charge))),
    path("class/", OnClass.as_view()),
    path("method/", OnMethod.as_view()),
    path("write/", write),
    path("drf-function/", by_function),
    path("drf-method/", ByMethod.as_view()),
    path("ninja/", api.urls),
]


class TestFrameworks:
    """Django REST framework and django-ninja: after their authentication."""

    @staticmethod
    def send(path: str, key: str | None, who: str = "Bearer anna", **data: Any) -> Any:
        headers = {"Authorization": who, **({} if key is None else {"Idempotency-Key": key})}
        return Client().post(path, data, content_type="application/json", headers=headers)

    @pytest.mark.parametrize("path", ["/drf-function/", "/drf-method/", "/ninja/sync/"])
    def test_kept(self, backend: str, path: str, key: str) -> None:
        """Status, headers and the rendered body; of each client its own."""
        first, again = self.send(path, key, name=key), self.send(path, key, name=key)
        assert (first.status_code, first.json(), first["Location"]) == (201, {"times": 1}, "/1/")
        assert (again.status_code, again.content, again["Location"]) == (201, first.content, "/1/")
        assert (again["Content-Type"], again["Idempotent-Replayed"]) == (first["Content-Type"], "true")
        assert self.send(path, key, "Bearer bert", name=key).json() == {"times": 2}
        assert self.send(path, key, name="other").status_code == 422
        assert self.send(path, None, name=key).status_code == 400

    def test_errors_of_rest_framework(self, key: str) -> None:
        """A refusal is rendered as the errors of the view; what the view raises is not kept."""
        refused = self.send("/drf-method/", None, name=key)
        assert (refused.json(), refused["Content-Type"]) == (
            {"detail": "This needs the header Idempotency-Key."},
            "application/json",
        )
        assert self.send("/drf-method/", key, wrong=True).status_code == 400
        assert self.send("/drf-method/", key, name=key).status_code == 201

    def test_values_of_ninja(self, key: str) -> None:
        """Only responses are kept: the error names the function that makes one."""
        with pytest.raises(LockMisused, match=r"api\.create_response"):
            self.send("/ninja/value/", key)

    @pytest.mark.parametrize("around", [by_function, ByMethod])
    def test_around(self, around: Any) -> None:
        """Around a view of REST framework, its users are not known yet."""
        with pytest.raises(TypeError, match="below @api_view, or on the methods"):
            idempotent()(around)


#: A list in a list, and so on.
DEEP: list[Any] = functools.reduce(lambda inner, _: [inner], range(100_000), [])


class TestTasks:
    def test_once(self, backend: str, key: str) -> None:
        """Whatever way the arguments are passed, a key is done once, and its result comes again."""

        @idempotent(key="charge:{order}")
        def task(order: str, amount: int = 1) -> Any:
            return {"order": order, "times": do(order), "amount": [amount, None, "ä$"]}

        first = task(key)
        assert first == {"order": key, "times": 1, "amount": [1, None, "ä$"]}
        assert [task(order=key), task(key, amount=2)] == [first, first]
        assert task(key + "2")["times"] == 1

    def test_none(self, backend: str, key: str) -> None:
        task: Any = idempotent(key="a:{name}")(lambda name: do(name) and None)
        assert (task(key), task(key), done[key]) == (None, None, 1)

    def test_async(self, backend: str, key: str) -> None:
        @idempotent(key="a:{name}")
        async def task(name: str) -> int:
            await asyncio.sleep(0)
            return do(name)

        assert [asyncio.run(task(key)) for _ in "12"] == [1, 1]

    @pytest.mark.parametrize(
        "result", [object(), {1, 2}, "x" * 1_000_001, DEEP], ids=["object", "set", "large", "deep"]
    )
    def test_what_is_not_kept(self, backend: str, key: str, result: Any, caplog: pytest.LogCaptureFixture) -> None:
        """It is not done again: SKIPPED, and the log says why."""
        task: Any = idempotent(key="a:{name}")(lambda name: (do(name), result)[1])
        assert (task(key) is result, task(key), done[key]) == (True, SKIPPED, 1)
        assert "a result is not kept, only that there was one" in caplog.text

    def test_skipped_inside(self, backend: str, key: str) -> None:
        """What was not done, since a lock inside was held, is not kept: the next call does it."""

        task: Any = idempotent(key="a:{name}")(lambda name: SKIPPED if do(name) == 1 else done[name])
        assert [task(key) for _ in "123"] == [SKIPPED, 2, 2]

    def test_parallel(self, backend: str, key: str, settings: Settings) -> None:
        """A call that is no task raises; one after it gets the result."""
        settings.MONGOLOCK = {**settings.MONGOLOCK, "SHORT_WAIT": 0.05}
        task: Any = idempotent(key="a:{name}")(do)
        with held_elsewhere(f"idempotent:{__name__}.do:a:{key}"), pytest.raises(LockNotAcquired):
            task(key)
        assert (task(key), task(key), done[key]) == (1, 1, 1)

    def test_two_functions(self, key: str) -> None:
        one: Any = idempotent(key="a:{name}")(do)
        two: Any = idempotent(key="a:{kind}")(new_key)
        first = two(key)
        assert [one(key), two(key), one(key)] == [1, first, 1]

    def test_celery(self, key: str) -> None:
        """A task that is sent twice, and one inside a task's own retries."""
        app = Celery("idempotent", broker="memory://", backend="cache+memory://", set_as_current=False)

        @app.task(bind=True)
        @idempotent(key="charge:{name}")
        def task(self: Any, name: str) -> int:
            if do(name) == 1:
                raise self.retry(countdown=0)
            return done[name]

        assert [task.apply((key,)).get() for _ in "12"] == [2, 2]


class TestMistakes:
    """Each is refused, with its cure, when the function is decorated; a few when it is called."""

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"header": ""}, "Idempotency-Key"),
            ({"header": "a b"}, "Idempotency-Key"),
            ({"keep": 0}, "keep must be more than 0"),
            ({"keep": "1"}, "keep is a number of seconds or a timedelta"),
            ({"required": "no"}, "required is True or False"),
            ({"client": "anna"}, "client must be a function"),
            ({"client": as_async(charge)}, "client must be a function, not async"),
            ({"key": "a", "client": me}, "client= and required= are for views"),
            ({"key": "a", "required": False}, "client= and required= are for views"),
            ({"key": "{a}{b}"}, "put one of"),
            ({"heder": "a"}, "did you mean header="),
        ],
    )
    def test_options(self, options: Any, said: str) -> None:
        with pytest.raises((TypeError, ValueError), match=said):
            idempotent(**options)(charge)

    def test_functions(self) -> None:
        def generator(request: HttpRequest) -> Iterator[int]:
            yield 1

        for wrong, said in ((generator, "A generator has results"), (5, "@idempotent goes on a function")):
            with pytest.raises(TypeError, match=said):
                idempotent()(wrong)  # type: ignore[type-var]
        with pytest.raises(TypeError, match="has no parameter order"):
            idempotent(key="a:{order}")(charge)

    def test_calls(self, key: str) -> None:
        """A task without a template, and a view with one."""
        for call in (lambda: idempotent()(lambda name: None)("a"), lambda: post(idempotent(key="a")(charge), key)):
            with pytest.raises(TypeError, match=r'@idempotent\(key="charge:{order_id}"\)'):
                call()
