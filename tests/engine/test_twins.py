"""Methods in pairs: one that blocks and one that is awaited, made of the same steps."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Generator
from typing import Any

from django_mongolock.engine.protocol import actions


class Counter:
    """Adds what it is given, by steps."""

    def __init__(self) -> None:
        self.total = 0

    def _add(self, number: int, *, times: int = 1) -> Generator[int, int, int]:
        """Add a number."""
        for _ in range(times):
            self.total += yield number
        return self.total

    add, aadd = actions.twins(_add)

    def _run(self, steps: Generator[Any, Any, Any]) -> Any:
        return actions.run(steps, lambda step: step * 10)

    async def _arun(self, steps: Generator[Any, Any, Any]) -> Any:
        async def perform(step: int) -> int:
            return step * 100

        return await actions.arun(steps, perform)


def test_the_same_steps() -> None:
    """Each is run in its own way."""
    counter = Counter()
    assert counter.add(1) == 10
    assert asyncio.run(counter.aadd(2, times=2)) == 410
    assert inspect.iscoroutinefunction(counter.aadd)


def test_what_is_shown() -> None:
    """Both have their own name; the signature is that of the steps, with what they return in the end."""
    assert (Counter.add.__name__, Counter.add.__qualname__) == ("add", "Counter.add")
    assert (Counter.aadd.__name__, Counter.aadd.__doc__) == ("aadd", "See add().")
    assert Counter.add.__doc__ == "Add a number."
    assert str(inspect.signature(Counter().add)).startswith("(number: 'int', *, times: 'int' = 1) -> ")
