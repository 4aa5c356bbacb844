"""Streaming responses: the lock is held until the last part is sent, or the client has disconnected."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from functools import partial
from typing import Any

from django.http.response import HttpResponseBase

from ..engine.lock.lock import MongoLock
from ..locks import DjangoLock

#: How long closing a response waits for its stream to clean up, in seconds.
CLEANUP = 30


def hold_while_streaming(result: object, lock: MongoLock) -> None:
    """If *result* is a streaming response, leave the release of *lock* to it: at its end, or when it is closed.

    A server closes every response, also after the client has disconnected. One that is dropped without being closed
    releases the lock when it is garbage-collected. If the lock was lost, the stream breaks off at its end, so that the
    client does not take it for complete.
    """
    if not (isinstance(result, HttpResponseBase) and result.streaming and isinstance(lock, DjangoLock)):
        return
    lock.released_later = True
    held = _Held(lock)
    # Not `streaming_content`: it refers to the response, which would be collected late if it is dropped; setting it
    # would keep a server from sending a file by itself; and closing it does not reach the iterator of the view.
    inside: Any = result
    if inside.is_async:
        stream = inside._iterator = _until_end_async(inside._iterator, held)
        inside._resource_closers.append(partial(held.close, stream))
    else:
        inside._iterator = _until_end(inside._iterator, held)
        inside._resource_closers.append(held.release)


class _Held:
    """Releases a lock once, whichever end of its response comes first."""

    def __init__(self, lock: DjangoLock) -> None:
        self.lock = lock
        self.loop: asyncio.AbstractEventLoop | None = None
        self._once = threading.Lock()
        self._closing: asyncio.Task[None] | None = None

    def release(self) -> None:
        if self._once.acquire(blocking=False):
            self.lock.released_later = False
            self.lock.__exit__(None, None, None)

    async def arelease(self) -> None:
        if self._once.acquire(blocking=False):
            self.lock.released_later = False
            await self.lock.__aexit__(None, None, None)

    def close(self, stream: Any) -> None:
        """End an async *stream* in its event loop, so that it cleans up before the release."""
        if self._once.locked():
            return
        if self.loop is None or not self.loop.is_running():
            self.release()
        elif self.loop is _running_loop():
            self._closing = self.loop.create_task(self._finish(stream))
        else:
            finished = asyncio.run_coroutine_threadsafe(self._finish(stream), self.loop)
            with contextlib.suppress(concurrent.futures.TimeoutError):
                finished.result(CLEANUP)

    async def _finish(self, stream: Any) -> None:
        try:
            with contextlib.suppress(RuntimeError):  # it is running: another task closes it
                await stream.aclose()
        finally:
            await self.arelease()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _until_end(parts: Iterator[Any], held: _Held) -> Iterator[Any]:
    yield from parts
    held.release()


async def _until_end_async(parts: AsyncIterator[Any], held: _Held) -> AsyncIterator[Any]:
    held.loop = asyncio.get_running_loop()
    try:
        async for part in parts:
            yield part
    finally:
        if isinstance(parts, AsyncGenerator):
            await parts.aclose()
    await held.arelease()
