"""The Lock model shows the state of the server. Nothing is written through the ORM, and no document breaks the
model."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from bson.datetime_ms import DatetimeMS
from bson.int64 import Int64
from bson.max_key import MaxKey
from bson.timestamp import Timestamp
from django.core.management import call_command
from django.db import NotSupportedError, connections, models
from django.db.models.functions import Length
from django.utils import timezone
from pytest_django import Settings

from django_mongolock import LockLost, mongo_lock
from django_mongolock.engine.rule.document import HOLDER_FIELDS, find_damage
from django_mongolock.exceptions import LockDocumentDamaged
from django_mongolock.history.models import LockEvent
from django_mongolock.inspection.snapshot import ShownState
from django_mongolock.models import Entry, Lock, LockQuerySet, Party
from testproject.shop.models import Ad
from tests.support.lock_documents import TOKEN, Document, Locks, entry, now, waiter
from tests.support.lock_fixtures import WITH_MONGO, Commands
from tests.test_admin import DASHBOARD, LIST, browser
from tests.test_incidents import EVENTS

pytestmark = WITH_MONGO


@pytest.fixture
def three(locks: Locks) -> Locks:
    """Return one lock that is held and waited for, one that is stale and was waited for, and one that is free."""
    locks.add("held", [entry(1, owner="job-1", user="anna", label="nightly")], [waiter(2), waiter(3)])
    locks.add("stale", [entry(4, left=-60)], [waiter(5, left=-30)])
    locks.add("free")
    return locks


def keys(queryset: Any) -> list[str]:
    return sorted(queryset.values_list("pk", flat=True))


class TestQueries:
    """held(), stale() and waited_for() sort the locks by the server's clock."""

    def test_sorted(self, three: Locks) -> None:
        """Each lock is in one state. Waiters count only as long as their places in the queue live."""
        assert keys(Lock.objects.held()) == ["held"]
        assert keys(Lock.objects.stale()) == ["stale"]
        assert keys(Lock.objects.free()) == ["free"]
        assert keys(Lock.objects.waited_for()) == ["held"]

    def test_kept(self, locks: Locks) -> None:
        """A lock that is only kept for a minimum hold is neither held nor stale, because nobody is at work and nobody
        died. After the hold, the lock is free."""
        locks.add("kept", [entry(1, released=now(), owner="me")])
        locks.add("over", [entry(2, left=-5, released=now(), owner="me")])
        locks.add("both", [entry(3, mode="shared", released=now(), owner="me"), entry(4, mode="shared")])
        named = {name: keys(getattr(Lock.objects, name)()) for name in ("held", "kept", "stale", "free")}
        assert named == {"held": ["both"], "kept": ["kept"], "stale": [], "free": ["over"]}
        assert keys(Lock.objects.owned_by("me")) == ["both", "kept"]

    def test_not_by_our_clock(self, three: Locks, monkeypatch: pytest.MonkeyPatch) -> None:
        """A web server whose clock is a day ahead sees the same."""
        monkeypatch.setattr(timezone, "now", lambda: now() + timedelta(days=1))
        assert keys(Lock.objects.held()) == ["held"]

    def test_like_any_model(self, three: Locks) -> None:
        """Filters reach into the holders. Order, values, counts and lookups by key work."""
        assert keys(Lock.objects.filter(holders__host="web-1")) == ["held", "stale"]
        assert keys(Lock.objects.filter(holders__owner="job-1")) == ["held"]
        assert keys(Lock.objects.filter(waiters__pid=4_003)) == ["held"]
        assert keys(Lock.objects.exclude(holders__user="anna").filter(acquisitions__gte=41)) == ["free", "stale"]
        assert Lock.objects.order_by("-contended", "key").values("key", "contended")[0] == {
            "key": "free",
            "contended": 7,
        }
        assert Lock.objects.held().values("holders")[0]["holders"][0].user == "anna"
        assert Lock.objects.in_bulk(["held"])["held"].holders[0].token == TOKEN + 1
        assert Lock.objects.held().count() == 1
        assert Lock.objects.filter(expires_at__gt=now()).count() == 1
        assert str(Lock.objects.get(pk="held")) == "held"

    @pytest.mark.parametrize(
        "narrow",
        [
            lambda found: found[:1],
            lambda found: found[1:],
            lambda found: found.union(Lock.objects.free()),
            lambda found: found.filter(pk__in=Lock.objects.free().values("pk")),
            lambda found: found.order_by("holders__owner"),
            lambda found: found.annotate(length=Length("key")).order_by("length"),
            lambda found: found.values("contended").annotate(models.Count("pk")),
        ],
    )
    def test_what_no_snapshot_has(self, three: Locks, narrow: Callable[[LockQuerySet], Any]) -> None:
        """A query that is more than a condition and an order is refused. No part of it is ignored."""
        found = narrow(Lock.objects.held())
        list(found)
        with pytest.raises(NotSupportedError, match="slice"):
            list(found.snapshots())
        with pytest.raises(NotSupportedError, match="slice"):
            found.count_up_to(10, 5.0)

    def test_entries_in_words(self, three: Locks) -> None:
        """Holders and waiters say who they are, and not by which grant."""
        lock = Lock.objects.get(pk="held")
        assert [type(item) for item in (*lock.holders, *lock.waiters)] == [Party] * 3
        assert "secret" not in f"{lock.holders} {lock.waiters} {lock!r}"

    def test_moments(self, locks: Locks) -> None:
        """Each moment of a holder has its time zone."""
        asked = entry(release_requested_by="ben", release_requested_at=now())
        locks.add("k", [asked])
        (holder,) = Lock.objects.get().holders
        assert (holder.release_requested_at, holder.until) == (asked["release_requested_at"], asked["until"])


class TestReadOnly:
    """Locks change only by the engine's rule. Every other change is an error with the cure."""

    @pytest.mark.parametrize(
        "write",
        [
            lambda: Lock.objects.all().delete(),
            lambda: Lock.objects.all().update(token=1),
            lambda: Lock.objects.create(key="x"),
            lambda: Lock.objects.bulk_create([Lock(key="x")]),
            lambda: Lock.objects.bulk_update([Lock(key="held")], ["token"]),
            lambda: Lock.objects.get_or_create(key="x"),
            lambda: Lock.objects.update_or_create(key="x"),
            lambda: Lock.objects.get(pk="held").save(),
            lambda: Lock.objects.get(pk="held").delete(),
            lambda: Lock(key="held").save_base(),
            lambda: models.Model.save_base(Lock(key="held"), raw=True, using="mongo"),  # as loaddata does
            lambda: models.Model.save_base(Lock(key="x"), raw=True, using="mongo", force_insert=True),
            lambda: Lock._base_manager.all().update(token=1),
            lambda: Lock._base_manager.filter(key="held").delete(),
            lambda: Lock._base_manager.all()._raw_delete("mongo"),
            lambda: LockEvent(key="k").save(),
            lambda: LockEvent(key="k").delete(),
            lambda: LockEvent.objects.all().delete(),
            lambda: LockEvent.objects.update(key="x"),
            lambda: LockEvent.objects.bulk_create([LockEvent(key="k")]),
        ],
    )
    def test_refused(self, three: Locks, write: Callable[[], object]) -> None:
        """F93: Each way to write locks or events through the ORM is refused, and changes nothing."""
        before = list(three.collection.find().sort("_id", 1))
        with pytest.raises(NotSupportedError, match=r"mongo_lock|force_release|HISTORY|push out"):
            write()
        assert list(three.collection.find().sort("_id", 1)) == before

    def test_every_write_of_a_queryset(self) -> None:
        """No method of Django's that writes was forgotten."""
        writing = {name for name in dir(LockQuerySet) if getattr(getattr(LockQuerySet, name), "alters_data", False)}
        assert writing == {
            "update", "delete", "bulk_create", "bulk_update", "create", "acreate", "get_or_create", "aget_or_create",
            "update_or_create", "aupdate_or_create", "_update", "_raw_delete", "_insert", "abulk_create",
            "abulk_update", "aupdate", "adelete",
        }  # fmt: skip


class TestForceRelease:
    """A forced release takes a lock from its holder, and the holder learns of it. The next holder is safe."""

    def test_holder_learns(self, locks: Locks) -> None:
        """The holder's next renewal finds the loss, and the next waiter is let in."""
        lost = threading.Event()
        with ThreadPoolExecutor(1) as elsewhere:
            lock = elsewhere.submit(mongo_lock("k", lease=0.9, on_lost=lambda _lock: lost.set()).acquire).result()
            assert Lock.objects.get(pk="k").force_release()
            with mongo_lock("k", wait=0) as other:
                assert other.fencing_token > lock.fencing_token
                assert lost.wait(5)
            with pytest.raises(LockLost):
                lock.ensure_held()

    def test_not_the_next_holder(self, three: Locks) -> None:
        """A grant that was made after the object was read is left alone."""
        read = Lock.objects.get(pk="held")
        three.collection.replace_one({"_id": "held"}, {**three.read("held"), "holders": [entry(9)]})
        assert read.force_release() is False
        assert three.read("held")["holders"][0]["grant"] == "secret-grant.9"

    def test_many(self, three: Locks, caplog: pytest.LogCaptureFixture) -> None:
        """A queryset counts the asked holders and the taken locks. A damaged document does not stop it."""
        three.add("damaged", [entry(7)], change={"token": 1.5})
        three.held("z")
        with caplog.at_level(logging.WARNING, "django_mongolock"):
            assert Lock.objects.held().ask_to_release("anna") == 2
            assert Lock.objects.order_by("key")[1:].ask_to_release("anna") == 3  # the stale one has a holder, too
            assert Lock.objects.held().force_release() == 2
        assert "damaged" in caplog.text
        assert not Lock.objects.held().filter(holders__token=TOKEN + 1).exclude(key="damaged").exists()

    def test_damaged(self, locks: Locks) -> None:
        """A damaged document stays as it is, and the error says why."""
        locks.add("damaged", [entry(7)], change={"token": 1.5})
        before = locks.read("damaged")
        with pytest.raises(LockDocumentDamaged, match="token"):
            Lock.objects.get(pk="damaged").force_release()
        assert locks.read("damaged") == before


STRANGE = [
    1.5, "text", True, None, {"a": 1}, [1, "x"], b"bytes", now(), Timestamp(1, 1), MaxKey(), Int64(2**63 - 1),
]  # fmt: skip
FIELDS = [str(field.column) for field in Lock._meta.fields if not field.primary_key]
ENTRY_FIELDS = sorted(
    {"released", *HOLDER_FIELDS, *(str(field.column) for field in Entry._meta.fields if not field.primary_key)}
)


def is_damaged(document: Document) -> bool:
    """Return whether the engine calls the document damaged. A wrong type of date cannot be found by the index, and
    counts as well."""
    end = document["expires_at"]
    return find_damage(document) is not None or (end is not None and not isinstance(end, datetime))


class TestDamage:
    """Damage in one document does not hide the other documents."""

    @pytest.mark.parametrize("value", STRANGE, ids=lambda value: type(value).__name__)
    def test_any_type_in_any_field(self, locks: Locks, value: Any) -> None:
        """Every field of a lock and of a holder, with every type, breaks no row and no page. The snapshot calls the
        lock damaged."""
        locks.add("good", [entry(held_for=9_000)], [waiter(held_for=9_000)])
        for column in FIELDS:
            locks.add(f"field:{column}", [entry()], [waiter()], change={column: value})
        for column in ENTRY_FIELDS:
            locks.add(
                f"entry:{column}",
                [{**entry(), column: value}],
                [{**waiter(), column: value}],
                change={"expires_at": now() + timedelta(hours=1)},
            )
        found = {lock.key: lock for lock in Lock.objects.all()}
        assert len(found) == 1 + len(FIELDS) + len(ENTRY_FIELDS)
        assert "good" in keys(Lock.objects.held())
        for name in ("held", "stale", "free", "waited_for"):
            list(getattr(Lock.objects, name)())
            list(getattr(Lock.objects, name)().snapshots())
        damaged = {lock.key for lock in Lock.objects.snapshots() if lock.state is ShownState.DAMAGED}
        assert damaged == {found["_id"] for found in locks.collection.find() if is_damaged(found)}
        assert "good" not in damaged
        client = browser("view_lock", "view_lock_status")
        for page in (f"{LIST}?state=all", DASHBOARD, f"{LIST}status/"):
            assert b"good" in client.get(page).content

    def test_deep(self, locks: Locks) -> None:
        """Damage is noticed also where the snapshot does not reach."""
        locks.add("bad", [entry(number) for number in range(20)] + [{"grant": 7}])
        [lock] = Lock.objects.snapshots()
        assert "further down" in (lock.damage or "")

    def test_no_date_of_python(self, locks: Locks) -> None:
        """Python cannot represent a date after the year 9999. The other documents are still read."""
        locks.held("good")
        locks.add("bad", [entry()], change={"expires_at": DatetimeMS(2**60)})
        assert {lock.key: lock.state for lock in Lock.objects.snapshots()} == {
            "good": ShownState.HELD,
            "bad": ShownState.DAMAGED,
        }

    @pytest.mark.parametrize("has_zones", [True, False])
    @pytest.mark.parametrize(("year", "zone"), [(1, "America/New_York"), (9999, "Asia/Tokyo")])
    def test_ends_of_the_calendar(
        self, locks: Locks, history: Any, settings: Settings, year: int, zone: str, *, has_zones: bool
    ) -> None:
        """A date that has no local time hides no page."""
        settings.TIME_ZONE, settings.USE_TZ = zone, has_zones
        end = datetime(year, 1, 1, 0, 5, tzinfo=UTC) if year == 1 else datetime(year, 12, 31, 23, 55, tzinfo=UTC)
        locks.add("k", [entry(acquired_at=end)], [waiter(since=end)], {"purge_at": end})
        history.insert_one({"key": "k", "event": "released", "at": end, "held_ms": 5})
        Ad.objects.create(
            user_id="u",
            title="x",
            price=5,
            export_status="exporting",
            locked_by="h",
            lock_timestamp=end if has_zones else end.replace(tzinfo=None),
        )
        assert len(Lock.objects.get().holders) == 1
        client = browser(is_superuser=True)
        for page in (LIST, DASHBOARD, f"{LIST}k/change/", f"{LIST}others/", EVENTS):
            assert client.get(page).status_code == 200


def test_migrations_are_complete(locks: Locks) -> None:
    call_command("makemigrations", "django_mongolock", "mongolock_history", "--check", "--dry-run", verbosity=0)


def test_snapshots_read_nothing_more(locks: Locks, commands: Commands) -> None:
    """A snapshot has all its facts. No hidden query follows."""
    locks.held("a", "b")
    with connections["mongo"].execute_wrapper(lambda *args: pytest.fail("a query")):
        assert [lock.tokens for lock in Lock.objects.order_by("key").snapshots()] == [[TOKEN + 1], [TOKEN + 2]]
    assert commands.names() == ["aggregate"]
