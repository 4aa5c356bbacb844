"""The two faces of a lock, behind one shape, so that a test is written once."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from django_mongolock.engine.lock.lock import MongoLock


@dataclass(frozen=True)
class Face:
    """A way to use a lock, by its blocking methods or by its coroutines in a lasting event loop."""

    name: str
    call: Callable[..., Any]

    def acquire(self, lock: MongoLock, *arguments: Any) -> MongoLock:
        result: MongoLock = self.call(lock, "acquire", *arguments)
        return result

    def try_acquire(self, lock: MongoLock) -> bool:
        return bool(self.call(lock, "try_acquire"))

    def release(self, lock: MongoLock) -> bool:
        return bool(self.call(lock, "release"))

    def extend(self, lock: MongoLock, *arguments: Any) -> None:
        self.call(lock, "extend", *arguments)

    @contextlib.contextmanager
    def block(self, lock: MongoLock) -> Iterator[MongoLock]:
        """Enter the block of a `with` or an `async with` statement."""
        self.call(lock, "__enter__")
        try:
            yield lock
        except BaseException as error:
            self.call(lock, "__exit__", type(error), error, error.__traceback__)
            raise
        else:
            self.call(lock, "__exit__", None, None, None)


def _blocking(lock: object, name: str, *arguments: Any, **options: Any) -> Any:
    return getattr(lock, name)(*arguments, **options)


def _async(lock: object, name: str, *arguments: Any, **options: Any) -> Any:
    name = name.replace("__e", "__ae") if name.startswith("__") else f"a{name}"

    async def call() -> Any:
        return await getattr(lock, name)(*arguments, **options)

    return asyncio.run(call())


BLOCKING = Face("blocking", _blocking)
ASYNC = Face("async", _async)
