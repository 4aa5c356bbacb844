"""Flows of calls across `sync_to_async` and `async_to_sync`: a thread that works for a task, a task for a thread.

While the caller waits, its helper runs in its place. The helper would wait for itself if it asked for a lock of the
caller. asgiref copies context variables in both directions, so a variable names the caller. Other code copies them,
too, such as `asyncio.create_task`. Therefore the caller counts only while it waits in a call of asgiref whose own
objects show that this helper serves that call.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from types import FrameType
from typing import Any, Final

from asgiref.sync import AsyncToSync, SyncToAsync

#: The number of looks at a running task until it waits, and the seconds between two looks.
LOOKS, LOOK_EVERY = 50, 0.001
#: The thread or task that last acquired a lock in this context.
_worker: Final[ContextVar[object]] = ContextVar("mongolock_worker", default=None)


def origin_of(own: object, task: asyncio.Task[Any] | None) -> object:
    """Return the thread or task that waits for *own*, a thread or the *task* that runs in it.

    If none waits, return *own*.
    """
    caller = _worker.get()
    if caller is None or caller is own:
        return own
    return caller if _waits_for(caller, task) else own


def enter(worker: object) -> None:
    """Note that *worker*, a thread or task, acquires a lock in this context. Helpers of it find it here."""
    if _worker.get() is not worker:
        _worker.set(worker)


def _waits_for(caller: object, task: asyncio.Task[Any] | None) -> bool:
    """Return whether *caller* waits for the running task, or for this thread if there is none."""
    if isinstance(caller, weakref.ref):
        return _serves(caller(), task)
    if not isinstance(caller, threading.Thread) or task is None:
        return False
    result = _local(sys._getframe(), AsyncToSync.main_wrap, "call_result")
    awaited = _local(_frames().get(caller.ident or 0), AsyncToSync.__call__, "call_result")
    return result is not None and result is awaited


def _serves(caller: object, task: asyncio.Task[Any] | None) -> bool:
    """Return whether the task *caller* waits for the running task or thread, or for one that does."""
    if (served := _served_by(caller)) is None:
        return False
    is_ours = served is getattr(SyncToAsync.threadlocal, "task_context", None) if task is None else task in served
    return is_ours or any(_serves(each, task) for each in served)


def _served_by(caller: object) -> list[asyncio.Task[Any]] | None:
    """Return the list that asgiref makes for each call of sync_to_async, if the task *caller* waits for such a call.

    The list has the tasks by which the thread of that call waits for coroutines. The call starts the thread before it
    waits itself. This function therefore looks at a running task several times.
    """
    coroutine: Any = caller.get_coro() if isinstance(caller, asyncio.Task) else None
    for _ in range(LOOKS):
        if not getattr(coroutine, "cr_running", False):
            break
        time.sleep(LOOK_EVERY)
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        if frame.f_code is SyncToAsync.__call__.__code__:
            found: list[asyncio.Task[Any]] | None = frame.f_locals.get("task_context")
            return found
        coroutine = coroutine.cr_await
    return None


def _frames() -> dict[int, FrameType]:
    """Return the present frame of each thread.

    Before Python 3.12, a garbage collection during this call may deadlock the process
    (https://github.com/python/cpython/issues/106883).
    """
    if sys.version_info >= (3, 12) or not gc.isenabled():
        return sys._current_frames()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        gc.enable()


def _local(frame: FrameType | None, function: Callable[..., object], name: str) -> object:
    """Return the value of a local variable of the nearest call of *function*, from this frame outwards."""
    while frame is not None:
        if frame.f_code is function.__code__:
            return frame.f_locals.get(name)
        frame = frame.f_back
    return None
