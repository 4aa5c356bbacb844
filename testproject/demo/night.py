"""Programs that hold locks, or get into trouble with them: ``python -m testproject.demo.night PROGRAM LABEL KEY…``.

A program runs until SIGTERM, or until it has nothing left to do.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack

import django


def hold(label: str, *keys: str) -> None:
    """Acquire one key after the other, without a time limit, and hold them all."""
    from django_mongolock import mongo_lock

    with ExitStack() as held:
        for key in keys:
            held.enter_context(mongo_lock(key, label=label, wait=None))
        signal.pause()


def crowd(label: str, key: str, count: str) -> None:
    """Let *count* tasks wait for a lock. Each holds it for a moment."""
    from django_mongolock import mongo_lock

    async def buy(number: int) -> None:
        async with mongo_lock(key, label=f"{label} {number}", wait=None):
            await asyncio.sleep(0.03)

    async def buy_all() -> None:
        await asyncio.gather(*(buy(number) for number in range(1, int(count) + 1)))

    asyncio.run(buy_all())


def cross(label: str, first: str, second: str) -> None:
    """Take two locks, again and again, until a holder is asked to release. Another program takes them the other way
    round: they would wait for each other without end, and one of them gets LockDeadlock."""
    from django_mongolock import mongo_lock
    from django_mongolock.exceptions import LockDeadlock

    asked = threading.Event()
    while not asked.wait(random.uniform(0.1, 0.5)):
        try:
            with mongo_lock(first, label=label, wait=None, on_release_requested=lambda _: asked.set()):
                asked.wait(1.0)
                with mongo_lock(second, label=label, wait=None, on_release_requested=lambda _: asked.set()):
                    asked.wait(40.0)  # a person has time to look, and to press
        except LockDeadlock as error:
            print(f"{label}: {error}", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    django.setup()
    programs: dict[str, Callable[..., None]] = {"hold": hold, "crowd": crowd, "cross": cross}
    programs[sys.argv[1]](*sys.argv[2:])
