"""The two faces of a protocol: `run` blocks, `arun` awaits. The only place that waits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

from .protocol import Heard, Pause

T = TypeVar("T")
A = TypeVar("A")


def run(protocol: Generator[A, Any, T], send: Callable[[A], Any], pause: Callable[[Pause], Heard]) -> T:
    """Run *protocol* to its end in this thread; *send* carries out a command, *pause* waits.

    Whatever is raised on the way, also by a signal handler, is thrown into the protocol, which cleans up.
    """
    try:
        action = next(protocol)
        while True:
            try:
                outcome = pause(action) if isinstance(action, Pause) else send(action)
            except BaseException as error:  # noqa: BLE001 - all of it goes to the protocol
                action = protocol.throw(error)
            else:
                action = protocol.send(outcome)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        protocol.close()


async def arun(
    protocol: Generator[A, Any, T], send: Callable[[A], Awaitable[Any]], pause: Callable[[Pause], Awaitable[Heard]]
) -> T:
    """See run(). A cancelled coroutine is thrown CancelledError at the point where it waits, and passes it on."""
    try:
        action = next(protocol)
        while True:
            try:
                outcome = await (pause(action) if isinstance(action, Pause) else send(action))
            except BaseException as error:  # noqa: BLE001 - all of it goes to the protocol
                action = protocol.throw(error)
            else:
                action = protocol.send(outcome)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        protocol.close()
