"""The dashboard of the locks and its JSON, with their contents, permissions, and costs."""

from __future__ import annotations

import html
import json
import re
import sys
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from bson.int64 import Int64
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.test import Client, RequestFactory
from django.utils import translation
from pymongo.collection import Collection
from pytest_django import Settings

from django_mongolock.backends import mongo_store
from django_mongolock.engine.store import bells
from django_mongolock.history import past
from django_mongolock.inspection import operations, overview, pictures, server
from django_mongolock.inspection.server import ServerFacts, _known
from django_mongolock.inspection.status import Alarm, lock_status
from tests.editing.staff import text_of
from tests.support.lock_documents import TOKEN, Locks, entry, now, waiter
from tests.support.lock_fixtures import WITH_MONGO, Commands
from tests.support.looking import held_elsewhere
from tests.test_admin import DASHBOARD as PAGE
from tests.test_admin import LIST, NAMES, RELEASE, browser

pytestmark = WITH_MONGO

STATUS = "/admin/django_mongolock/lock/status/"


@pytest.fixture
def admin() -> Client:
    return browser("view_lock")


@pytest.fixture
def monitor() -> Client:
    """Return a client that may only read the status, and is not of the staff."""
    return browser("view_lock_status", is_staff=False)


def section(response: Any, name: str) -> str:
    found = re.search(
        rf'<(section|ul|details|p)[^>]*id="{name}".*?</\1>(?!</li>)', response.content.decode(), re.DOTALL
    )
    assert found, name
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", found[0])))


def parts(sent: dict[str, Any]) -> list[Any]:
    """Return the parts of the one command that reads the locks."""
    first = [stage for stage in sent["pipeline"] if "$unionWith" not in stage]
    return [first, *(stage["$unionWith"]["pipeline"] for stage in sent["pipeline"] if "$unionWith" in stage)]


def examined_by(locks: Locks, part: Any) -> int:
    """Return the number of documents that a part reads."""
    return int(locks.explain({"aggregate": locks.collection.name, "pipeline": part})["totalDocsExamined"])


class TestPage:
    """The page answers every question of a night shift."""

    @pytest.fixture(autouse=True)
    def some(self, locks: Locks) -> None:
        locks.add(
            "order:5",
            [entry(1, label="nightly", place="task shop.export", user="anna", worker="w1", held_for=40)],
            [waiter(2, held_for=33, worker="w2", label="till"), waiter(3, held_for=12), waiter(4, left=-5)],
            {"contended": Int64(400), "acquisitions": Int64(900)},
        )
        locks.add("catalog", [entry(n, mode="shared", host=f"web-{n}", held_for=n * 10) for n in range(2, 7)])
        locks.stale("left:behind")
        locks.free("free:1")

    def test_tells_all(self, admin: Client) -> None:
        """F224: The page shows held, waiting, stale and contended locks, processes, and the server."""
        response = admin.get(PAGE)
        assert "No problems" in section(response, "look")
        tiles = section(response, "tiles")
        for word in ("2 held", "2 waiting, for 1 lock", "1 stale"):
            assert word in tiles
        present = section(response, "now")
        holder = "order:5 nightly web-1 · pid 4001 · MainThread · task shop.export · user anna"
        assert re.search(holder + r" 4\d s 2 waiting, the first: till for 3\d s · web-1 · pid 4002", present)
        assert re.search(r"catalog unknown and 4 more web-2 · pid 4002 · MainThread 1 min \d s – ● works", present)
        assert re.search(r"left:behind .* ◐ stale Its holder is dead or cut off: its lease ended 1 min", present)
        assert "order:5 400 of 900" in section(response, "contended")
        assert "are woken at once" in section(response, "server")
        assert "free:1" not in present

    def test_what_is_stale_is_calm(self, admin: Client, locks: Locks) -> None:
        """F149: A stale lock is no problem, and the page says that nobody waits for it. The page of the lock counts the
        lease that has ended."""
        locks.stale("older", over=10, change={"expired": Int64(0)})
        response = admin.get(PAGE)
        assert "No problems" in section(response, "look")
        assert "Nobody waits for the 2 stale locks: their holders are dead" in section(response, "look")
        assert sorted(row.key for row in response.context["rows"][1:3]) == ["left:behind", "older"]
        assert re.search(r'<tr data-key="older" class="mongolock-stale">', response.content.decode())
        assert "leases that ended without a release 1" in text_of(admin.get(f"{LIST}older/change/"))

    def test_the_worst_first(self, admin: Client, locks: Locks) -> None:
        """F249: The rows begin with the locks that need a look, the worst first. A stale lock precedes calm ones."""
        locks.add("silent", [entry(1, left=8)])
        locks.add("asked", [entry(2, release_requested_by="anna", release_requested_at=now())])
        locks.add("bad", [entry(3)], change={"token": 1.5})
        keys = [row.key for row in admin.get(PAGE).context["rows"]]
        assert keys == ["bad", "silent", "asked", "order:5", "left:behind", "catalog"]
        locks.collection.update_one({"_id": "left:behind"}, {"$set": {"waiters": [waiter(5)]}})
        said = section(admin.get(PAGE), "look")
        assert "Nobody waits" not in said
        assert re.search(r"Worth a look.* left:behind ◐ stale", said)

    def test_a_request_is_shown(self, admin: Client, locks: Locks, settings: Settings) -> None:
        """F149: After a request, the page of the lock names the requester and the time, without a history."""
        with held_elsewhere("asked"):
            store = mongo_store()
            assert operations.ask_to_release(store, "asked", "anna, in the admin: we deploy at 3") == 1
            said = text_of(admin.get(f"{LIST}asked/change/"))
        assert re.search(r"\? asked Asked \d\.\d s ago to release it, by “anna, in the admin: we deploy", said)

    def test_where_one_is(self, admin: Client) -> None:
        """The sidebar marks the dashboard, and not the list of locks."""
        page = admin.get(PAGE).content.decode()
        assert re.findall(r'class="model-(\w+) current-model"', page) == ["lockdashboard"]

    def test_names_and_zones(self, admin: Client, settings: Settings) -> None:
        """F150: A filter says what it shows all of, and a moment has its time zone."""
        settings.TIME_ZONE = "Asia/Tokyo"
        said = text_of(admin.get(LIST))
        assert said.count(" All states ") == 1
        assert not re.search(r" All [^sm]", said)
        assert re.search(r"As of \d{4}-\d\d-\d\d \d\d:\d\d:\d\d JST", text_of(admin.get(PAGE)))

    def test_a_button_where_it_helps(self, locks: Locks) -> None:
        """F150: A red button is shown next to locks with waiters or an unusual hold, and on the page of the lock."""
        client = browser("view_lock", "force_release_lock")
        row = re.compile(r'<tr data-key="([^"]*)" class="mongolock-\w+">(.*?)</tr>', re.DOTALL)
        found = {key: "mongolock-danger" in text for key, text in row.findall(client.get(PAGE).content.decode())}
        assert found == {"order:5": True, "catalog": False, "left:behind": False}
        assert "force-release/?key=catalog" in client.get(f"{LIST}catalog/change/").content.decode()

    def test_what_is_empty_is_not_there(self, admin: Client, locks: Locks) -> None:
        """F150: Empty sections are left out."""
        locks.collection.delete_many({})
        assert re.findall(r"<(?:section|details)[^>]*id=\"(\w+)", admin.get(PAGE).content.decode()) == ["look"]
        locks.add("k", [entry(1)], change={"contended": Int64(0)})
        found = re.findall(r"<(?:section|details)[^>]*id=\"(\w+)", admin.get(PAGE).content.decode())
        assert found == ["look", "now", "recent"]

    def test_order(self, admin: Client, locks: Locks) -> None:
        """The longest wait, the longest hold and the most contended lock come first."""
        locks.add("z", [entry(1, held_for=500)], [waiter(9, held_for=400)], {"contended": Int64(1)})
        response = admin.get(PAGE)
        found = {name: [seen.key for seen in getattr(response.context["locks"], name)] for name in
                 ("waited_for", "longest_held", "contended")}  # fmt: skip
        assert found["waited_for"] == ["z", "order:5"]
        assert found["longest_held"] == ["z", "catalog", "order:5"]
        assert (found["contended"][0], found["contended"][-1]) == ("order:5", "z")
        assert "A waiter has been waiting for “z” for 6 min" in section(response, "look")

    def test_no_secrets(self, admin: Client, monitor: Client) -> None:
        """The pages show no grants and no sessions. A refresh replaces only a part of the page."""
        for response in (admin.get(PAGE), admin.get(f"{PAGE}?part=live"), monitor.get(STATUS)):
            assert response.status_code == 200
            assert b"secret" not in response.content
        part = admin.get(f"{PAGE}?part=live").content
        assert b"order:5" in part
        assert b"<html" not in part

    def test_german(self, admin: Client) -> None:
        """The German page has no English text of ours."""
        with translation.override("de"):
            content = text_of(admin.get(PAGE))
        for word in ("Übersicht der Sperren", "Wer was hält, und wer wartet", "Keine Probleme", "gehalten"):
            assert word in content
        for word in ("No ", "wait", "held", "since"):
            assert not re.search(rf"\b{word}\b", content)

    def test_deadlock(self, admin: Client, locks: Locks, monitor: Client) -> None:
        """A cycle is reported, and drawn as one."""
        locks.add("a", [entry(31, worker="x")], [waiter(32, worker="y")])
        locks.add("b", [entry(33, worker="y")], [waiter(34, worker="x")])
        response = admin.get(PAGE)
        assert "Deadlock: threads or tasks wait for one another." in section(response, "look")
        assert "pid 4034" in section(response, "deadlocks")
        assert b"mongolock-edge-back" in response.content
        status = monitor.get(STATUS).json()
        assert (status["counts"]["deadlocks"], sorted(status["deadlocks"][0]["keys"])) == (1, ["a", "b"])
        assert status["problems"][0]["alarm"] == "deadlock"

    def test_first_in_the_queue(self, locks: Locks, admin: Client) -> None:
        """The first in the queue is the first living waiter. A waiter at the end of its place does not count."""
        locks.add("dead:first", [entry(1)], [waiter(2, left=-1, label="dead"), waiter(3, label="alive")])
        said = section(admin.get(PAGE), "now")
        assert "alive" in said
        assert "dead web" not in said


class TestNumbers:
    def test_kept(self, locks: Locks, admin: Client, monitor: Client) -> None:
        """Kept locks are counted separately. A kept lock is not among the longest holds, and its process need not
        live."""
        locks.held("k")
        locks.add("once", [entry(2, left=9_000, held_for=800, released=now() - timedelta(seconds=700))])
        response = admin.get(PAGE)
        assert re.search(r"1 held .* 1 kept", section(response, "tiles"))
        assert "once" not in section(response, "now")
        status = monitor.get(STATUS).json()
        assert (status["counts"]["held"], status["counts"]["kept"]) == (1, 1)
        assert [each["key"] for each in status["held"]] == ["k"]

    def test_damage_is_counted(self, locks: Locks, admin: Client, monitor: Client) -> None:
        """Every damaged document of a held lock counts, even if no list shows it."""
        for number in range(30):
            locks.add(f"bad:{number:02d}", [entry(1, held_for=number)], change={"token": 1.5})
        assert "Damaged: “bad:00” and 29 more. Nobody can acquire it" in section(admin.get(PAGE), "look")
        (problem,) = monitor.get(STATUS).json()["problems"]
        assert (problem["alarm"], problem["amount"]) == ("damaged", 30)


class TestLimits:
    def test_capped(self, admin: Client, monitor: Client, locks: Locks, monkeypatch: pytest.MonkeyPatch) -> None:
        """If more locks are held than are read, no number pretends to be exact. Stale locks are still counted."""
        monkeypatch.setattr(overview, "MAX_HELD_EXAMINED", 3)
        monkeypatch.setattr(overview, "MAX_COUNTED", 5)
        locks.held("a", "b", "c", "d", "e", "f", "g")
        locks.add("waited", [entry(1)], [waiter(2)])
        locks.stale("old", "older")
        response = admin.get(PAGE)
        for word in ("> 5 held", "2 stale", "1 waiting, for 1 lock"):
            assert word in section(response, "tiles")
        counts = monitor.get(STATUS).json()["counts"]
        assert (counts["held"], counts["more_held"], counts["stale"]) == (5, True, 2)


class TestRights:
    """The page needs the permission to view. The JSON needs its own."""

    @pytest.fixture(autouse=True)
    def one(self, locks: Locks) -> None:
        locks.held("k")

    @pytest.mark.parametrize(
        ("permission", "page", "status"), [("view_lock", 200, 403), ("view_lock_status", 403, 200), ("x", 403, 403)]
    )
    def test_permissions(self, permission: str, page: int, status: int) -> None:
        client = browser(permission)
        assert (client.get(PAGE).status_code, client.get(STATUS).status_code) == (page, status)
        assert (b"lock/status/" in client.get(PAGE).content) is False

    def test_strangers(self) -> None:
        """Strangers are refused. A view of the project that sets the user may show the status."""
        assert Client().get(STATUS).status_code == 403
        assert browser("view_lock_status", is_active=False).get(STATUS).status_code == 403
        request = RequestFactory().get("/internal/locks/")
        assert lock_status(request).status_code == 403
        request.user = User.objects.create(username="monitor")
        request.user.user_permissions.set(Permission.objects.filter(codename="view_lock_status"))
        assert lock_status(request).status_code == 200

    @pytest.mark.parametrize("method", ["post", "put", "delete"])
    def test_only_looks(self, admin: Client, monitor: Client, method: str) -> None:
        assert getattr(admin, method)(PAGE).status_code == 403
        assert getattr(monitor, method)(STATUS).status_code == 405

    def test_not_kept(self, admin: Client, monitor: Client) -> None:
        """No cache may store the page, because old locks would be shown."""
        for response in (admin.get(PAGE), monitor.get(STATUS)):
            assert "no-store" in response["Cache-Control"]


class TestStatus:
    """The JSON has the facts of the page."""

    def test_content(self, locks: Locks, monitor: Client) -> None:
        """The JSON has numbers, and moments in ISO 8601."""
        locks.add("k", [entry(1, label="nightly")], [waiter(2, held_for=90)])
        locks.stale("s")
        found = monitor.get(STATUS).json()
        assert found["counts"] == {
            "held": 1, "kept": 0,
            "waited_for": 1, "waiting": 1, "stale": 1, "deadlocks": 0, "more_held": False,
        }  # fmt: skip
        assert [trouble["alarm"] for trouble in found["problems"]] == ["long_wait"]
        assert found["problems"][0]["about"] == "k"
        assert 90 <= found["longest_wait_seconds"] < 120
        (waiting,) = found["waited_for"]
        assert waiting["holders"][0]["label"] == "nightly"
        assert 90 <= waiting["waiters"][0]["waited_seconds"] < 120
        assert found["server"]["primary"]
        assert found["server"]["version"].startswith("6.")
        assert (found["server"]["members"], found["server"]["bells"]) == (1, True)
        json.dumps(found)

    @pytest.mark.long
    def test_away(self, away: None, admin: Client, monitor: Client) -> None:
        """While MongoDB does not answer, the page and the JSON have status 503 and show no password. A failed action is
        not logged. The page of an action does not claim that nothing was changed."""
        page, status = admin.get(PAGE), monitor.get(STATUS)
        forced = browser(*NAMES).post(RELEASE, {"lock": json.dumps(["locks", "k", [1]]), "reason": "x"})
        assert (page.status_code, status.status_code, forced.status_code) == (503, 503, 503)
        for shown in (page, forced):
            assert "The locks cannot be shown now: MongoDB did not answer" in text_of(shown)
            assert ("This page changed nothing" in text_of(shown)) == (shown is page)
        assert not LogEntry.objects.exists()
        assert status.json()["problems"][0]["alarm"] == "server"
        assert b"hunter2" not in page.content + status.content


class TestCost:
    """A million documents need as many commands as a thousand, each on an index."""

    @pytest.mark.long
    def test_commands(self, admin: Client, commands: Commands, locks: Locks) -> None:
        """One command reads the locks, one the deadlocks if there are waiters, and two each document lock. A few rare
        ones read the servers. No command reads all documents."""
        locks.renew_indexes()
        locks.many(free=5_000, held=300)
        locks.collection.update_many({"_id": {"$regex": "^held:00000"}}, {"$set": {"waiters": [waiter(5)]}})
        admin.get(PAGE)
        first = len(commands.sent)
        commands.sent.clear()
        assert "300 held" in section(admin.get(PAGE), "tiles")
        # The last two count the documents of the shop's document lock, the held ones and the damaged ones.
        assert commands.names() == ["aggregate", "aggregate", "find", "find"]
        assert first <= 10 + 2 * bells.COLLECTIONS  # whether one can listen to each bell is two commands
        examined = [examined_by(locks, part) for part in parts(commands.sent[0])]
        assert examined[:4] == [300, 300, 0, 10]
        assert examined[4] <= overview.MAX_RECENT_EXAMINED

    @pytest.mark.parametrize("prefix", ["", "shop:"])
    def test_contended(self, admin: Client, commands: Commands, locks: Locks, settings: Settings, prefix: str) -> None:
        """The most contended lock of all is shown, whenever it was used last, without a read of other documents."""
        settings.MONGOLOCK = {**settings.MONGOLOCK, "KEY_PREFIX": prefix}
        locks.renew_indexes()
        locks.many(free=overview.MAX_RECENT_EXAMINED, held=20)
        locks.collection.update_many({}, {"$set": {"purge_at": now() + timedelta(days=8), "contended": Int64(500)}})
        for key, count in (("shop:a", 900), ("shop:b", 901), ("shop:never", 0)):
            locks.add(key, change={"contended": Int64(count)})
        locks.add(7, change={"contended": Int64(999)})
        shown = [seen.key for seen in admin.get(PAGE).context["locks"].contended]
        assert shown == ["shop:b", "shop:a"] if prefix else shown[:2] == ["shop:b", "shop:a"] and len(shown) == 10
        sent = next(sent for sent in commands.sent if "pipeline" in sent)
        (part,) = (part for part in parts(sent) if "contended" in part[0].get("$match", {}))
        assert examined_by(locks, part) == len(shown)

    def test_servers_are_asked_seldom(self, admin: Client, commands: Commands, locks: Locks) -> None:
        """The facts of the servers are shown for half a minute before they are read again."""
        _known.clear()
        admin.get(PAGE)
        assert "connectionStatus" in commands.names()
        commands.sent.clear()
        admin.get(PAGE)
        assert "connectionStatus" not in commands.names()


def test_a_problem_is_looked_at_again(monkeypatch: pytest.MonkeyPatch, locks: Locks) -> None:
    """A server that answers again is no problem any more."""
    found = [ServerFacts(problem="it is away"), ServerFacts(), ServerFacts(problem="it was not asked again")]
    monkeypatch.setattr(server, "inspect_server", lambda *_: found.pop(0))
    _known.clear()
    assert [server.known_server(mongo_store(), 1).problem for _ in range(3)] == ["it is away", "", ""]
    _known.clear()


class TestDrawing:
    def overview(self) -> overview.Overview:
        return overview.overview(mongo_store())

    def test_chain(self, locks: Locks) -> None:
        """A holder of one lock that waits for another is one box, between the two."""
        locks.add("a", [entry(1, worker="x")], [waiter(2, worker="y")])
        locks.add("b", [entry(3, worker="y")], [waiter(4, worker="z")])
        drawn = pictures.draw_graph(self.overview().waited_for)
        assert drawn
        columns = [node.text for node in sorted(drawn.nodes, key=lambda node: node.x)]
        assert columns == ["unknown", "b", "unknown", "a", "unknown"]
        assert len({node.x for node in drawn.nodes}) == 5
        assert not any(edge.back for edge in drawn.edges)
        assert drawn.width >= 5 * pictures.WIDTH

    def test_sizes_are_no_texts(self, locks: Locks, admin: Client, settings: Settings) -> None:
        """A picture of more than 999 pixels has its size, also where numbers have separators."""
        settings.USE_THOUSAND_SEPARATOR = True
        for number in range(5):
            locks.add(f"k{number}", [entry(1, worker=f"w{number}")], [waiter(2, worker=f"w{number + 1}")])
        drawn = pictures.draw_graph(self.overview().waited_for)
        assert drawn
        assert drawn.width > 999
        assert f'<svg width="{drawn.width}" height="{drawn.height}"' in admin.get(PAGE).content.decode()

    def test_no_two_boxes_in_one_place(self, locks: Locks) -> None:
        for number in range(12):
            locks.add(
                f"k{number}",
                [entry(number, worker=f"h{number % 4}"), entry(90, worker="other")],
                [waiter(n, worker=f"h{(n * number) % 7}") for n in range(6)],
            )
        drawn = pictures.draw_graph(self.overview().waited_for)
        assert drawn
        places = [(node.x, node.y) for node in drawn.nodes]
        assert len(set(places)) == len(places)
        for a in drawn.nodes:
            for b in drawn.nodes:
                assert a is b or a.x != b.x or a.bottom <= b.y or b.bottom <= a.y

    def test_lane(self, locks: Locks) -> None:
        """Half of the time held is half of the width. A wait is drawn at its time."""
        minutes = overview.RECENT.total_seconds()
        locks.add("k", [entry(1, held_for=minutes / 2, since=now() - timedelta(seconds=minutes * 0.75))])
        found = self.overview()
        (lane,) = pictures.draw_lanes(found.longest_held, found.now).lanes
        kinds = {mark.kind: (float(mark.x[:-1]), float(mark.width[:-1])) for mark in lane.marks}
        assert kinds["hold"] == pytest.approx((50, 50), abs=2)
        assert kinds["wait"] == pytest.approx((25, 25), abs=2)
        assert kinds["grant"][0] == pytest.approx(50, abs=2)
        assert lane.text.startswith("held for 2 min 3")

    def test_a_stale_lock_has_a_lane(self, locks: Locks) -> None:
        """F249: The lanes are for the longest waits, and for locks that were left behind."""
        locks.stale("left", over=20)
        for number in range(pictures.MAX_LANES):
            locks.add(f"k{number}", [entry(number, held_for=9)], [waiter(number, held_for=5)])
        found = self.overview()
        lanes = [lane.key for lane in pictures.draw_lanes(found.shown, found.now).lanes]
        assert len(lanes) == pictures.MAX_LANES
        assert "left" in lanes

    def test_kept(self, locks: Locks) -> None:
        """A kept lock was held until its work was done, and no longer."""
        done = now() - timedelta(seconds=150)
        locks.add("once", [entry(1, left=9_000, held_for=200, released=done)])
        (lane,) = pictures.draw_lanes(self.overview().recent, now()).lanes
        assert lane.text == "kept"
        (hold,) = (mark for mark in lane.marks if mark.kind == "hold")
        assert float(hold.width[:-1]) == pytest.approx(100 * 50 / 300, abs=2)

    @pytest.fixture
    def told(self, locks: Locks, history: Collection[dict[str, Any]]) -> Collection[dict[str, Any]]:
        """Return a history of "k". It was waited for, held, and released, then held and lost, and is held now. Each
        takes ten minutes."""
        minute = 60_000
        told: list[tuple[float, str, dict[str, Any]]] = [
            (40, "granted", {"token": 1, "waited_ms": 10 * minute}),
            (30, "released", {"token": 1, "held_ms": 10 * minute}),
            (25, "granted", {"token": 2, "waited_ms": 0}),
            (15, "lost", {"token": 2, "held_ms": 10 * minute}),
            (1, "granted", {"token": TOKEN + 1, "waited_ms": 0}),
            (70, "released", {"token": 0, "held_ms": 5 * minute}),
            (14, "released", {"token": 9, "held_ms": 2**62}),
        ]
        for ago, event, facts in told:
            history.insert_one({"key": "k", "event": event, "at": now() - timedelta(minutes=ago), **facts})
        locks.add("k", [entry(1, held_for=60)], (), {"last_holder": entry(2, held_for=1_500)})
        return history

    @pytest.mark.parametrize("has_zones", [True, False])
    def test_the_last_hour(
        self, told: Collection[dict[str, Any]], admin: Client, settings: Settings, *, has_zones: bool
    ) -> None:
        """The page of a lock draws its holds, waits and losses within the hour, and lists them."""
        told.delete_one({"token": 9})
        settings.USE_TZ, settings.TIME_ZONE = has_zones, "Asia/Tokyo"
        page = admin.get(f"{LIST}k/change/")
        (lane,) = page.context["hour"].lanes
        drawn = sorted((float(mark.x[:-1]), mark.kind, float(mark.width[:-1])) for mark in lane.marks)
        kinds = [(kind, round(x), round(width)) for x, kind, width in drawn if kind != "grant"]
        assert kinds == [("wait", 17, 17), ("hold", 33, 17), ("lost", 58, 17), ("hold", 98, 2)]
        assert sum(kind == "grant" for _, kind, _ in drawn) == 3
        assert lane.text == "held 2 times, for 20 min 0 s in all, one wait of 10 min 0 s, lost once"
        assert "The last hour" in page.content.decode()
        assert "Latest events" not in page.content.decode()  # these need the permission to view them
        page = browser("view_lock", "view_lockevent").get(f"{LIST}k/change/")
        assert "Latest events" in page.content.decode()
        assert len(page.context["events"]) == 6

    def test_the_unknown(
        self, told: Collection[dict[str, Any]], admin: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """F148: The time before the first event that was kept or read is drawn as unknown. The time that the history
        covers is not."""

        def unknown(path: str, name: str) -> list[int]:
            (lane,) = (lane for lane in admin.get(path).context[name].lanes if lane.key == "k")
            return [round(float(mark.width[:-1])) for mark in lane.marks if mark.kind == "unknown"]

        told.delete_one({"token": 9})
        assert unknown(PAGE, "recent") == unknown(f"{LIST}k/change/", "hour") == []
        told.delete_many({"at": {"$lt": now() - timedelta(minutes=20)}})
        assert unknown(f"{LIST}k/change/", "hour") == [17]  # the first hold that it tells of began 25 minutes ago
        monkeypatch.setattr(past, "MAX_EVENTS", 1)
        assert unknown(PAGE, "recent") == pytest.approx([50], abs=2)
        assert unknown(f"{LIST}k/change/", "hour") == pytest.approx([80], abs=1)

    def test_a_deadlock_that_is_over(self, told: Collection[dict[str, Any]], admin: Client) -> None:
        """Recently ended deadlocks are reported at the top."""
        told.insert_one({"key": "k", "event": "deadlock", "at": now() - timedelta(seconds=9), "label": "van"})
        told.insert_one({"key": "k", "event": "deadlock", "at": now() - timedelta(minutes=6), "label": "cart"})
        said = section(admin.get(PAGE), "look")
        assert re.search(r"A deadlock ended \d+(\.\d)? s ago 20.* UTC : van gave up waiting for k", said)
        assert "cart" not in said

    def test_no_events(self, told: Collection[dict[str, Any]], locks: Locks) -> None:
        """F148: The page says that a lock has no events, and not why."""
        locks.held("quiet")
        page = browser("view_lock", "view_lockevent").get(f"{LIST}quiet/change/")
        assert "The history has no event of this lock." in text_of(page)

    def test_the_history_in_the_lanes(self, locks: Locks, told: Collection[dict[str, Any]], admin: Client) -> None:
        """The dashboard draws every hold of the last minutes, not only the present and the previous one."""
        for ago, token in ((50, 20), (30, 21), (10, 22)):
            at = now() - timedelta(seconds=ago)
            told.insert_one({"key": "busy", "event": "released", "at": at, "token": token, "held_ms": 5_000})
        locks.add("busy", (), (), {"last_holder": entry(3, held_for=15)})
        lane = {lane.key: lane for lane in admin.get(PAGE).context["recent"].lanes}["busy"]
        assert [mark.kind for mark in lane.marks].count("hold") == 3

    def test_hand_over(self, locks: Locks) -> None:
        """A previous holder held the lock until the next one, a waiter, got it. Without a waiter, the end is
        unknown."""
        before = entry(1, held_for=200)
        locks.add("handed", [entry(2, held_for=100, since=now() - timedelta(seconds=150))], (), {"last_holder": before})
        locks.add("free", (), (), {"last_holder": before})
        drawn = {lock.key: pictures.draw_lanes([lock], lock.now).lanes[0] for lock in self.overview().recent}
        assert [mark.kind for mark in drawn["handed"].marks].count("hold") == 2
        assert [mark.kind for mark in drawn["free"].marks] == ["unknown", "unknown", "grant"]
        assert "free; last granted 3 min" in drawn["free"].text


def test_page_of_the_docs(locks: Locks, monitor: Client, monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    """The example of "monitoring.md" is tried, its alarms are all that there are, and its pictures exist."""
    page = Path(__file__).resolve().parents[1] / "docs" / "howto/monitoring.md"
    text = page.read_text()
    (example,) = re.findall(r"^```python\n((?:(?!```).)*?lock_status.*?)^```", text, re.MULTILINE | re.DOTALL)
    urls = types.ModuleType("urls_of_the_docs")
    exec(example, vars(urls))  # noqa: S102 - our own page
    monkeypatch.setitem(sys.modules, "urls_of_the_docs", urls)
    settings.ROOT_URLCONF = "urls_of_the_docs"
    answer = monitor.get("/internal/locks/").json()
    (shown,) = re.findall(r'^\{"problems.*?\n ("counts".*?\}),', text, re.MULTILINE | re.DOTALL)
    assert json.loads(f"{{{shown}}}")["counts"].keys() == answer["counts"].keys()
    (alarms,) = re.findall(r"The alarms are (.*?), the most urgent first", text, re.DOTALL)
    assert re.findall(r"`(\w+)`", alarms) == list(Alarm)
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert (page.parent / picture).exists()
