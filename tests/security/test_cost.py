"""The cost of looking at locks, with any number of waiters and with large documents of another program."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bson import json_util
from django.db import connections
from django.utils import timezone
from pymongo import MongoClient
from pymongo.collection import Collection
from pytest_django import Settings

from django_mongolock.documents import DocumentLock
from django_mongolock.documents.document_lock import undeclare
from tests.security.surfaces import operator, said
from tests.support.lock_documents import Document, Locks, entry, waiter
from tests.support.lock_fixtures import WITH_MONGO
from tests.test_admin import DASHBOARD, LIST

pytestmark = [WITH_MONGO, pytest.mark.long]
GIANT = "x" * 15_000_000


def test_fifty_thousand_waiters(locks: Locks) -> None:
    """The list of waited-for locks and the deadlocks, with 50 locks of 1,000 waiters, take at most a second."""
    for number in range(50):
        waiters = [waiter(10 + place, worker=f"waits {number} {place}") for place in range(1_000)]
        locks.add(f"k{number}", [entry(1, worker=f"holds {number}")], waiters)
    client = operator()
    client.get(LIST)
    looks: list[Callable[[], Any]] = [
        lambda: client.get(f"{LIST}?state=waited"), lambda: said("list_locks", "--deadlocks")
    ]  # fmt: skip
    for look in looks:
        times = []
        for _ in range(3):  # on a busy machine, the best of three
            started = time.monotonic()
            look()
            times.append(time.monotonic() - started)
        assert min(times) < 1


def memory(name: str) -> int:
    """Return the memory of this process in megabytes, as the system reports it."""
    (found,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(found.split()[1]) // 1_000


def assert_cheap(looks: dict[str, Callable[[], Any]]) -> None:
    """Assert that each page and command answers in a few words, and has not read the giants."""
    for name, look in looks.items():
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        answer = look()
        assert memory("VmHWM") - before < 40, name
        assert isinstance(answer, str) or answer.status_code in (200, 302), (name, answer.status_code)
        assert len(answer if isinstance(answer, str) else answer.content) < 1_000_000, name


def commands(*lines: str) -> dict[str, Callable[[], str]]:
    return {line: (lambda line=line: said(*line.split())) for line in lines}  # type: ignore[misc]


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
def test_giants(locks: Locks, settings: Settings) -> None:
    """No page and no command reads sixteen documents of 15 MB of another program, and all of them answer."""
    settings.MONGOLOCK = {**settings.MONGOLOCK, "LEASE": 300, "COMMAND_TIMEOUT": 60}  # on a busy machine
    half = GIANT[:7_000_000]
    kinds: dict[str, dict[str, Any]] = {
        "label": {"holders": [entry(1, label=GIANT, owner="me")]},
        "session": {"holders": [entry(2, session=GIANT, owner="me")]},
        "worker": {"holders": [entry(3, worker=half)], "waiters": [waiter(4, worker=half)]},
        "grant": {"holders": [entry(5, grant=GIANT, owner="me")]},
        "field": {"change": {"clock": GIANT}, "holders": [entry(6)]},
        "no list": {"change": {"holders": GIANT}, "holders": [entry(7)]},
        "last": {"change": {"last_holder": {"label": GIANT}}, "holders": [entry(8, left=-60)]},
        "tombstone": {"change": {"tombstones": [{"grant": GIANT}]}},
    }
    for number in range(2):
        for name, parts in kinds.items():
            locks.add(f"k{number} {name}", **parts)
    client = operator()
    client.get("/admin/")
    form = {"index": 0, "_selected_action": [f"k1 {name}" for name in kinds]}
    pages = ["", "?state=all", "?state=waited", "?state=stale", "?q=k", "status/", "k1 label/change/"]
    addresses = [DASHBOARD, *(f"{LIST}{page}" for page in pages)]
    looks: dict[str, Any] = {address: (lambda address=address: client.get(address)) for address in addresses}
    for action in ("force_release", "ask_to_release", "clear_stale"):
        looks[action] = lambda action=action: client.post(f"{LIST}?state=all", {"action": action, **form})
    assert_cheap(looks | commands(
        "list_locks --all", "list_locks --json --all", "list_locks --deadlocks", "clear_stale_locks --dry-run",
        "release_lock --owner me --no-input",
    ))  # fmt: skip


@pytest.fixture
def ads(mongo: MongoClient[Document]) -> Iterator[tuple[Collection[Document], DocumentLock[Document]]]:
    """A document lock of a collection."""
    collection = mongo[str(connections["mongo"].settings_dict["NAME"])]["giants"]
    lock: DocumentLock[Document] = DocumentLock(
        collection, name="giants", state="state", pending={"busy": "failed"}, final=["done"], stale_after=60
    )
    yield collection, lock
    undeclare(lock)
    collection.drop()


@linux
def test_giants_with_a_lock_in_them(locks: Locks, ads: tuple[Collection[Document], DocumentLock[Document]]) -> None:
    """Sixteen documents of 15 MB, in every field that the lock reads (an `_id` has 7), are not read. Each page and
    command answers. A document that cannot be judged is shown as damaged, and stays as it is."""
    collection, lock = ads
    fields = lock.rules.fields
    holder, at, version, token = fields.holder, fields.time, fields.version, fields.token
    old = {"state": "busy", holder: "h", at: timezone.now().replace(year=2020), version: 1}
    kinds: list[Document] = [
        {holder: GIANT}, {at: GIANT}, {version: GIANT}, {token: GIANT}, {token: [GIANT]}, {"other": GIANT},
        {"_id": GIANT[:7_000_000]}, {holder: {"a": GIANT}},
    ]  # fmt: skip
    for number in range(2):
        for kind, more in enumerate(kinds):
            collection.insert_one({**old, **more, "_id": f"{number}{more.get('_id', f'-{kind}')}"})
    collection.insert_one({"_id": "small", **old})
    client = operator()
    client.get("/admin/")
    shown = [json.dumps(["giants", json_util.dumps(id_), "h"]) for id_ in ("0-3", "0-5", "small")]
    documents = f"{LIST}others/"
    looks: dict[str, Any] = {
        path: (lambda path=path: client.get(path))
        for path in (documents, f"{documents}?kind=giants", f"{documents}?kind=giants&state=damaged",
                     f"{documents}?owner=h", DASHBOARD, f"{LIST}status/")
    }  # fmt: skip
    looks["json"] = lambda: client.get(documents, headers={"Accept": "application/json"})
    looks["owner"] = lambda: client.post(documents, {"force": "owner", "owner": "h"})
    looks["ask"] = lambda: client.post(documents, {"force": "x", "lock": shown})
    looks["force"] = lambda: client.post(f"{LIST}force-release/", {"lock": shown[:1], "reason": "x"})
    looks |= commands(
        "list_locks", "list_locks --all --json", "list_locks --all --limit 0 --wide", "clear_stale_locks --dry-run",
        "release_lock --kind giants 0-5 --no-input", "clear_stale_locks --no-input",
    )  # fmt: skip
    looks["clear"] = lambda: client.post(documents, {"kind": "giants"})
    assert_cheap(looks)
    assert collection.count_documents({"_id": "small", "state": "failed"}) == 1
    assert collection.count_documents({"state": "busy", "_id": {"$regex": "x{50}"}}) == 2
