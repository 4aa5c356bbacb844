"""Every kind of callable with every policy on contention, cell by cell as in the table of
docs/reference/decorator.md."""

from __future__ import annotations

import asyncio
import functools
import re
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from asgiref.sync import async_to_sync
from celery import Celery
from celery.exceptions import Retry
from django.core.management import call_command
from django.core.management.base import BaseCommand
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.test import AsyncRequestFactory, RequestFactory
from django.urls import path, resolve
from django.utils import timezone
from django.utils.decorators import method_decorator
from django.views import View
from ninja import NinjaAPI
from pytest_django import Settings
from rest_framework.decorators import api_view
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from django_mongolock import SKIPPED, LockBackendFailed, LockNotAcquired, mongo_lock, mongo_locked
from django_mongolock.contrib.queues import aretry_in_django, retry_in_django
from django_mongolock.decorator.policies import CallFacts, Policy
from django_mongolock.exceptions import LockReentry
from tests.celery.running import in_task
from tests.support.looking import held_elsewhere, holders, new_key

TABLE = Path(__file__).resolve().parent.parent / "docs" / "reference/decorator.md"
COLUMNS = ("raise", "skip", "respond", "retry", "callable")
Decorator = Callable[[Any], Any]
#: The number of holders of the lock, reported by the body of every kind.
Told = dict[str, int]
RUNS: Told = {}
ANSWER = 299
#: A name that only this module knows, so that readers of annotations must look it up here.
Number = int


def note(name: str) -> str:
    RUNS[name] = len(holders(f"kind:{name}"))
    return "ran"


# The ways to make and to call each kind. Each function takes the decorator, and returns a function to call with a name.


def function(lock: Decorator) -> Any:
    return lock(note)


def coroutine_function(lock: Decorator) -> Any:
    async def call(name: str) -> str:
        return note(name)

    locked = lock(call)
    return lambda name: asyncio.run(locked(name))


def generator(lock: Decorator) -> Any:
    def call(name: str) -> Iterator[str]:
        yield note(name)

    locked = lock(call)
    return lambda name: list(locked(name))


def async_generator(lock: Decorator) -> Any:
    async def call(name: str) -> AsyncIterator[str]:
        yield note(name)

    locked = lock(call)

    async def collect(name: str) -> list[str]:
        return [item async for item in locked(name)]

    return lambda name: asyncio.run(collect(name))


class Plain:
    def method(self, name: str) -> str:
        return note(name)


def method(lock: Decorator) -> Any:
    made: Any = type("Made", (), {"method": lock(Plain.method)})
    return made().method


def bound_method(lock: Decorator) -> Any:
    return lock(Plain().method)


def class_method(lock: Decorator) -> Any:
    made: Any = type("Made", (), {"method": classmethod(lock(Plain.method))})
    return made.method


def static_method(lock: Decorator) -> Any:
    made: Any = type("Made", (), {"method": staticmethod(lock(note))})
    return made.method


def management_command(lock: Decorator) -> Any:
    class Command(BaseCommand):
        def add_arguments(self, parser: Any) -> None:
            parser.add_argument("name")

        @lock
        def handle(self, *args: Any, name: str, **options: Any) -> str:
            return note(name)

    return lambda name: call_command(Command(), name)


app: Any = Celery("kinds", broker="memory://", set_as_current=False)


def task(lock: Decorator, *, bound: bool = False) -> Any:
    def call(name: str) -> str:
        return note(name)

    def bound_call(self: Any, name: str) -> str:
        return note(name)

    made: Any = app.task(bind=bound, name=uuid.uuid4().hex)(lock(bound_call if bound else call))

    def run(name: str) -> Any:
        with in_task(made, uuid.uuid4().hex, args=[name]):
            return made.run(name)

    return run


bound_task = functools.partial(task, bound=True)


def view(lock: Decorator) -> Any:
    def call(request: HttpRequest, name: str) -> HttpResponse:
        return HttpResponse(note(name))

    locked = lock(call)
    return lambda name: locked(RequestFactory().get("/"), name=name)


def async_view(lock: Decorator) -> Any:
    async def call(request: HttpRequest, name: str) -> HttpResponse:
        return HttpResponse(note(name))

    locked = lock(call)
    return lambda name: asyncio.run(locked(AsyncRequestFactory().get("/"), name=name))


def streaming_view(lock: Decorator) -> Any:
    def call(request: HttpRequest, name: str) -> StreamingHttpResponse:
        return StreamingHttpResponse(note(name) for _ in range(1))

    locked = lock(call)
    return lambda name: read(locked(RequestFactory().get("/"), name=name))


def async_streaming_view(lock: Decorator) -> Any:
    async def call(request: HttpRequest, name: str) -> StreamingHttpResponse:
        async def parts() -> AsyncIterator[str]:
            yield note(name)

        return StreamingHttpResponse(parts())

    locked = lock(call)

    async def get(name: str) -> HttpResponseBase:
        response: HttpResponseBase = await locked(AsyncRequestFactory().get("/"), name=name)
        if isinstance(response, StreamingHttpResponse):
            return HttpResponse(b"".join([part async for part in response]))
        return response

    return lambda name: asyncio.run(get(name))


def read(response: HttpResponseBase) -> HttpResponseBase:
    return HttpResponse(response.getvalue()) if isinstance(response, StreamingHttpResponse) else response


def class_based(base: Any, on: str = "class", *, is_async: bool = False) -> Callable[[Decorator], Any]:
    """Make a view class with the lock on the class, on its method, or on its method by `method_decorator`."""
    answer = Response if issubclass(base, APIView) else HttpResponse

    def get(self: Any, request: Any, name: str) -> HttpResponse:
        return answer(note(name))

    async def aget(self: Any, request: Any, name: str) -> HttpResponse:
        return get(self, request, name)

    def make(lock: Decorator) -> Any:
        method: Any = aget if is_async else get
        if on != "class":
            method = (method_decorator(lock) if on == "method_decorator" else lock)(method)
        made: Any = type("Made", (base,), {"retrieve" if base is ViewSet else "get": method})
        made = lock(made) if on == "class" else made
        called = made.as_view({"get": "retrieve"}) if base is ViewSet else made.as_view()
        if is_async:
            return lambda name: async_to_sync(called)(AsyncRequestFactory().get("/"), name=name)
        return lambda name: called(RequestFactory().get("/"), name=name)

    return make


def with_api_view(lock: Decorator, *, above: bool = False) -> Any:
    def call(request: Request, name: str) -> Response:
        return Response(note(name))

    made = lock(api_view(["GET"])(call)) if above else api_view(["GET"])(lock(call))
    return lambda name: made(RequestFactory().get("/"), name=name)


def operation(lock: Decorator, *, is_async: bool = False) -> Any:
    api = NinjaAPI(urls_namespace=uuid.uuid4().hex)

    def made(request: HttpRequest, name: str, number: Number = 5) -> str:
        assert number == 7
        return note(name)

    async def amade(request: HttpRequest, name: str, number: Number = 5) -> str:
        return made(request, name, number)

    api.get("/{name}")(lock(amade if is_async else made))
    factory = AsyncRequestFactory() if is_async else RequestFactory()
    return lambda name: call_ninja(api, factory.get(f"/{name}?number=7"))


async_operation = functools.partial(operation, is_async=True)


def call_ninja(api: NinjaAPI, request: HttpRequest) -> HttpResponseBase:
    urls: Any = (path("", api.urls),)
    match = resolve(request.path, urlconf=urls)
    found: Any = match.func
    result = found(request, *match.args, **match.kwargs)
    answer: HttpResponseBase = asyncio.run(result) if asyncio.iscoroutine(result) else result
    return answer


#: All kinds, by their names in the table.
KINDS: dict[str, Callable[[Decorator], Any]] = {
    "function": function,
    "coroutine function": coroutine_function,
    "generator": generator,
    "async generator": async_generator,
    "method": method,
    "bound method": bound_method,
    "class method": class_method,
    "static method": static_method,
    "`handle()` of a management command": management_command,
    "Celery task": task,
    "bound Celery task": bound_task,
    "view": view,
    "async view": async_view,
    "streaming view": streaming_view,
    "async streaming view": async_streaming_view,
    "view class": class_based(View),
    "async view class": class_based(View, is_async=True),
    "method of a view class, with `method_decorator`": class_based(View, "method_decorator"),
    "below `@api_view`": with_api_view,
    "above `@api_view`": functools.partial(with_api_view, above=True),
    "`APIView` class": class_based(APIView),
    "method of an `APIView`": class_based(APIView, "method"),
    "method of a `ViewSet`": class_based(ViewSet, "method"),
    "django-ninja operation": operation,
    "async django-ninja operation": async_operation,
}


#: Contention is an exception of Django REST framework there, rendered as the view's other errors are.
IN_REST_FRAMEWORK = ("below `@api_view`", "method of an `APIView`", "method of a `ViewSet`")


def read_table() -> dict[str, dict[str, str]]:
    """Return the outcome for each kind and policy in the table of the docs. Kinds with the same outcomes share a
    row."""
    rows = re.findall(r"^\| (.+) \|$", TABLE.read_text(), re.MULTILINE)
    cells = [[cell.strip() for cell in row.split(" | ")] for row in rows]
    (head,) = [
        number for number, row in enumerate(cells) if row[1:] == [f'`"{c}"`' for c in COLUMNS[:4]] + ["callable"]
    ]
    found = [row for row in cells[head + 1 :] if len(row) == 6]
    return {kind: dict(zip(COLUMNS, row[1:], strict=True)) for row in found for kind in row[0].split("<br>")}


WHAT_HAPPENS = read_table()


def test_table() -> None:
    """The table has every kind that is tested, and no other, and no empty cell."""
    assert list(WHAT_HAPPENS) == list(KINDS)
    words = {word for row in WHAT_HAPPENS.values() for word in row.values()}
    assert words == {"raises", "`SKIPPED`", "yields nothing", "423", "retried", "its result", "refused"}


def outcome(kind: str, policy: str, name: str) -> str:
    def instead(error: LockNotAcquired, *args: Any, **kwargs: Any) -> Any:
        assert error.key == f"kind:{name}"
        return HttpResponse(status=ANSWER) if has_request(args) else "instead"

    chosen: Any = instead if policy == "callable" else policy
    try:
        result = KINDS[kind](mongo_locked("kind:{name}", wait=0, on_contention=chosen))(name)
    except LockNotAcquired as error:
        return "raises" if (error.key, error.retry_after > 10) == (f"kind:{name}", True) else repr(error)
    except Retry:
        return "retried"
    except TypeError as error:
        return "refused" if "on_contention" in str(error) else repr(error)
    if result is SKIPPED:
        return "`SKIPPED`"
    if isinstance(result, HttpResponseBase):
        if result.status_code == 423:
            assert result["Retry-After"] == "1"
            assert kind not in IN_REST_FRAMEWORK or result.data["detail"].code == "locked"  # type: ignore[attr-defined]
        return {423: "423", ANSWER: "its result"}.get(result.status_code, str(result.status_code))
    return "its result" if result == "instead" else "yields nothing" if result == [] else repr(result)


def has_request(args: tuple[Any, ...]) -> bool:
    return any(isinstance(argument, (HttpRequest, Request)) for argument in args)


@pytest.mark.parametrize("policy", COLUMNS)
@pytest.mark.parametrize("kind", KINDS)
def test_cell(kind: str, policy: str, name: str) -> None:
    """While another caller holds the lock, the outcome of the table happens, and the body does not run."""
    with held_elsewhere(f"kind:{name}", lease=20):
        assert outcome(kind, policy, name) == WHAT_HAPPENS[kind][policy]
    assert name not in RUNS


@pytest.mark.parametrize("kind", KINDS)
def test_held(kind: str, name: str) -> None:
    """The lock is held while the body runs, and free afterwards. Options and results are those of the function."""
    result = KINDS[kind](mongo_locked("kind:{name}", wait=0))(name)
    assert RUNS[name] == 1
    assert holders(f"kind:{name}") == []
    if isinstance(result, HttpResponseBase):
        assert result.status_code == 200


@pytest.mark.parametrize("kind", ["function", "coroutine function", "generator", "async generator"])
@pytest.mark.parametrize("error", [LockNotAcquired("other"), LockBackendFailed("away")])
def test_errors_of_the_body(kind: str, error: Exception, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lock errors of the body are not taken for contention of its own lock."""

    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr(f"{__name__}.note", fail)
    with pytest.raises(type(error)) as caught:
        KINDS[kind](mongo_locked("kind:{name}", on_contention="skip"))(name)
    assert caught.value is error
    assert holders(f"kind:{name}") == []


class TestExceptionHandler:
    """The exception handler answers locks that are taken inside of a view."""

    def respond(self, error: Exception) -> Any:
        from django_mongolock.contrib.rest_framework import exception_handler

        return exception_handler(error, {})

    def test_contention(self, name: str) -> None:
        """The status is 423, or 503 while MongoDB is away. The response is not cached."""
        with held_elsewhere(name), pytest.raises(LockNotAcquired) as caught:
            mongo_lock(name, wait=0).acquire()
        response = self.respond(caught.value)
        assert response.status_code == 423
        assert response["Cache-Control"] == "no-store"
        assert name not in str(response.data)
        away = self.respond(LockBackendFailed("away"))
        assert (away.status_code, away["Retry-After"]) == (503, "5")

    def test_others(self) -> None:
        """A mistake in the code and errors of others stay as they are."""
        from django.http import Http404

        assert self.respond(LockReentry("key")) is None
        assert self.respond(ZeroDivisionError()) is None
        assert self.respond(Http404()).status_code == 404


class Postponed(Policy):
    """A policy of the project's own."""

    kinds = ("call",)

    def first_wait(self, settings: object, call: CallFacts) -> float | None:
        return 0.0

    def answer(self, error: LockNotAcquired, call: CallFacts) -> Any:
        return f"{error.key} later: {call.args}"


def test_a_policy_of_ones_own(name: str) -> None:
    """A new policy is one class, with its wait, its kinds of callables, and its result."""
    locked: Any = mongo_locked("kind:{name}", on_contention=Postponed())(note)
    with held_elsewhere(f"kind:{name}"):
        assert locked(name) == f"kind:{name} later: ('{name}',)"
    with pytest.raises(TypeError, match="makes no response"):
        locked(RequestFactory().get("/"))
    with pytest.raises(TypeError, match="a generator returns no result"):
        KINDS["generator"](mongo_locked("kind:{name}", on_contention=Postponed()))


def test_default_wait(settings: Settings, name: str) -> None:
    """Without wait=, views and "retry" wait shortly, "skip" does not wait, and others wait as MONGOLOCK says."""
    from django_mongolock.decorator.calls import LockedCall, LockedFunction, LockPlan
    from django_mongolock.decorator.policies import as_policy
    from django_mongolock.locks import chosen

    settings.MONGOLOCK = {**settings.MONGOLOCK, "WAIT": 7, "SHORT_WAIT": 2}
    request = RequestFactory().get("/")

    def waits(policy: Any, request: HttpRequest | None = None, **options: Any) -> object:
        call = LockedCall(LockedFunction(LockPlan(as_policy(policy), chosen(options)), note), (), {})
        call.request = request
        return call.lock().options.wait

    assert waits("raise") == 7
    assert waits("raise", request) == waits("respond", request) == waits("retry") == 2
    assert waits("skip") == 0
    assert waits("respond", request, wait=5) == 5
    settings.MONGOLOCK = {**settings.MONGOLOCK, "WAIT": 1}
    assert waits("respond", request) == 1
    settings.MONGOLOCK = {**settings.MONGOLOCK, "WAIT": None}
    assert (waits("raise"), waits("respond", request)) == (None, 2)


def test_a_task_of_django_comes_back() -> None:
    """A task of Django is enqueued again later, with its arguments. Without its context this is not possible."""
    key = new_key()

    @mongo_locked(key, wait=0, on_contention=retry_in_django)
    def work(context: Any, number: int, *, error: str) -> str:
        return "done"

    @mongo_locked(key, wait=0, on_contention=aretry_in_django)
    async def awork(context: Any, number: int, *, error: str) -> str:
        return "done"

    context = Mock()
    again = context.task_result.task.using.return_value
    again.enqueue, again.aenqueue = (kind(return_value=Mock(id="another")) for kind in (Mock, AsyncMock))
    assert work(context, 5, error="x") == "done"
    with held_elsewhere(key):
        now = timezone.now()
        assert work(context, 5, error="x") == asyncio.run(awork(context, 5, error="x")) == "another"
        for enqueue in (again.enqueue, again.aenqueue):
            enqueue.assert_called_once_with(5, error="x")
        for call in context.task_result.task.using.call_args_list:
            assert timedelta(seconds=0.2) < call.kwargs["run_after"] - now < timedelta(seconds=30)
        with pytest.raises(TypeError, match="takes_context=True"):
            work(5, 5, error="x")
