"""Streaming responses: the lock is held until the last part is sent, or the client has gone."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, TypeGuard

from django.http import StreamingHttpResponse
from django.http.response import HttpResponseBase

from .engine.locks import MongoLock

#: How long closing a response waits for its stream to clean up, in seconds.
CLEANUP = 30


def is_streaming(result: object) -> TypeGuard[StreamingHttpResponse]:
    """Is it a response whose body is made while it is sent?"""
    return isinstance(result, HttpResponseBase) and result.streaming


def hold_until_sent(response: StreamingHttpResponse, lock: MongoLock) -> None:
    """Have *response* give *lock* back: at the end of its stream, or when it is closed.

    A server closes every response, also where the client has disconnected. One that is dropped without that gives
    the lock back when it is collected. A lock that was lost breaks the stream off at its end: the client must not
    take for whole what may not be.
    """
    held = _Held(lock)
    if response.is_async:
        # Closing the response's own wrapper does not reach the iterator of the view.
        source = getattr(response, "_iterator", None)
        stream = _until_end_async(response.streaming_content, source, held)  # type: ignore[arg-type]
        response.streaming_content = stream
        response._resource_closers.append(lambda: held.close(stream))  # type: ignore[attr-defined]
        return
    if getattr(response, "file_to_stream", None) is None:  # a server may send a file by itself, and then closes it
        response.streaming_content = _until_end(response.streaming_content, held)  # type: ignore[arg-type]
    response._resource_closers.append(held.give_back)  # type: ignore[attr-defined]


class _Held:
    """A lock that is given back once, from whatever side the end comes first."""

    def __init__(self, lock: MongoLock) -> None:
        self.lock = lock
        self.loop: asyncio.AbstractEventLoop | None = None
        self._once = threading.Lock()
        self._closing: asyncio.Task[None] | None = None

    def give_back(self) -> None:
        if self._once.acquire(blocking=False):
            self.lock.__exit__(None, None, None)

    async def agive_back(self) -> None:
        if self._once.acquire(blocking=False):
            await self.lock.__aexit__(None, None, None)

    def close(self, stream: Any) -> None:
        """End an async *stream* where it runs, so that what it has to clean up comes before the release."""
        if self._once.locked():
            return
        if self.loop is None or not self.loop.is_running():
            self.give_back()
        elif self.loop is _running_loop():
            self._closing = self.loop.create_task(self._finish(stream))
        else:
            finished = asyncio.run_coroutine_threadsafe(self._finish(stream), self.loop)
            with contextlib.suppress(concurrent.futures.TimeoutError):
                finished.result(CLEANUP)

    async def _finish(self, stream: Any) -> None:
        try:
            with contextlib.suppress(RuntimeError):  # it runs: somebody else is closing it
                await stream.aclose()
        finally:
            await self.agive_back()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _until_end(parts: Iterator[bytes], held: _Held) -> Iterator[bytes]:
    yield from parts
    held.give_back()


async def _until_end_async(parts: AsyncIterator[bytes], source: Any, held: _Held) -> AsyncIterator[bytes]:
    held.loop = asyncio.get_running_loop()
    try:
        async for part in parts:
            yield part
    finally:
        if hasattr(source, "aclose"):
            await source.aclose()
    await held.agive_back()
