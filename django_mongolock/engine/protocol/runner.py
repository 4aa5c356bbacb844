"""The two ways to run a protocol: `run` blocks, `arun` awaits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

T = TypeVar("T")
A = TypeVar("A")


def run(steps: Generator[A, Any, T], perform: Callable[[A], Any]) -> T:
    """Run *steps* to their end in this thread; *perform* carries out what they yield, and waits where they say so.

    Whatever is raised on the way, also by a signal handler, is thrown into the steps, which clean up.
    """
    try:
        action = next(steps)
        while True:
            try:
                outcome = perform(action)
            except BaseException as error:  # noqa: BLE001 - all of it goes to the steps
                action = steps.throw(error)
            else:
                action = steps.send(outcome)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()


async def arun(steps: Generator[A, Any, T], perform: Callable[[A], Awaitable[Any]]) -> T:
    """See run(). A cancelled coroutine is thrown CancelledError at the point where it waits, and passes it on."""
    try:
        action = next(steps)
        while True:
            try:
                outcome = await perform(action)
            except BaseException as error:  # noqa: BLE001 - all of it goes to the steps
                action = steps.throw(error)
            else:
                action = steps.send(outcome)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()
