"""The checks of ``--check``, while the traffic runs and after it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from django_mongolock import mongo_lock
from django_mongolock.models import Lock
from testproject.celery import app
from testproject.demo import site
from testproject.demo.browser import Browser, links
from testproject.demo.site import Site
from testproject.shop import audit
from testproject.shop.models import Ad, Order, ad_exports
from testproject.shop.tasks import hold

LEASE = 5.0
# The server grants the lock one margin after the lease, and a loaded machine is slow.
GRACE = 3.0
DRAIN_SECONDS = 60.0
# The longest run without locks, in seconds, until something has gone wrong.
CHANCE_SECONDS = 180.0
QUIET_SECONDS = 1.0
LOCKS = "/admin/django_mongolock/lock/"


@dataclass(frozen=True)
class Finding:
    """One line of the report; *passed* is None if there is nothing to judge."""

    name: str
    value: str
    passed: bool | None = None


def abandoned_locks() -> Iterator[Finding]:
    """Kill a program and a worker that hold a lock each. The command clears one, and the other becomes free in time."""
    taken, swept = "demo:abandoned", "demo:swept"
    kill_program(swept)
    killed_at = _kill_worker(taken)  # killed last, because its lease ends last
    with mongo_lock(taken, wait=LEASE + GRACE, label="after the killed one"):
        waited = time.monotonic() - killed_at
    yield Finding("lock of a killed worker free after", f"{waited:.1f} s", waited <= LEASE + GRACE)
    yield Finding("that its lock is stale, the ORM says", swept, _is_stale(swept))
    reported = _clear("--dry-run")
    yield Finding("… clear_stale_locks --dry-run reports", swept, swept in reported and _is_stale(swept))
    yield Finding("… clear_stale_locks clears", swept, swept in _clear("--no-input") and not _is_stale(swept))


def traffic(did: Counter[str]) -> Iterator[Finding]:
    """Report the actions of the sellers and buyers, and errors of the site."""
    yield Finding("requests", str(did["requests"]))
    yield Finding("… answered 423, locked", str(did["met a lock"]))
    yield Finding("… answered 5xx", str(did["errors"]), did["errors"] == 0)


def await_wrong_export(running: Site) -> None:
    """Continue the traffic until a flow has overtaken another one. This is rare on a busy machine."""
    end = time.monotonic() + CHANCE_SECONDS
    while not audit.judge().wrong_exports and time.monotonic() < end:
        running.watch(1.0)


def drain(running: Site, *, locking: bool) -> Finding:
    """Wait until no task waits and every change has reached the external service.

    Without locking, not every change reaches it, because flows also overtake each other when they store what was sent.
    """
    start = time.monotonic()
    quiet_since: float | None = None
    while (now := time.monotonic()) < start + DRAIN_SECONDS:
        running.processes.check()
        settled = not _tasks_waiting() and not (locking and Ad.objects.unsettled().exists())
        quiet_since = (quiet_since or now) if settled else None
        if quiet_since and now - quiet_since > QUIET_SECONDS:
            return Finding("settled after the traffic in", f"{quiet_since - start:.1f} s")
        time.sleep(0.1)
    return Finding("changes that were never exported", str(Ad.objects.unsettled().count()), passed=False)


def tasks(running: Site) -> Finding:
    """Count the tasks that ended in an error, by the workers' own log."""
    failed = (running.processes.logs / "worker.log").read_text(errors="replace").count("raised unexpected")
    return Finding("tasks that failed", str(failed), failed == 0)


def verdict(*, locking: bool) -> Iterator[Finding]:
    """Report the judgement. Without locking, there must be wrong re-exports."""
    found = audit.judge()
    yield Finding("calls to the external service", str(found.calls))
    yield Finding("wrong re-exports", str(len(found.wrong_exports)), bool(found.wrong_exports) != locking)
    for name in ("wrong_withdrawals", "overlaps", "wrong_finals", "double_charges"):
        count = len(getattr(found, name))
        yield Finding(name.replace("_", " "), str(count), count == 0 if locking else None)


def left_in_documents() -> Finding:
    """Count the ads that still have a holder, or a pending state."""
    pending = Ad.objects.filter(export_status__in=ad_exports.rules.pending)
    count = pending.count() + Ad.objects.exclude(locked_by=None).count()
    return Finding("ads that are still pending or held", str(count), count == 0)


def pages(running: Site) -> Iterator[Finding]:
    """Look at the pages as the superuser does, with a lock to look at."""
    browser = Browser(running.base)
    browser.login("/admin/login/", site.ADMIN, running.password)
    with mongo_lock("demo:look-at-me", label="held for the check"):
        search = f"{LOCKS}?q=demo:look"
        yield _page(browser, "lock list", search, "demo:look-at-me")
        found = [target.split("?")[0] for target in links(browser.get(search).text, f"^{LOCKS}.*look.*/change/")]
        yield _page(browser, "page of one lock", [*found, f"{LOCKS}no-link/"][0], "demo:look-at-me")
    yield _page(browser, "admin of the ads", "/admin/shop/ad/", "version")
    order = Order.objects.latest("pk")
    address = f"/admin/shop/order/{order.pk}/change/"
    yield _page(browser, "page with an edit lock", address, "You are editing this.")
    other = Browser(running.base)
    other.login("/admin/login/", site.EDITOR, running.password)
    yield _page(other, "… for another user", address, f"This is being edited by {site.ADMIN}.")
    yield _page(browser, "start page", "/", "Wrong re-exports")
    yield _page(browser, "style sheet of the admin", "/static/admin/css/base.css", "body")


def _page(browser: Browser, name: str, path: str, text: str) -> Finding:
    answer = browser.get(path)
    passed = answer.status == 200 and text in answer.text and answer.url.endswith(path)
    return Finding(name, str(answer.status), passed)


def _kill_worker(key: str) -> float:
    """Let a Celery worker acquire the lock, kill the process that holds it, and return the time of that."""
    hold.delay(LEASE, [key], DRAIN_SECONDS)
    os.kill(_holder(key), signal.SIGKILL)
    return time.monotonic()


def kill_program(key: str) -> None:
    """Have another program hold the lock, and kill it. A Celery worker would release the locks of a killed process of
    its pool."""
    code = f"import django; django.setup(); from testproject.shop.tasks import hold; hold({LEASE}, [{key!r}], 60)"
    with subprocess.Popen([sys.executable, "-c", code]) as program:
        try:
            _holder(key)
        finally:
            program.kill()


def _holder(key: str) -> int:
    """Wait until the lock is held, and return the pid of its holder."""
    deadline = time.monotonic() + DRAIN_SECONDS
    while (lock := Lock.objects.held().filter(pk=key).first()) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing acquired {key}")
        time.sleep(0.05)
    (holder,) = lock.holders
    return int(holder.pid)


def _is_stale(key: str) -> bool:
    stale: bool = Lock.objects.stale().filter(pk=key).exists()
    return stale


def _clear(*arguments: str) -> set[str]:
    """Run the command as a person does, and return the keys that it reports."""
    argv = site.module("testproject.manage", "clear_stale_locks", "--json", *arguments)
    output = subprocess.run(argv, check=False, stdout=subprocess.PIPE).stdout
    return {lock["key"] for kind in json.loads(output)["kinds"] for lock in kind["stale"]}


def _tasks_waiting() -> int:
    with app.connection_for_read() as connection:
        channel: Any = connection.default_channel
        count: int = channel.queue_declare(app.conf.task_default_queue, passive=True).message_count
        return count
