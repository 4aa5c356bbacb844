"""What stands in for threads, queues, wake-ups and random numbers in the engine's modules, while a kernel runs."""

import contextlib
import os
import random
import secrets
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from queue import Empty
from typing import Any, Final, Generic, TypeVar

from django_mongolock.engine.session import wakeups
from django_mongolock.exceptions import LockBackendFailed
from verify.simulation.kernel import FOREVER, Kernel, Killed, Strand

T = TypeVar("T")

ENGINE: Final = "django_mongolock.engine"
#: `rule.PURGE_STEP` for runs of a minute, in milliseconds.
PURGE_STEP: Final = 2_000
#: Seconds that a call which has begun may take longer than it was given: see `worker_calls.OVERTIME`.
OVERTIME: Final = 1.0


class SimQueue(Generic[T]):
    """A `queue.SimpleQueue` for strands."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._items: deque[T] = deque()
        self._waiting: Strand | None = None

    def put(self, item: T) -> None:
        """See SimpleQueue.put(). May be called outside of strands, as the garbage collector does."""
        self._items.append(item)
        if self._waiting is not None:
            self._kernel.wake(self._waiting)

    def get(self, timeout: float | None = None) -> T:
        end = FOREVER if timeout is None else self._kernel.time + timeout
        while not self._items:
            left = end - self._kernel.time
            if left <= 0:
                raise Empty
            self._waiting = self._kernel.current
            try:
                self._kernel.park(left)
            finally:
                self._waiting = None
        return self._items.popleft()

    def get_nowait(self) -> T:
        if not self._items:
            raise Empty
        return self._items.popleft()

    def qsize(self) -> int:
        return len(self._items)


class SimWorkerThreads:
    """`WorkerThreads` whose threads are strands. Each call is begun at once; the pool itself is tested elsewhere."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._closed = False

    def begin_own(self, key: str | None) -> bool:
        return True

    def end_own(self, key: str | None) -> None:
        """See WorkerThreads.end_own()."""

    def submit(self, call: Callable[[], object], **how: object) -> bool:
        if self._closed or self._kernel.current is None:
            return False
        self._kernel.spawn(self._kernel.current.process, call, "worker")
        return True

    def call(self, call: Callable[[float], T], timeout: float | None = None, **how: object) -> T:
        """See WorkerThreads.call(). What strikes the caller does not strike the command, which goes on."""
        kernel, caller, outcome = self._kernel, self._kernel.current, _Outcome[T]()
        assert caller is not None
        left = FOREVER if timeout is None else timeout

        def make() -> None:
            try:
                outcome.result = call(left)
            except Exception as error:  # noqa: BLE001 - it is raised where it is waited for
                outcome.errors.append(error)
            outcome.done = True
            if outcome.is_awaited:
                kernel.wake(caller)

        kernel.spawn(caller.process, make, "sender")
        try:
            end = kernel.time + left + OVERTIME
            while not outcome.done:
                if kernel.time >= end:
                    raise LockBackendFailed("MongoDB did not answer in time")
                kernel.park(end - kernel.time)
        finally:
            outcome.is_awaited = False
        if outcome.errors:
            raise outcome.errors.pop()
        return outcome.result

    def close(self) -> None:
        self._closed = True


class _Outcome(Generic[T]):
    """What came of a call."""

    result: T

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.done = False
        self.is_awaited = True


class _Thread:
    """`threading.Thread` as a strand."""

    def __init__(self, kernel: Kernel, target: Callable[[], object], name: str) -> None:
        self._kernel, self._target, self._name = kernel, target, name
        self._strand: Strand | None = None

    def start(self) -> None:
        assert self._kernel.current is not None
        self._strand = self._kernel.spawn(self._kernel.current.process, self._target, self._name)

    def is_alive(self) -> bool:
        return self._strand is not None and self._strand.is_alive()


def _wait(kernel: Kernel, wakeup: Any, seconds: float) -> None:
    """Stands in for Wakeup.wait()."""
    wakeup._lock = kernel.current
    try:
        if not wakeup._woken:
            kernel.park(seconds)
    finally:
        wakeup._lock, wakeup._woken = None, False


def _wake(kernel: Kernel, wakeup: Any) -> None:
    """Stands in for Wakeup.wake()."""
    wakeup._woken = True
    if wakeup._lock is not None:
        kernel.wake(wakeup._lock)


def _stand_ins(kernel: Kernel) -> dict[str, Any]:
    """What the engine's modules find under these names."""

    def thread(target: Callable[[], object], name: str = "", daemon: bool = True) -> _Thread:
        return _Thread(kernel, target, name)

    fake_threading = types.SimpleNamespace(
        Lock=threading.Lock,
        Thread=thread,
        current_thread=lambda: kernel.current,
        main_thread=lambda: None,
        TIMEOUT_MAX=threading.TIMEOUT_MAX,
    )

    def log_exception(event: str, /, **facts: object) -> None:
        """What the engine logs as an unexpected error is one."""
        error = sys.exception()
        if kernel.current is not None and error is not None and not isinstance(error, Killed):
            kernel.failures.append((kernel.current, error))

    return {
        "threading": fake_threading,
        "log_exception": log_exception,
        "time": types.SimpleNamespace(sleep=kernel.sleep, monotonic=kernel.now),
        "SimpleQueue": lambda: SimQueue[Any](kernel),
        "WorkerThreads": lambda *sizes, **how: SimWorkerThreads(kernel),
        "random": kernel.chance,
        "secrets": types.SimpleNamespace(token_hex=lambda size: f"{kernel.chance.getrandbits(8 * size):0{2 * size}x}"),
        "os": types.SimpleNamespace(getpid=lambda: kernel.pid),
        "current_worker": lambda: kernel.current,
        "PURGE_STEP": PURGE_STEP,
        "_has_ended": lambda worker: isinstance(worker, Strand) and worker.ended,
    }


#: Which real things the names stand for: a module that uses a name for something else keeps that.
_REAL: Final = {"threading": threading, "random": random, "secrets": secrets, "os": os}
#: Modules that no simulated session runs.
_LEFT_OUT: Final = (
    "mongo",
    "election",
    "worker_threads",
    "worker_calls",
    "processes",
)


@contextlib.contextmanager
def replaced(kernel: Kernel) -> Iterator[None]:
    """Have the engine run on *kernel* instead of on threads."""
    stand_ins, before = _stand_ins(kernel), []
    wait, wake = wakeups.Wakeup.wait, wakeups.Wakeup.wake
    for name, module in list(sys.modules.items()):
        if not name.startswith(ENGINE) or name.rpartition(".")[2] in _LEFT_OUT:
            continue
        for attribute, stand_in in stand_ins.items():
            present = module.__dict__.get(attribute)
            if present is not None and _REAL.get(attribute, present) is present:
                before.append((module, attribute, present))
                setattr(module, attribute, stand_in)
    wakeups.Wakeup.wait = lambda self, seconds: _wait(kernel, self, seconds)  # type: ignore[method-assign]
    wakeups.Wakeup.wake = lambda self: _wake(kernel, self)  # type: ignore[method-assign]
    try:
        yield
    finally:
        wakeups.Wakeup.wait, wakeups.Wakeup.wake = wait, wake  # type: ignore[method-assign]
        for module, attribute, present in before:
            setattr(module, attribute, present)
