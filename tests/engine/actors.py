"""Threads that do one thing after the other with locks: by the blocking face, or as one task by the other."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from django_mongolock.engine.lock import MongoLock

#: Is given what a call returned, or what it raised.
Then = Callable[[Any, BaseException | None], object]


@dataclass(frozen=True, slots=True)
class Call:
    """A method of a lock, by its blocking name, and what is to be done afterwards in the same thread."""

    lock: MongoLock
    method: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    then: Then


class Actor(ABC):
    """Makes calls in a thread of its own, one after the other."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._idle = threading.Event()
        self._idle.set()
        self._now: Call | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        return self.name

    @property
    def busy(self) -> bool:
        return not self._idle.is_set()

    def do(self, lock: MongoLock, method: str, *arguments: Any, then: Then, join: float = 0.0, **options: Any) -> None:
        """Make the call, if it is not busy; wait for its end at most *join* seconds."""
        self._idle.clear()
        self._now = Call(lock, method, arguments, options, then)
        self._put(self._now)
        if join:
            self.wait(join)

    def wait(self, seconds: float) -> bool:
        """Wait until it has nothing to do; return whether that was so within *seconds*."""
        return self._idle.wait(seconds)

    def cancel(self) -> None:
        """End the wait of the call that it makes, if it waits."""
        if (call := self._now) is not None:
            call.lock.cancel()

    def close(self) -> None:
        self._put(None)
        self._thread.join(10)

    @abstractmethod
    def _put(self, call: Call | None) -> None: ...

    @abstractmethod
    def _run(self) -> None: ...

    def _done(self, call: Call, result: Any, error: BaseException | None) -> None:
        try:
            call.then(result, error)
        finally:
            self._now = None
            self._idle.set()


class ThreadActor(Actor):
    """Calls the blocking methods."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        super().__init__(name)

    def _put(self, call: Call | None) -> None:
        self._calls.put(call)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            result, raised = None, None
            try:
                result = getattr(call.lock, call.method)(*call.arguments, **call.options)
            except BaseException as error:  # noqa: BLE001 - whoever asked is told
                raised = error.with_traceback(None)
            self._done(call, result, raised)
            del call, result, raised


class TaskActor(Actor):
    """Awaits the methods, all of them in one task."""

    def __init__(self, name: str) -> None:
        self._ready = threading.Event()
        super().__init__(name)
        self._ready.wait(10)

    def cancel(self) -> None:
        """Cancel the task, which is what becomes of a coroutine that nobody waits for any more."""
        if self._now is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._task.cancel)

    def _put(self, call: Call | None) -> None:
        self._loop.call_soon_threadsafe(self._calls.put_nowait, call)

    def _run(self) -> None:
        asyncio.run(self._work())

    async def _work(self) -> None:
        self._loop, self._calls = asyncio.get_running_loop(), asyncio.Queue[Call | None]()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._ready.set()
        while True:
            try:
                call = await self._calls.get()
            except asyncio.CancelledError:  # it came too late: nothing is left to be cancelled
                task.uncancel()
                continue
            if call is None:
                return
            result, raised = None, None
            try:
                result = await getattr(call.lock, f"a{call.method}")(*call.arguments, **call.options)
            except BaseException as error:  # noqa: BLE001 - whoever asked is told
                raised = error.with_traceback(None)
                task.uncancel()
            self._done(call, result, raised)
            del call, result, raised
