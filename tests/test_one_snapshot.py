"""One fact has one source. All lists, pages, commands and programs report the same about a lock."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from bson.int64 import Int64
from django.test import Client

from django_mongolock.context import CLAIMED
from django_mongolock.inspection.display import duration
from tests.editing.staff import text_of
from tests.support.lock_documents import Locks, entry, now, waiter
from tests.support.lock_fixtures import WITH_MONGO
from tests.support.programs import said_by
from tests.test_admin import DASHBOARD, LIST, browser, page_of

pytestmark = WITH_MONGO
#: Three hours and half a minute. The minutes do not change while a test runs.
LONG = 3 * 3_600 + 30
#: The seconds left of a lease of 33, right after a renewal.
FRESH = 32.0
Parties = list[dict[str, Any]]


def _held(*, left: float = FRESH, **facts: Any) -> Parties:
    return [entry(1, left=left, held_for=LONG, label="import", **facts)]


def _of_many() -> Parties:
    """Return readers that are silent, except the last one."""
    lefts = [8.0] * 30 + [FRESH]
    return [entry(number, left=left, held_for=LONG, mode="shared") for number, left in enumerate(lefts)]


def _of_two() -> Parties:
    """Return two readers. The first one has released the lock and kept it."""
    return [entry(1, left=FRESH, held_for=2 * LONG, released=now(), mode="shared"), *_held(mode="shared")]


#: Each state of a lock, with its holders, its waiters, and the longest hold in hours. The last three are the state, the
#: length of the hold, and the number of waiters on the surfaces.
STATES: dict[str, tuple[Callable[[], Parties], Callable[[], Parties], float, str, str, int]] = {
    "works": (_held, list, 4, "works", "3 h 0 min", 0),
    "waited for": (_held, lambda: [waiter(2, behind=2), waiter(3)], 4, "works", "3 h 0 min", 4),
    "slow": (_held, list, 2, "slow", "3 h 0 min", 0),
    "hangs": (_held, lambda: [waiter(2)], 1, "hangs", "3 h 0 min", 1),
    "asked": (
        lambda: _held(release_requested_by="anna", release_requested_at=now()), list, 4, "asked", "3 h 0 min", 0,
    ),
    "silent": (lambda: _held(left=8.0), list, 4, "silent", "3 h 0 min", 0),
    "claimed": (lambda: _held(left=8.0, host=CLAIMED), list, 4, "works", "3 h 0 min", 0),
    "stale": (lambda: _held(left=-20 * 60), list, 4, "stale", "2 h 40 min", 0),
    "stale, waited for": (lambda: _held(left=-20 * 60), lambda: [waiter(2)], 4, "stale", "2 h 40 min", 1),
    "kept": (lambda: _held(released=now()), list, 4, "kept", "", 0),
    "many holders": (_of_many, list, 4, "works", "3 h 0 min", 0),
    "one of two has released": (_of_two, list, 4, "works", "3 h 0 min", 0),
    "free": (list, list, 4, "free", "", 0),
}  # fmt: skip
#: A surface's statement about the lock, with its state, the time held, and the number of waiters.
Said = tuple[str, str, int]


def _in_list(client: Client, key: str) -> Said:
    row = re.search(r"<tr>.*?</tr>", client.get(f"{LIST}?state=all").content.decode().split("<tbody>")[1], re.DOTALL)
    assert row is not None
    cells = dict(re.findall(r'<td class="(?:nowrap )?field-(\w+)">(.*?)</td>', row[0], re.DOTALL))
    word = re.search(r'mongolock-state mongolock-(\w+)"', cells["state"])
    held = re.search(r"<time[^>]*>([^<]*)</time>", cells["since"])
    assert word is not None
    return word[1], held[1] if held else "", int(re.sub(r"<[^>]*>[^<]*</span>", "", cells["waiting"]))


def _on_page(client: Client, key: str) -> Said:
    text = text_of(client.get(page_of(key)))
    word = re.search(r"History in the admin [●◇◐○▲◑?◌] (\w+) ", text)
    held = re.search(r"eld by \(\d+\), for (.*? .*?) holder", text)
    waits = re.search(r"Waiting, first come, first served \((\d+)\)", text)
    assert word is not None, text
    return word[1], held[1] if held else "", int(waits[1]) if waits else 0


def _on_dashboard(client: Client, key: str) -> Said:
    page = client.get(DASHBOARD).content.decode()
    row = re.search(r'<tr data-key="[^"]*" class="mongolock-(\w+)">(.*?)</tr>', page, re.DOTALL)
    if row is None:
        return "free", "", 0
    held = re.search(r"<time[^>]*>([^<]*)</time>", row[2].split("mongolock-nowrap")[1].split("</td>")[0])
    waits = re.search(r'data-label="waiting".*?>(\d+) waiting', row[2], re.DOTALL)
    return row[1], held[1] if held else "", int(waits[1]) if waits else 0


def _in_table(client: Client, key: str) -> Said:
    lines = said_by("list_locks", "--all").splitlines()
    cells = dict(zip(re.split(r" {2,}", lines[0]), re.split(r" {2,}", lines[1]), strict=True))
    return cells["STATE"], cells["HELD FOR"].replace("-", ""), int(cells["WAITING"])


def _of_json(row: dict[str, Any]) -> Said:
    held = row["held_seconds"]
    return row["verdict"] or row["state"], "" if held is None else duration(held), row["waiting"]


def _in_json(client: Client, key: str) -> Said:
    return _of_json(json.loads(said_by("list_locks", "--all", "--json"))["kinds"][0]["locks"][0])


def _in_status(client: Client, key: str) -> Said:
    found = client.get(f"{LIST}status/").json()
    rows = [*found["held"], *found["waited_for"], *found["stale"]]
    for row in rows:
        assert _of_json(row) == _of_json(rows[0])
    return _of_json(rows[0]) if rows else ("free", "", 0)


SURFACES: dict[str, Callable[[Client, str], Said]] = {
    "list": _in_list,
    "page": _on_page,
    "dashboard": _on_dashboard,
    "list_locks": _in_table,
    "list_locks --json": _in_json,
    "status": _in_status,
}


@pytest.mark.parametrize("name", STATES)
def test_all_say_the_same(locks: Locks, name: str) -> None:
    """F222: In each state, all surfaces name one state, one length of the hold, one number of waiters."""
    holders, waiters, longest, word, held, waiting = STATES[name]
    locks.add("order:5", holders(), waiters(), {"longest_hold_ms": Int64(longest * 3_600_000)})
    client = browser("view_lock", "view_lock_status")
    said = {surface: say(client, "order:5") for surface, say in SURFACES.items()}
    if name == "kept":  # neither the dashboard nor the status lists a lock that nobody holds or waits for
        said = {surface: said[surface] for surface in said if surface not in ("dashboard", "status")}
    assert said == dict.fromkeys(said, (word, held, waiting))
