"""F48: A streaming response keeps the lock until its last part is sent, or the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.wsgi import WSGIHandler
from django.core.signals import request_finished
from django.db import close_old_connections
from django.http import FileResponse, HttpRequest, StreamingHttpResponse
from django.test import AsyncClient, RequestFactory
from django.urls import path
from pytest_django import DjangoDbBlocker

from django_mongolock import LockLost, mongo_locked
from tests.support.looking import holders
from tests.support.waiting import eventually

pytestmark = pytest.mark.urls(__name__)

SOURCE = Path(__file__).read_bytes()
#: The number of holders at the cleanup of each stream.
CLEANED: dict[str, int] = {}


def parts(name: str) -> Iterator[str]:
    try:
        for _ in range(3):
            yield f"{len(holders(f'stream:{name}'))};"
    finally:
        CLEANED[name] = len(holders(f"stream:{name}"))


async def aparts(name: str) -> AsyncIterator[str]:
    try:
        for _ in range(3):
            yield f"{len(holders(f'stream:{name}'))};"
            await asyncio.sleep(0)
    finally:
        CLEANED[name] = len(holders(f"stream:{name}"))


lock_stream = mongo_locked("stream:{name}", wait=0, on_contention="respond")


def view_of(parts: Callable[[str], Any], *, is_async: bool) -> Any:
    """Make a sync or async view of a sync or async stream."""

    def view(request: HttpRequest, name: str) -> StreamingHttpResponse:
        return StreamingHttpResponse(parts(name))

    async def aview(request: HttpRequest, name: str) -> StreamingHttpResponse:
        return view(request, name)

    return lock_stream(aview if is_async else view)


@lock_stream
def file(request: HttpRequest, name: str) -> FileResponse:
    return FileResponse(Path(__file__).open("rb"))


@lock_stream
async def afile(request: HttpRequest, name: str) -> FileResponse:
    return FileResponse(Path(__file__).open("rb"))  # noqa: ASYNC230


@lock_stream
async def endless(request: HttpRequest, name: str) -> StreamingHttpResponse:
    async def parts() -> AsyncIterator[str]:
        try:
            while True:
                yield "more;"
                await asyncio.sleep(0 if request.GET.get("busy") else 0.01)
        finally:
            CLEANED[name] = len(holders(f"stream:{name}"))

    return StreamingHttpResponse(parts())


#: All that is sent to its end, by either handler: Django turns some of it over to the other side.
WHOLE = ("stream", "astream", "astream_of_sync_view", "stream_of_async_view", "file", "afile")
VIEWS: dict[str, Any] = {
    "stream": view_of(parts, is_async=False),
    "astream_of_sync_view": view_of(aparts, is_async=False),
    "astream": view_of(aparts, is_async=True),
    "stream_of_async_view": view_of(parts, is_async=True),
    "file": file,
    "afile": afile,
    "endless": endless,
}
urlpatterns = [path(f"{kind}/<name>/", view) for kind, view in VIEWS.items()]


@pytest.fixture(autouse=True)
def _unblocked(django_db_blocker: DjangoDbBlocker) -> Iterator[None]:
    """Django's handlers look after the connections that other tests have opened."""
    with django_db_blocker.unblock():
        yield


def is_free(name: str) -> bool:
    return not holders(f"stream:{name}")


def is_whole(kind: str, name: str, body: bytes) -> bool:
    """Return whether the stream was sent with the lock held at every part and during its cleanup."""
    return body == SOURCE if "file" in kind else (body, CLEANED[name]) == (b"1;1;1;", 1)


def environ(kind: str, name: str, **more: Any) -> dict[str, Any]:
    return {**RequestFactory().get(f"/{kind}/{name}/").environ, **more}


class TestWsgi:
    """WSGI streams go through Django's own handler, as a WSGI server calls it."""

    def call(self, kind: str, name: str, **more: Any) -> Any:
        handler: Any = WSGIHandler()
        return handler(environ(kind, name, **more), lambda status, headers, exc_info=None: None)

    @pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume")
    @pytest.mark.parametrize("kind", WHOLE)
    def test_whole(self, kind: str, name: str) -> None:
        """The lock is held until the end, and free afterwards."""
        response = self.call(kind, name)
        assert not is_free(name)
        assert is_whole(kind, name, b"".join(response))
        response.close()
        assert is_free(name)

    def test_disconnected(self, name: str) -> None:
        """If a server closes the response early, the lock is released after the stream has cleaned up."""
        response = self.call("stream", name)
        assert next(iter(response)) == b"1;"
        assert not is_free(name)
        response.close()
        assert is_free(name)
        assert CLEANED[name] == 1

    @pytest.mark.parametrize("kind", ["stream", "file"])
    def test_never_begun(self, kind: str, name: str) -> None:
        response = self.call(kind, name)
        assert not is_free(name)
        response.close()
        assert is_free(name)

    def test_file_of_the_server(self, name: str) -> None:
        """The server can still send a file by itself, and closes the file afterwards."""
        sent: list[Any] = []

        class Wrapper:
            def __init__(self, filelike: Any, size: int) -> None:
                sent.append(filelike)

        self.call("file", name, **{"wsgi.file_wrapper": Wrapper})
        assert not is_free(name)
        sent[0].close()
        assert is_free(name)

    def test_dropped(self, name: str) -> None:
        """If a response is dropped without being closed, the lock is released when the response is collected."""
        response = VIEWS["stream"](RequestFactory().get("/"), name)
        assert not is_free(name)
        with pytest.warns(ResourceWarning, match="was not released") as warned:  # noqa: PT031
            del response
            assert eventually(lambda: is_free(name) and len(warned) > 0)

    def test_lost(self, name: str) -> None:
        """A lost lock breaks the stream off, so that no client takes the stream for complete. The stream is then closed
        quietly."""
        response = VIEWS["stream"](RequestFactory().get("/"), name)
        iterator = iter(response)
        next(iterator)
        closers: list[Any] = response._resource_closers
        (lock,) = (closer.__self__.lock for closer in closers if closer.__name__ == "release")
        lock._acquired()[0].mark_lost("a test wants it so")
        with pytest.raises(LockLost):
            list(iterator)
        response.close()


class Browser:
    """An ASGI server for an application, with a client that may leave."""

    def __init__(self, after: int | None = None) -> None:
        self.body: list[bytes] = []
        self.gone = asyncio.Event()
        self.after = after
        self._asked = False

    async def receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b""}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body" and message.get("body"):
            self.body.append(message["body"])
            if self.after is not None and len(self.body) >= self.after:
                self.gone.set()
                await asyncio.sleep(5)  # a client that takes no more, so that the server cancels us here

    async def get(self, url: str, query: bytes = b"") -> None:
        scope = {
            "type": "http",
            "method": "GET",
            "path": url,
            "query_string": query,
            "headers": [],
            "server": ("testserver", 80),
            "asgi": {"version": "3.0"},
        }
        handler: Any = ASGIHandler()
        await handler(scope, self.receive, self.send)


class TestAsgi:
    """ASGI streams go through Django's own handler, as an ASGI server calls it."""

    @pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume")
    @pytest.mark.parametrize("kind", WHOLE)
    async def test_whole(self, kind: str, name: str) -> None:
        """The lock is held until the end, and free afterwards."""
        browser = Browser()
        await browser.get(f"/{kind}/{name}/")
        assert is_whole(kind, name, b"".join(browser.body))
        assert is_free(name)

    @pytest.mark.parametrize("query", [b"", b"busy=1"])
    async def test_disconnected(self, name: str, query: bytes) -> None:
        """If a client leaves, the lock is released after the stream has cleaned up."""
        browser = Browser(after=3)
        await browser.get(f"/endless/{name}/", query)
        assert len(browser.body) == 3
        assert is_free(name)
        assert CLEANED[name] == 1


async def test_closed_in_its_loop(name: str) -> None:
    """Django's test client closes the response early in the loop's own thread. The response cleans up soon after."""
    response: Any = await AsyncClient().get(f"/endless/{name}/")
    await anext(aiter(response.streaming_content))
    # Django would check the connections of this thread, but refuses to do so inside of a loop.
    request_finished.disconnect(close_old_connections)
    try:
        response.close()
    finally:
        request_finished.connect(close_old_connections)
    assert await asyncio.to_thread(eventually, lambda: is_free(name))
    assert CLEANED[name] == 1
