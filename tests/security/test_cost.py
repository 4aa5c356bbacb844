"""What looking at locks costs, however many wait for them."""

import io
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from pytest_django import Settings

from tests.security.surfaces import LIST, operator
from tests.support.lock_documents import Locks, entry, waiter
from tests.support.lock_fixtures import WITH_MONGO


@pytest.mark.long
@WITH_MONGO
def test_fifty_thousand_waiters(locks: Locks) -> None:
    """The list of what is waited for, and the deadlocks, with 50 locks of 1,000 waiters: within a second."""
    for number in range(50):
        waiters = [waiter(10 + place, worker=f"waits {number} {place}") for place in range(1_000)]
        locks.add(f"k{number}", [entry(1, worker=f"holds {number}")], waiters)
    client = operator()
    client.get(LIST)

    def page() -> Any:
        assert client.get(f"{LIST}?state=waited").status_code == 200

    def lines() -> Any:
        call_command("list_locks", "--deadlocks", stdout=io.StringIO())

    for look in (page, lines):
        times = []
        for _ in range(3):  # on a busy machine, the best of three
            started = time.monotonic()
            look()
            times.append(time.monotonic() - started)
        assert min(times) < 1


def _memory(name: str) -> int:
    """What the system says of the memory of this process, in megabytes."""
    (found,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(found.split()[1]) // 1_000


@WITH_MONGO
@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_giants(locks: Locks, settings: Settings) -> None:
    """Sixteen documents of 15 MB of another program: neither a page nor a command reads them, and all answer."""
    settings.MONGOLOCK = {**settings.MONGOLOCK, "LEASE": 300, "COMMAND_TIMEOUT": 60}  # on a busy machine
    giant = "x" * 15_000_000
    kinds: dict[str, dict[str, Any]] = {
        "label": {"holders": [entry(1, label=giant, owner="me")]},
        "session": {"holders": [entry(2, session=giant, owner="me")]},
        "worker": {"holders": [entry(3, worker=giant[:7_000_000])], "waiters": [waiter(4, worker=giant[:7_000_000])]},
        "grant": {"holders": [entry(5, grant=giant, owner="me")]},
        "field": {"change": {"clock": giant}, "holders": [entry(6)]},
        "no list": {"change": {"holders": giant}, "holders": [entry(7)]},
        "last": {"change": {"last_holder": {"label": giant}}, "holders": [entry(8, left=-60)]},
        "tombstone": {"change": {"tombstones": [{"grant": giant}]}},
    }
    for number in range(2):
        for name, parts in kinds.items():
            locks.add(f"k{number} {name}", **parts)
    client = operator()
    client.get("/admin/")
    form = {"index": 0, "_selected_action": [f"k1 {name}" for name in kinds]}
    pages = ["", "?state=all", "?state=waited", "?state=stale", "?q=k", "dashboard/", "status/", "k1 label/change/"]
    commands = [
        ["list_locks", "--all"], ["list_locks", "--json", "--all"], ["list_locks", "--deadlocks"],
        ["clear_stale_locks", "--dry-run"], ["release_lock", "--owner", "me", "--no-input"],
    ]  # fmt: skip
    looks: dict[str, Any] = {page: (lambda page=page: client.get(f"{LIST}{page}").status_code) for page in pages}
    for action in ("force_release", "ask_to_release", "clear_stale"):
        looks[action] = lambda action=action: client.post(f"{LIST}?state=all", {"action": action, **form}).status_code
    looks |= {" ".join(command): (lambda command=command: _said(command)) for command in commands}
    for name, look in looks.items():
        Path("/proc/self/clear_refs").write_text("5")
        before = _memory("VmRSS")
        assert look() in (200, 302, True), name
        assert _memory("VmHWM") - before < 40, name


def _said(command: list[str]) -> bool:
    try:
        call_command(*command, stdout=io.StringIO(), stderr=io.StringIO())
    except CommandError as error:
        return "holds nothing" in str(error)
    return True
