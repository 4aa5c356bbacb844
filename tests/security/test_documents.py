"""Documents with a lock, into which another program wrote: what they cost, and what they show."""

import io
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bson import json_util
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.db import connections
from django.test import Client
from django.utils import timezone
from pymongo import MongoClient
from pymongo.collection import Collection

from django_mongolock.documents import DocumentLock
from django_mongolock.documents.document_lock import undeclare
from testproject.shop.models import Ad
from tests.security.surfaces import LIST, operator
from tests.support.lock_documents import Document, Locks
from tests.support.lock_fixtures import WITH_MONGO

pytestmark = WITH_MONGO
EVIL = "a\u202eb\x1b[2J<i x=1>"
GIANT = "x" * 15_000_000


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


def peak(name: str) -> int:
    """What the system says of the memory of this process, in megabytes."""
    (found,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(found.split()[1]) // 1_000


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_giants(locks: Locks, ads: tuple[Collection[Document], DocumentLock[Document]]) -> None:
    """Sixteen documents of 15 MB, in every field that the lock reads (an `_id` has 7): each page and command answers,
    and none reads them. What cannot be judged is shown as damaged, and is left as it is."""
    collection, lock = ads
    at = timezone.now()
    old = {"state": "busy", "lockedBy": "h", "lockTimestamp": at.replace(year=2020), "documentVersion": 1}
    kinds: list[Document] = [
        {"lockedBy": GIANT}, {"lockTimestamp": GIANT}, {"documentVersion": GIANT}, {"lockedByToken": GIANT},
        {"lockedByToken": [GIANT]}, {"other": GIANT}, {"_id": GIANT}, {"lockedBy": {"a": GIANT}},
    ]  # fmt: skip
    fields = lock.rules.fields
    names = {"lockedBy": fields.holder, "lockTimestamp": fields.time, "documentVersion": fields.version,
             "lockedByToken": fields.token}  # fmt: skip
    for number in range(2):
        for kind, more in enumerate(kinds):
            document = {names.get(name, name): value for name, value in {**old, **more}.items()}
            document["_id"] = f"{number}{GIANT[:7_000_000]}" if "_id" in more else f"{number}-{kind}"
            collection.insert_one(document)
    collection.insert_one({"_id": "small", **{names.get(name, name): value for name, value in old.items()}})
    client = operator()
    client.get("/admin/")
    shown = [json.dumps(["giants", json_util.dumps(id_), "h"]) for id_ in ("0-3", "0-5", "small")]
    documents = f"{LIST}documents/"
    looks: dict[str, Any] = {
        path: (lambda path=path: client.get(path))
        for path in (documents, f"{documents}?lock=giants", f"{documents}?lock=giants&state=damaged",
                     f"{documents}?owner=h", f"{LIST}dashboard/", f"{LIST}status/")
    }  # fmt: skip
    looks["json"] = lambda: client.get(documents, headers={"Accept": "application/json"})
    looks["owner"] = lambda: client.post(documents, {"force": "owner", "owner": "h"})
    looks["ask"] = lambda: client.post(documents, {"force": "x", "document": shown})
    looks["force"] = lambda: client.post(f"{documents}force-release/", {"document": shown[:1], "reason": "x"})
    for words in (
        "list_locks", "list_locks --all --json", "list_locks --all --limit 0 --wide",
        "clear_stale_locks --dry-run", "release_lock --document-lock giants 0-5 --no-input",
        "clear_stale_locks --no-input",
    ):  # fmt: skip
        looks[words] = lambda words=words: said(words.split())
    looks["clear"] = lambda: client.post(documents, {"lock": "giants"})
    costs = {}
    for name, look in looks.items():
        Path("/proc/self/clear_refs").write_text("5")
        before, started = peak("VmRSS"), time.monotonic()
        answer = look()
        costs[name] = (peak("VmHWM") - before, round(time.monotonic() - started, 2))
        assert isinstance(answer, str) or answer.status_code in (200, 302), (name, answer.status_code)
        text = answer if isinstance(answer, str) else answer.content.decode()
        assert len(text) < 1_000_000, name
    print(costs)  # noqa: T201 - the figures, with -s
    assert max(cost for cost, _ in costs.values()) < 40, costs
    assert collection.count_documents({"_id": "small", "state": "failed"}) == 1
    assert collection.count_documents({"state": "busy", "_id": {"$regex": "x{50}"}}) == 2


def said(command: list[str]) -> str:
    """What a command says, also if it is an error."""
    out = io.StringIO()
    try:
        call_command(*command, stdout=out, stderr=out)
    except CommandError as error:
        out.write(str(error))
    return out.getvalue()


@pytest.mark.parametrize("action", ["clear_stale_documents", "force_release_documents"])
def test_what_the_log_of_the_admin_shows(locks: Locks, action: str) -> None:
    """The name of a holder, which any program may have written, goes through `printable` into the history of an object
    and the list of recent actions, which are Django's own pages."""
    ad = Ad.objects.create(
        user_id="u", title="bike", price=5, export_status="exporting", locked_by=EVIL,
        lock_timestamp=timezone.now().replace(year=2020),
    )  # fmt: skip
    client = Client()
    client.force_login(User.objects.create(username="root", is_superuser=True, is_staff=True))
    page = client.post("/admin/shop/ad/", {"action": action, "_selected_action": str(ad.pk), "index": "0"}, follow=True)
    if action == "force_release_documents":
        assert "\u202e" not in page.content.decode()
        shown = json.dumps(["ad exports", json_util.dumps(ad.pk), EVIL])
        client.post(f"{LIST}documents/force-release/", {"document": shown, "reason": "why \u202e"})
    entry = LogEntry.objects.get(object_id=str(ad.pk))
    assert "a\\u202eb\\u001b[2J" in entry.change_message
    assert entry.change_message.isprintable()
    assert "<i x" not in client.get(f"/admin/shop/ad/{ad.pk}/history/").content.decode()
