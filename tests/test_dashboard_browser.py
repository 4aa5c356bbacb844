"""The admin in a real browser, with live pages, by keyboard, under a strict policy, for everybody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from axe_core_python.sync_playwright import Axe
from bson.int64 import Int64
from django.contrib.auth.models import User
from pymongo.collection import Collection
from pytest_django import Settings
from pytest_django.live_server_helper import LiveServer

from django_mongolock.inspection.kinds import sources
from testproject.shop.models import Ad
from tests.support.browsing import MIDDLEWARE, POLICY, browser, opened
from tests.support.lock_documents import TOKEN, Locks, entry, now, waiter
from tests.support.waiting import eventually
from tests.test_kinds import Rooms

pytestmark = [pytest.mark.long, pytest.mark.django_db(databases=["default", "mongo"], transaction=True)]

PAGE = "/admin/django_mongolock/lockdashboard/"
LIST = "/admin/django_mongolock/lock/"
#: Returns whether a text of this row is visible, in boxes wide enough for a word, with nothing in front of them.
READABLE = """(row, wanted) => {
  const nodes = document.createTreeWalker(row, NodeFilter.SHOW_TEXT);
  for (let node = nodes.nextNode(); node; node = nodes.nextNode()) {
    const at = node.data.indexOf(wanted);
    if (at < 0) continue;
    node.parentElement.scrollIntoView({ block: "center" });
    const range = document.createRange();
    range.setStart(node, at);
    range.setEnd(node, at + wanted.length);
    const boxes = [...range.getClientRects()];
    const ends = boxes.flatMap((box) => [[box.left + 2, box], [box.right - 2, box]]);
    const seen = ends.every(([x, box]) => {
      const top = document.elementFromPoint(x, box.top + box.height / 2);
      return top && (top.contains(node) || node.parentElement.contains(top));
    });
    const letters = wanted.length / boxes.length;
    const inside = boxes.every((box) => box.left >= 0 && box.right <= innerWidth);
    if (seen && inside && letters >= Math.min(wanted.length, 4)) return true;
  }
  return false;
}"""
Visit = Callable[..., Any]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as running:
        yield running


@pytest.fixture
def server(transactional_db: None, settings: Settings) -> Iterator[LiveServer]:
    """A site of its own with a strict policy, because a server keeps the middleware that it was started with."""
    settings.MIDDLEWARE = [MIDDLEWARE, *settings.MIDDLEWARE]
    settings.ALLOWED_HOSTS = ["127.0.0.1"]
    server = LiveServer("127.0.0.1")
    yield server
    server.stop()


@pytest.fixture
def visit(chromium: Any, server: LiveServer, locks: Locks, monkeypatch: pytest.MonkeyPatch) -> Visit:
    """Return a function that opens pages for a superuser. At the end there must be no complaints, not even about the
    policy."""
    user = User.objects.create_superuser("root")

    @contextmanager
    def visit(path: str = PAGE, *, every: float = 0.2, fails: bool = False, **options: Any) -> Iterator[Any]:
        monkeypatch.setattr("django_mongolock.admin.dashboard.REFRESH_SECONDS", every)
        with opened(chromium, server.url, user, **options) as page:
            assert page.goto(path).headers["content-security-policy"] == POLICY
            yield page
            assert fails or page.complaints == []

    return visit


@pytest.fixture
def ad(transactional_db: None) -> Iterator[None]:
    """Make a held document."""
    Ad.objects.create(price=1, user_id="7", title="a bike", export_status="exporting", locked_by="a worker " * 7)
    yield
    Ad.objects.all().delete()


def fill(locks: Locks) -> None:
    locks.add(
        "order:5",
        [entry(1, label="nightly", user="anna", worker="w1", held_for=40)],
        [waiter(2, held_for=33, worker="w2"), waiter(3, held_for=12, worker="w3")],
        {"contended": Int64(400), "acquisitions": Int64(900), "last_holder": entry(7, held_for=200)},
    )
    locks.add("catalog", [entry(n, mode="shared", worker=f"c{n}") for n in range(5, 9)], [waiter(1, worker="w1")])
    locks.add("a", [entry(31, worker="da")], [waiter(32, worker="db", held_for=3)])
    locks.add("b", [entry(33, worker="db")], [waiter(34, worker="da", held_for=2)])
    locks.stale("left:behind")
    locks.add("bad", [entry(9)], change={"token": 1.5})


def settled(page: Any, expression: str) -> None:
    """Wait until *expression* is true in the page. The page allows no later evaluation inside of it."""
    assert eventually(lambda: page.evaluate(expression) or page.wait_for_timeout(50), 15), expression


class TestLive:
    """The page refreshes by itself, and disturbs no reader."""

    @pytest.mark.witness
    def test_keeps_focus_and_scroll(self, visit: Visit, locks: Locks) -> None:
        """The link that has the focus stays the same link of the same lock, wherever it moves."""
        fill(locks)
        with visit(viewport={"width": 660, "height": 400}) as page:
            link = "#now [data-key='order:5'] a"
            page.focus(link)
            page.evaluate("window.mine = document.activeElement")
            page.evaluate("document.getElementById('now-scroll').scrollLeft = 40")
            page.evaluate("window.scrollBy(0, 33)")
            top = "document.activeElement.getBoundingClientRect().top"
            before = page.evaluate(top)
            locks.add("older", [entry(50, held_for=4_000)])  # comes before it
            page.wait_for_selector("#now [data-key='older']", timeout=15_000)
            assert page.evaluate("document.activeElement === window.mine && window.mine.isConnected")
            assert page.evaluate("document.activeElement.textContent.trim()") == "order:5"
            assert page.evaluate("document.getElementById('now-scroll').scrollLeft") == 40
            assert abs(page.evaluate(top) - before) < 150  # the visible part stays, although a row came in above it

    def test_says_only_what_is_new(self, visit: Visit, locks: Locks) -> None:
        """A screen reader announces a new problem once, not at every refresh."""
        locks.held("k")
        with visit() as page:
            settled(page, "document.getElementById('mongolock-control').dataset.state === 'live'")
            first = page.inner_text("#as-of")
            settled(page, f"document.getElementById('as-of').textContent.trim() !== {first!r}")
            assert page.text_content("#mongolock-said") == ""
            assert page.get_attribute("#mongolock-said", "aria-live") == "polite"
            locks.stale("s")
            assert page.locator("#now [data-key='s']").count() == 0 or page.text_content("#mongolock-said") == ""
            locks.add("d", [entry(2)], [waiter(3, held_for=90)])
            settled(
                page, "/A waiter has been waiting for “d”/.test(document.getElementById('mongolock-said').textContent)"
            )

    def test_two_problems_of_one_sort(self, visit: Visit, locks: Locks, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stale locks of two kinds are two problems, after a refresh too."""
        rooms, desks = Rooms(a=("ann", -5.0)), Rooms(b=("ben", -5.0))
        desks.name = "desks"
        monkeypatch.setattr("django_mongolock.inspection.kinds.sources", [*sources, lambda using: [rooms, desks]])
        with visit() as page:
            first, shown = page.inner_text("#as-of"), page.inner_text("#look ul")
            settled(page, f"document.getElementById('as-of').textContent.trim() !== {first!r}")
            assert "rooms" in shown
            assert page.inner_text("#look ul") == shown

    def test_pause(self, visit: Visit, locks: Locks) -> None:
        """A paused page stays as it is, and sends nothing. Resumed, it goes on."""
        locks.held("k")
        with visit() as page:
            page.focus("#mongolock-pause")
            page.keyboard.press("Enter")
            assert page.inner_text("#mongolock-pause") == "Resume"
            assert "Paused" in page.inner_text("#mongolock-refreshing")
            page.wait_for_load_state("networkidle")
            asked: list[str] = []
            page.on("request", lambda request: asked.append(request.url))
            locks.held("other")
            page.wait_for_timeout(1_000)  # five refreshes
            assert asked == []
            page.click("#mongolock-now")  # asked for, it looks once
            page.wait_for_selector("#now [data-key='other']", timeout=15_000)
            assert "Paused" in page.inner_text("#mongolock-refreshing")
            page.keyboard.press("Tab")
            page.click("#mongolock-pause")
            settled(page, "document.getElementById('mongolock-control').dataset.state === 'live'")
            assert eventually(lambda: page.wait_for_timeout(50) or len(asked) >= 3)

    def test_away_and_back(self, visit: Visit, locks: Locks) -> None:
        """While the server does not answer, the page stays and says so. Afterwards it goes on."""
        locks.held("k")
        with visit(fails=True) as page:
            page.route("**/*part=live", lambda route: route.fulfill(status=503, body="away"))
            settled(page, "document.getElementById('mongolock-control').dataset.state === 'away'")
            assert "No answer" in page.inner_text("#mongolock-refreshing")
            assert page.locator("#now [data-key='k']").count() == 1
            page.unroute("**/*part=live")
            settled(page, "document.getElementById('mongolock-control').dataset.state === 'live'")


class TestEverybody:
    """The page can be used without JavaScript, without a mouse, on a narrow screen, and with low vision."""

    def test_keyboard(self, visit: Visit, locks: Locks) -> None:
        """Everything that can be pressed or scrolled is reached by Tab, and one sees where one is."""
        fill(locks)
        with visit(every=60) as page:
            wanted = {"mongolock-pause", "mongolock-now", "graph-scroll", "now-scroll"}
            page.focus("#mongolock-pause")
            reached = {"mongolock-pause"}
            for _ in range(120):
                page.keyboard.press("Tab")
                reached.add(page.evaluate("document.activeElement.id"))
                if page.evaluate("document.activeElement === document.body"):
                    break
            assert wanted <= reached
            page.focus("#now-scroll a")
            page.keyboard.press("Enter")
            page.wait_for_url("**/change/")

    @pytest.mark.parametrize("language", ["en", "de"])
    @pytest.mark.parametrize("width", [320, 390, 640, 768, 1280])
    def test_read(self, visit: Visit, locks: Locks, settings: Settings, width: int, language: str) -> None:
        """F146: For every incident of the demo, the page shows the key, the holder, the waiters and the time held as
        text. Each text has a box of its own that nothing covers or cuts."""
        settings.LANGUAGE_CODE = language
        incidents = {
            "import:books": ("the nightly import", "till 3"),
            "report:nightly": ("the nightly report", "month end"),
            "stock:north": ("van to the south", "van to the north"),
            "tickets": ("a report that hangs", "ticket 17"),
        }
        holds = (490, 41, 12, 130)
        for number, ((key, (holder_, waits)), held) in enumerate(zip(incidents.items(), holds, strict=True)):
            locks.add(
                key,
                [entry(number, label=holder_, held_for=held, host="worker-1.example.com", worker=f"h{number}")],
                [waiter(50 + number, label=waits, held_for=held - 8, host="worker-2.example.com", worker=f"w{number}")],
            )
        with visit(every=60, viewport={"width": width, "height": 844}) as page:
            for key, texts in incidents.items():
                row = page.locator(f"#now tr[data-key='{key}']")
                for text in (key, *texts, row.locator("td.mongolock-nowrap time").text_content()):
                    assert row.evaluate(READABLE, text), f"{text!r} of {key} cannot be read at {width} px"
            assert page.evaluate("document.documentElement.scrollWidth") <= width

    @pytest.mark.parametrize("width", [1280, 1440])
    def test_an_event_is_a_line(self, visit: Visit, history: Collection[dict[str, Any]], width: int) -> None:
        """F150: In the history each event has one line of facts, and its place and time below. The last column is in
        sight."""
        task = {"place": "task shop.tasks.export 7f3a0001-11b2-4c55-9f0e-8a1d00000001", "thread": "ForkPoolWorker-2"}
        who: dict[str, Any] = {"user": "anna", "host": "worker-1.example.com", "pid": 4711, **task}
        told = {**who, "token": TOKEN, "waited_ms": 75_000, "held_ms": 90_000}
        history.insert_many(
            [{**told, "key": "shop.report:nightly", "at": now(), "event": what} for what in ("granted", "lost")]
        )
        with visit("/admin/mongolock_history/lockevent/?event=all", viewport={"width": width, "height": 800}) as page:
            rows = page.locator("#result_list tbody tr")
            assert rows.count() == 2
            for number in range(2):
                assert rows.nth(number).bounding_box()["height"] < 65
            box = page.locator(".field-details").first.bounding_box()
            assert box["x"] + box["width"] <= width

    def test_an_event_on_a_telephone(self, visit: Visit, history: Collection[dict[str, Any]]) -> None:
        """F224: a card has no dashes for columns that it does not name."""
        history.insert_one({"key": "order:5", "at": now(), "event": "granted", "label": "nightly"})
        with visit("/admin/mongolock_history/lockevent/?event=all", viewport={"width": 390, "height": 844}) as page:
            said = page.locator("#result_list tbody tr").inner_text()
            assert "order:5" in said
            assert "–" not in said

    @pytest.mark.parametrize("width", [390, 1280])
    def test_no_name_is_cut(self, visit: Visit, locks: Locks, width: int) -> None:
        """F249: Each page shows the whole name of a holder and a waiter, its host, its process and its task."""
        facts: dict[str, Any] = {
            "label": "import of the catalog of everything " * 3,
            "host": "worker-17.eu-central.shop.internal",
            "place": "task shop.tasks.export_everything 3e59df37-918e-4d69-84ba-8a1d00000001",
            "user": "anna.of.the.night.shift@shop.example.org",
        }
        locks.add("order:5", [entry(1, left=32, worker="x", **facts)], [waiter(2, worker="y", **facts)])
        cut = """() => [...document.querySelectorAll("#content *")].filter((each) => {
          const style = getComputedStyle(each), hides = style.overflowX !== "visible" && style.overflowX !== "auto";
          return hides && each.clientWidth > 1 && each.scrollWidth > each.clientWidth + 1;
        }).map((each) => each.textContent)"""
        with visit(every=60, viewport={"width": width, "height": 844}) as page:
            for path in (PAGE, LIST, f"{LIST}order_3A5/change/"):
                page.goto(path)
                assert page.evaluate(cut) == [], path
                assert page.evaluate("document.documentElement.scrollWidth") <= width, path

    def test_boxes_show_whole_names(self, visit: Visit, locks: Locks) -> None:
        """F221: a key of the graph is never cut, nor is the host or the process of a thread."""
        long, host = f"import:{'catalog-of-everything/' * 6}2026", "worker-17.eu-central.shop.internal"
        locks.add(long, [entry(1, worker="x", host=host)], [waiter(2, worker="y", host=host)])
        locks.add("b", [entry(3, worker="y", host=host)], [waiter(4, worker="z", host=host)])
        with visit() as page:
            boxes = page.evaluate(
                """() => [...document.querySelectorAll(".mongolock-picture foreignObject")].map((outer) => {
                  const room = outer.getBoundingClientRect();
                  const inside = [...outer.querySelectorAll("b, small")].every((part) => {
                    const box = part.getBoundingClientRect();
                    const fits = part.scrollWidth <= part.clientWidth && box.height >= part.scrollHeight;
                    return fits && box.top >= room.top && box.bottom <= room.bottom;
                  });
                  return [outer.textContent, inside];
                })"""
            )
        assert {long, "b"} < {text for text, _inside in boxes}
        assert len([text for text, _inside in boxes if host in text]) == 3
        assert [text for text, inside in boxes if not inside] == []

    def test_a_quiet_site(self, visit: Visit, locks: Locks) -> None:
        """F150: With two held locks and no waiters, the dashboard fits on one screen. The index links to it."""
        for number in range(2):
            locks.add(f"order:{number}", [entry(number, left=30, held_for=3)], change={"contended": Int64(0)})
        with visit("/admin/", every=60, viewport={"width": 1280, "height": 800}) as page:
            page.click("#content-main a:text-is('Lock dashboard')")
            assert page.url.endswith(PAGE)
            box = page.locator("#content").bounding_box()  # beside it are the apps of the whole project
            assert box["y"] + box["height"] <= 800
            assert page.locator(".mongolock-danger").count() == 0

    @pytest.mark.usefixtures("ad")
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_axe(self, visit: Visit, locks: Locks, scheme: str) -> None:
        """axe finds no fault on any page of the lock admin, and the policy is kept."""
        axe = Axe()
        fill(locks)
        order = f"{LIST}order_3A5/change/"
        with visit(every=60, color_scheme=scheme) as page:
            found = {}
            for path in (PAGE, LIST, f"{LIST}?state=all", f"{LIST}?state=waited", f"{LIST}?state=free", order,
                         f"{LIST}?state=stale", f"{LIST}left_3Abehind/change/", f"{LIST}bad/change/",
                         f"{LIST}others/", f"{LIST}order_3A5/history/",
                         "/admin/django_mongolock/"):  # fmt: skip
                answer = page.goto(path)
                assert answer.ok, path
                assert page.url.endswith(path), "it led elsewhere"
                found[path] = violations(axe.run(page))
            page.goto(order)
            page.click(".mongolock-next a[href*=force-release]")
            found["force release"] = violations(axe.run(page))
            locks.collection.delete_many({})
            for path in (PAGE, LIST):
                page.goto(path)
                found[f"{path}, empty"] = violations(axe.run(page))
            told = [f"{path}: {violation}" for path, what in found.items() for violation in what]
            assert not told, "\n".join(told)


def violations(found: dict[str, Any]) -> list[str]:
    return [
        f"{violation['id']}: {node['html'][:160]} {node['failureSummary'][:200]}"
        for violation in found["violations"]
        for node in violation["nodes"]
    ]
