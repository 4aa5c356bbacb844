"""Plain management commands under a decorator, for test_nightly. Run as a program, this file is one of them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from django.core.management.base import BaseCommand, CommandParser

from django_mongolock import mongo_locked, once_per

LEASE: Final = 3


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def work(seconds: float) -> str:
    say("begun")
    time.sleep(seconds)
    return "done"


async def awork(seconds: float) -> str:
    say("begun")
    await asyncio.sleep(seconds)
    return "done"


class Command(BaseCommand):
    """Runs the function under the named decorator."""

    requires_system_checks: list[str] = []  # noqa: RUF012

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("kind")
        parser.add_argument("key")
        parser.add_argument("--seconds", type=float, default=0.0)

    def handle(self, **options: Any) -> str:
        kind, key, seconds = options["kind"], options["key"], options["seconds"]
        decorate: Callable[[Any], Any] = (
            mongo_locked(key, lease=LEASE) if kind.startswith("locked") else once_per(key, hours=24, lease=LEASE)
        )
        result = asyncio.run(decorate(awork)(seconds)) if kind.endswith("async") else decorate(work)(seconds)
        return str(result)


if __name__ == "__main__":
    import django

    django.setup()
    Command().run_from_argv(["manage.py", "nightly", *sys.argv[1:]])
