"""The two ways to run a protocol: `run` blocks, `arun` awaits."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

T = TypeVar("T")
A = TypeVar("A")
P = ParamSpec("P")
S = TypeVar("S", bound="Performer")


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


class Performer(Protocol):
    """An object that runs the steps of its own methods."""

    def _run(self, steps: Generator[Any, Any, T], /) -> T: ...
    def _arun(self, steps: Generator[Any, Any, T], /) -> Coroutine[Any, Any, T]: ...


def twins(
    steps: Callable[Concatenate[S, P], Generator[Any, Any, T]],
) -> tuple[Callable[Concatenate[S, P], T], Callable[Concatenate[S, P], Coroutine[Any, Any, T]]]:
    """Make two methods of one that has the steps: one that blocks, and one that is awaited."""
    name, plain = steps.__name__.removeprefix("_"), inspect.signature(steps)
    returned = plain.return_annotation.partition("[")[2].removesuffix("]")

    def blocking(self: S, /, *arguments: P.args, **options: P.kwargs) -> T:
        return self._run(steps(self, *arguments, **options))

    async def awaited(self: S, /, *arguments: P.args, **options: P.kwargs) -> T:
        return await self._arun(steps(self, *arguments, **options))

    for made, title, doc in ((blocking, name, steps.__doc__), (awaited, f"a{name}", f"See {name}().")):
        functools.update_wrapper(made, steps)
        made.__name__, made.__doc__ = title, doc
        made.__qualname__ = steps.__qualname__.replace(steps.__name__, title)
        setattr(made, "__signature__", plain.replace(return_annotation=returned))  # noqa: B010 - unknown to checkers
    return blocking, awaited
