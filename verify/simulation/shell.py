"""Replacements of threads, queues, wake-ups and random numbers in the engine's modules, while a kernel runs."""

import contextlib
import functools
import os
import random
import secrets
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import Empty
from typing import Any, Final, Generic, TypeVar

from django_mongolock.engine.session import wakeups
from verify.simulation.kernel import FOREVER, Kernel, Killed, Strand

T = TypeVar("T")

#: The name of an object in the engine's modules, the original, and its replacement.
Constant = tuple[str, Any, Any]

ENGINE: Final = "django_mongolock.engine"


def _waits(kernel: Kernel, line: list[Strand], end: float) -> bool:
    """Let the running strand wait in a *line* until it is woken, or until *end*. Return False if it cannot."""
    strand, left = kernel.current, end - kernel.now()
    if left <= 0 or strand is None:
        return False
    line.append(strand)
    try:
        kernel.park(left)
    finally:
        if strand in line:
            line.remove(strand)
    return True


class SimQueue(Generic[T]):
    """A `queue.SimpleQueue` for strands."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._items: deque[T] = deque()
        self._waiting: list[Strand] = []

    def put(self, item: T) -> None:
        """See SimpleQueue.put(). The garbage collector may call this outside strands."""
        self._items.append(item)
        if self._waiting:
            self._kernel.wake(self._waiting.pop(0))

    def get(self, timeout: float | None = None) -> T:
        end = FOREVER if timeout is None else self._kernel.now() + timeout
        while not self._items:
            if not _waits(self._kernel, self._waiting, end):
                raise Empty
        return self._items.popleft()

    def get_nowait(self) -> T:
        if not self._items:
            raise Empty
        return self._items.popleft()

    def qsize(self) -> int:
        return len(self._items)


class SimLock:
    """A lock of `_thread` for strands."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._is_locked = False
        self._waiting: list[Strand] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """See threading.Lock.acquire()."""
        end = FOREVER if timeout < 0 else self._kernel.now() + timeout
        while self._is_locked:
            if not blocking or not _waits(self._kernel, self._waiting, end):
                return False
        self._is_locked = True
        return True

    def release(self) -> None:
        """See threading.Lock.release()."""
        if not self._is_locked:
            raise RuntimeError("release unlocked lock")
        self._is_locked = False
        if self._waiting:
            self._kernel.wake(self._waiting[0])

    def locked(self) -> bool:
        return self._is_locked

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


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
    """Replace Wakeup.wait()."""
    wakeup._lock = kernel.current
    try:
        if not wakeup._woken:
            kernel.park(seconds)
    finally:
        wakeup._lock, wakeup._woken = None, False


def _wake(kernel: Kernel, wakeup: Any) -> None:
    """Replace Wakeup.wake()."""
    wakeup._woken = True
    if wakeup._lock is not None:
        kernel.wake(wakeup._lock)


def _stand_ins(kernel: Kernel) -> dict[str, Any]:
    """Return the replacements in the engine's modules by name."""

    def thread(target: Callable[[], object], name: str = "", daemon: bool = True) -> _Thread:
        return _Thread(kernel, target, name)

    def start_new_thread(target: Callable[..., object], arguments: tuple[object, ...]) -> None:
        _Thread(kernel, functools.partial(target, *arguments), "worker").start()

    fake_thread = types.SimpleNamespace(
        allocate_lock=lambda: SimLock(kernel), start_new_thread=start_new_thread, LockType=SimLock
    )
    fake_threading = types.SimpleNamespace(
        Lock=threading.Lock,
        Thread=thread,
        current_thread=lambda: kernel.current,
        main_thread=lambda: kernel.current and kernel.current.process.main,
        TIMEOUT_MAX=threading.TIMEOUT_MAX,
    )

    def log_exception(event: str, /, **facts: object) -> None:
        """Record an error that the engine logs as unexpected."""
        error = sys.exception()
        if kernel.current is not None and error is not None and not isinstance(error, Killed):
            kernel.failures.append((kernel.current, error))

    return {
        "threading": fake_threading,
        "log_exception": log_exception,
        "time": types.SimpleNamespace(sleep=kernel.sleep, monotonic=kernel.now),
        "SimpleQueue": lambda: SimQueue[Any](kernel),
        "_thread": fake_thread,
        "random": kernel.chance,
        "secrets": types.SimpleNamespace(token_hex=lambda size: f"{kernel.chance.getrandbits(8 * size):0{2 * size}x}"),
        "os": types.SimpleNamespace(getpid=lambda: kernel.pid),
        "current_worker": lambda: kernel.current,
        "_has_ended": lambda worker: isinstance(worker, Strand) and worker.ended,
    }


#: The real objects behind the names. A module that uses a name for another object keeps it.
_REAL: Final = {"threading": threading, "random": random, "secrets": secrets, "os": os}
#: Modules that no simulated session runs.
_LEFT_OUT: Final = (
    "mongo",
    "pipeline",
    "election",
    "processes",
)


@contextlib.contextmanager
def replaced(kernel: Kernel, constants: Iterable[Constant] = ()) -> Iterator[None]:
    """Let the engine run on *kernel* instead of on threads, with other *constants*."""
    before: list[tuple[Any, str, object]] = []
    stand_ins: list[Constant] = [(name, _REAL.get(name), value) for name, value in _stand_ins(kernel).items()]
    stand_ins += constants
    wait, wake = wakeups.Wakeup.wait, wakeups.Wakeup.wake
    for name, module in list(sys.modules.items()):
        if not name.startswith(ENGINE) or name.rpartition(".")[2] in _LEFT_OUT:
            continue
        for attribute, real, stand_in in stand_ins:
            present = module.__dict__.get(attribute)
            if present is not None and (real is None or real is present):
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
