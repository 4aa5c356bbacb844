"""Management commands under a lock, for test_run_locked. Run as a program, this file is one of them."""

from __future__ import annotations

import sys
import time
from typing import Any

from django.core.management.base import CommandParser

from django_mongolock.decorator.locked_command import LockedCommand


class Command(LockedCommand):
    """Says which token it has, and stays for as long as it is told."""

    lock_key = "import:{source}"
    requires_system_checks: list[str] = []  # noqa: RUF012

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("source")
        parser.add_argument("--seconds", type=float, default=0.0)

    def handle(self, **options: Any) -> str:
        self.stdout.write(f"token {self.lock.fencing_token}")
        self.stdout.flush()
        time.sleep(options["seconds"])
        self.lock.ensure_held()
        return "done"


class Patient(Command):
    on_contention = "skip"


if __name__ == "__main__":
    import django

    django.setup()
    Command().run_from_argv(["manage.py", "import", *sys.argv[1:]])
