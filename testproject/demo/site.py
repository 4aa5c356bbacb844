"""All processes of the demo, which are databases, web server, workers, beat, and traffic, in this order."""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGINT

import django
from django.core.management import call_command

from testproject.demo.browser import Browser
from testproject.demo.processes import Processes
from testproject.demo.traffic import PASSWORD_VARIABLE

SELLERS = ("anna", "ben", "carla")
ADMIN = "admin"
EDITOR = "editor"  # a second person, for edit locks
WORKER_CHILDREN = 4
STARTUP_SECONDS = 60.0


class SiteError(Exception):
    """A part of the demo did not start or end properly."""


@dataclass
class Site:
    """The running demo, with its address, its login, and its processes."""

    base: str
    processes: Processes
    password: str = field(default_factory=lambda: secrets.token_urlsafe(6))

    def start_servers(self, folder: Path) -> None:
        """Start web server, worker pool and beat, and return when the web server answers."""
        listen = self.base.removeprefix("http://")
        self.processes.start(
            "web",
            module("waitress", f"--listen={listen}", "--threads=24", "testproject.wsgi:application"),
            stop_signal=SIGINT,
        )
        quiet = ("--without-gossip", "--without-mingle", "--without-heartbeat")
        pool = f"--concurrency={WORKER_CHILDREN}"
        self.processes.start("worker", _celery("worker", "--loglevel=INFO", "--pool=prefork", pool, *quiet))
        schedule = str(folder / "beat-schedule")
        self.processes.start("beat", _celery("beat", "--loglevel=WARNING", "--pidfile=", "--schedule", schedule))
        self._await_web()

    def start_traffic(self) -> None:
        """Start the sellers. One may just wait for a lock, and for a busy machine, when they are to stop."""
        argv = module("testproject.demo.traffic", self.base, *SELLERS)
        self.processes.start("traffic", argv, env={PASSWORD_VARIABLE: self.password}, patience=40.0)

    def stop_traffic(self) -> Counter[str]:
        """End the traffic, and return the counts of its actions."""
        code = self.processes.stop("traffic")
        log = (self.processes.logs / "traffic.log").read_text()
        if code:
            raise SiteError(f"the traffic ended with {code}:\n{log}")
        return Counter(json.loads(log.splitlines()[-1]))

    def watch(self, seconds: float) -> None:
        """Return after *seconds*. Raises ProcessEndedError if one ends before."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.processes.check()
            time.sleep(0.2)

    def _await_web(self) -> None:
        deadline = time.monotonic() + STARTUP_SECONDS
        while time.monotonic() < deadline:
            self.processes.check()
            try:
                if Browser(self.base).get("/login/").status == 200:
                    return
            except OSError:
                time.sleep(0.1)
        raise SiteError(f"{self.base} did not answer within {STARTUP_SECONDS:.0f} s")


@contextmanager
def databases(
    folder: Path, base: str, uri: str, *, locking: bool, in_documents: bool = False
) -> Iterator[dict[str, str]]:
    """Point the environment at fresh databases, and yield it. Databases in MongoDB are dropped at the end."""
    name = f"mongolock_demo_{secrets.token_hex(3)}"
    os.environ |= {
        "DJANGO_SETTINGS_MODULE": "testproject.settings",
        "MONGODB_URI": uri,
        "MONGODB_NAME": name,
        "SQLITE_PATH": str(folder / "shop.sqlite3"),
        "EXTERNAL_URL": f"{base}/external",
        "SHOP_LOCKING": "on" if locking else "off",
        "SHOP_DOCUMENT_LOCKS": "on" if in_documents else "off",
        "SHOP_STALE_AFTER": "20",
        "SHOP_INCIDENTS": "on" if locking else "off",
        "MONGOLOCK_HISTORY": "10",
        "PYTHONUNBUFFERED": "1",
    }
    django.setup()
    try:
        yield dict(os.environ)
    finally:
        _drop(name, f"{name}_broker")


def fill(password: str) -> None:
    """Migrate both databases; make the superusers and the sellers."""
    from django.conf import settings
    from django.contrib.auth.hashers import make_password
    from django.contrib.auth.models import User

    from testproject.celery import app
    from testproject.shop.models import Seller

    for alias in settings.DATABASES:
        call_command("migrate", database=alias, verbosity=0)
    hashed = make_password(password)
    for name in (ADMIN, EDITOR):
        User.objects.create(username=name, password=hashed, is_staff=True, is_superuser=True)
    for name in SELLERS:
        user = User.objects.create(username=name, password=hashed)
        Seller.objects.create(user_id=str(user.pk), name=name)
    # Kombu creates a collection. If the web server and a worker do so at once, one of them fails.
    with app.connection_for_write() as broker:
        broker.channel()


def free_port(wanted: int | None) -> int:
    """Return *wanted*, by default 8000 or else any port. 0 is any port. Raise SiteError if the port is taken."""
    for port in (8000, 0) if wanted is None else (wanted,):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)) as server:
            bound: int = server.getsockname()[1]
            return bound
    raise SiteError(f"port {wanted} is taken")


def module(name: str, *arguments: str) -> list[str]:
    """Return the command that runs a Python module with this interpreter."""
    return [sys.executable, "-m", name, *arguments]


def _celery(command: str, *arguments: str) -> list[str]:
    return module("celery", "-A", "testproject", command, *arguments)


def _drop(*names: str) -> None:
    from testproject.mongo import database

    for name in names:
        database().client.drop_database(name)
