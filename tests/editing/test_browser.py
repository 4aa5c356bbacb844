"""Edit locks in real browsers, with two people or two tabs in one form, in all possible ways."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from axe_core_python import sync_playwright
from django.contrib.auth.models import User
from django.contrib.sessions.backends.base import UpdateError
from django.core.signals import request_finished, request_started
from django.db import OperationalError
from django.test import Client
from playwright.sync_api import expect
from pytest_django import Settings
from pytest_django.live_server_helper import LiveServer

from testproject.shop.models import Order
from tests.editing.conftest import set_locks
from tests.editing.staff import holders, page_of, staff
from tests.support.browsing import MIDDLEWARE, browser
from tests.support.lock_documents import Locks
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "mongo"]),
    pytest.mark.long,
]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser for all tests of this module."""
    with browser() as running:
        yield running


@pytest.fixture(autouse=True)
def _quick(chromium: Any, settings: Settings, locks: Locks) -> None:
    """Set beats that a test can wait for."""
    set_locks(settings, EDIT_BEAT=0.3, EDIT_LEASE=30)
    settings.MIDDLEWARE = [MIDDLEWARE, *settings.MIDDLEWARE]


class Person:
    """Somebody with a browser of his own, in which he is logged in."""

    def __init__(
        self, chromium: Any, base: str, name: str, *permissions: str, superuser: bool = False, **options: Any
    ) -> None:
        self.context = chromium.new_context(base_url=base, **options)
        self.context.set_default_timeout(10_000)
        self.client: Client = patiently(lambda: staff(name, *permissions, superuser=superuser))
        self.context.add_cookies([{"name": "sessionid", "value": self.client.cookies["sessionid"].value, "url": base}])
        self.problems: list[str] = []

    def open(self, address: str) -> Any:
        """A tab with this page."""
        tab = self.context.new_page()
        tab.on("console", self._note)
        tab.on("pageerror", lambda error: self.problems.append(str(error)))
        tab.goto(address)
        return tab

    def _note(self, message: Any) -> None:
        if "Content Security Policy" in message.text or "Content-Security-Policy" in message.text:
            self.problems.append(message.text)


class Requests:
    """The requests that the server is answering. SQLite refuses to empty its tables after a test while there are
    any."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.last = 0.0

    def started(self, **kwargs: object) -> None:
        self.threads.add(threading.get_ident())
        self.last = time.monotonic()

    def finished(self, **kwargs: object) -> None:
        self.threads.discard(threading.get_ident())
        self.last = time.monotonic()

    def are_over(self) -> bool:
        """Return whether all requests have ended, including those of a closed tab."""
        return not self.threads and time.monotonic() - self.last > 0.3


@pytest.fixture
def requests(live_server: LiveServer) -> Iterator[Requests]:
    """The requests of this test."""
    requests = Requests()
    request_started.connect(requests.started)
    request_finished.connect(requests.finished)
    yield requests
    request_started.disconnect(requests.started)
    request_finished.disconnect(requests.finished)


@pytest.fixture
def people(chromium: Any, live_server: LiveServer, requests: Requests) -> Iterator[Callable[..., Person]]:
    """Return a function that makes people. Their pages may not break the policy, or raise."""
    made: list[Person] = []

    def make(name: str, *permissions: str, **options: Any) -> Person:
        made.append(Person(chromium, live_server.url, name, *permissions, **options))
        return made[-1]

    yield make
    for person in made:
        person.context.close()
    assert eventually(requests.are_over)
    assert [person.problems for person in made if person.problems] == []


def says(tab: Any, text: str) -> None:
    """Wait until the panel says so."""
    expect(tab.locator('[data-part="text"]')).to_contain_text(text, timeout=20_000)


def save(tab: Any, then: str = "**/shop/order/") -> None:
    """Press the button, and wait until the list is there."""
    tab.click("[name=_save]")
    tab.wait_for_url(then)


def take_over(tab: Any) -> None:
    """Take the lock from the editor, and wait until the page says so. The page may be a new one."""
    tab.click("summary")
    tab.click("text=Yes, take over")
    says(tab, "You are editing this.")


def patiently(call: Callable[[], Any]) -> Any:
    """Retry *call*. SQLite does not wait when threads of the server share its memory."""
    for _ in range(50):
        with suppress(OperationalError, UpdateError):  # as sessions call it
            return call()
        time.sleep(0.02)
    return call()


def item_of(order: Order) -> str:
    patiently(order.refresh_from_db)
    return order.item


def test_busy_until_it_is_free(people: Callable[..., Person], order: Order) -> None:
    """The second one reads. When the first one saves, the second page says so by itself, and may edit the new state."""
    first, second = people("anna").open(page_of(order)), people("ben").open(page_of(order))
    says(first, "You are editing this.")
    says(second, "This is being edited by anna.")
    assert second.locator("[name=item]").count() == 0
    panel, links = (second.locator(each).bounding_box() for each in (".mongolock-editing", ".object-tools"))
    assert panel["y"] + panel["height"] <= links["y"]
    before = second.locator('[data-part="detail"]').inner_text()
    expect(second.locator('[data-part="detail"]')).not_to_have_text(before)
    first.fill("[name=item]", "car")
    save(first)
    says(second, "It is free now")
    second.click("text=Edit it now")
    says(second, "You are editing this.")
    assert second.input_value("[name=item]") == "car"


@pytest.mark.parametrize(
    "way", ["enter", *(pytest.param(way, marks=pytest.mark.program) for way in ("save", "take over"))]
)
def test_refused_and_on(people: Callable[..., Person], order: Order, settings: Settings, way: str) -> None:
    """A save that comes before the beat about the loss is refused. Later the page works like any other."""
    set_locks(settings, EDIT_BEAT=20, EDIT_LEASE=120)
    first = people("anna", "take_over_edit_lock").open(page_of(order))
    first.fill("[name=item]", "car")
    set_locks(settings, EDIT_BEAT=0.3)
    second = people("boss", "take_over_edit_lock").open(page_of(order))
    take_over(second)
    first.click("[name=_save]")
    lost = first.locator(".errorlist.nonfield li", has_text="Not saved: this is now being edited by boss.")
    expect(lost).to_be_visible()
    says(first, "This is now being edited by boss. What you typed is still here")
    saving, taking = first.locator("[name=_save]"), first.locator("text=Take over and save")
    delete = first.locator("a.deletelink")
    assert saving.get_attribute("aria-disabled") == "true"
    assert delete.is_hidden()
    first.press("[name=item]", "Enter")  # is not the button that takes over
    assert taking.is_visible()
    assert [holder["user"] for holder in holders(order)] == ["boss"]
    second.fill("[name=item]", "boat")
    save(second)
    first.click("text=Continue editing")
    says(first, "it was changed meanwhile")
    assert first.locator(".errorlist, .errornote").count() == 0
    assert taking.is_hidden()
    assert saving.get_attribute("aria-disabled") is None
    assert delete.is_visible()
    if way == "take over":  # pressed in the very moment in which it goes
        taking.evaluate("button => button.form.requestSubmit(button)")
    elif way == "save":
        saving.click()
    else:
        first.press("[name=item]", "Enter")
    said = "Not saved: this was changed while you were editing it. Changed meanwhile: Item."
    expect(first.locator(".errorlist.nonfield")).to_contain_text(said)
    expect(first.locator('[data-part="text"]')).not_to_contain_text("Not saved")  # it is said once
    with first.context.expect_page() as opened:
        first.click("text=See what is stored now")
    assert "boat" in opened.value.inner_text("#order_form")
    opened.value.close()
    save(first)
    assert item_of(order) == "car"


def test_both_in_turn(people: Callable[..., Person], order: Order) -> None:
    """A user who lost the lock takes it back with the permission, and loses none of the typed text."""
    first = people("anna", "take_over_edit_lock").open(page_of(order))
    second = people("boss", "take_over_edit_lock").open(page_of(order))
    first.fill("[name=item]", "car")
    take_over(second)
    says(first, "This is now being edited by boss.")
    take_over(first)
    says(second, "This is now being edited by anna.")
    save(first)
    assert item_of(order) == "car"


def test_logout(people: Callable[..., Person], order: Order) -> None:
    """A logout in another tab frees the lock at once. The form keeps the typed text, and names the next step."""
    anna, ben = people("anna"), people("ben")
    first = anna.open(page_of(order))
    first.fill("[name=item]", "car")
    other = anna.open("/admin/")
    second = ben.open(page_of(order))
    says(second, "This is being edited by anna.")
    other.click("text=Log out")
    says(second, "It is free now")
    expect(first.locator('[data-part="offline"]')).to_be_visible()
    expect(first.locator('[data-part="text"]')).to_be_hidden()  # it is not known whether that is still so
    first.click("[name=_save]", force=True)
    assert first.input_value("[name=item]") == "car"
    other.goto("/admin/login/")
    user = patiently(lambda: User.objects.get(username="anna"))
    user.set_password("secret")
    patiently(user.save)
    other.fill("[name=username]", "anna")
    other.fill("[name=password]", "secret")
    other.press("[name=password]", "Enter")
    other.wait_for_url(lambda url: "login" not in url)
    says(first, "Your edit lock has ended")  # also under the token that the login has changed
    first.click("text=Continue editing")
    says(first, "You are editing this.")
    save(first)
    assert item_of(order) == "car"


def test_logged_out_while_it_is_saved(people: Callable[..., Person], order: Order, settings: Settings) -> None:
    """A logout may come before a beat has noticed it. After the login, the typed text is offered. Once it is saved, it
    is not."""
    set_locks(settings, EDIT_BEAT=30, EDIT_LEASE=120)
    anna = people("anna")
    tab = anna.open("/admin/")
    with tab.expect_response("**edit-lock=beat**"):  # its answer may bring the cookie again
        tab.goto(page_of(order))
    says(tab, "You are editing this.")
    tab.fill("[name=item]", "car")
    cookies = anna.context.cookies()
    anna.context.clear_cookies(name="sessionid")
    tab.click("[name=_save]")
    tab.wait_for_url("**/login/**")
    anna.context.add_cookies(cookies)
    tab.goto(page_of(order))
    assert tab.input_value("[name=item]") == "bike"
    tab.click("text=Put it into the form")
    save(tab)
    assert item_of(order) == "car"
    patiently(lambda: Order.objects.update(item="theirs"))
    tab.goto(page_of(order))
    says(tab, "You are editing this.")
    assert tab.locator('[data-part="draft"]').is_hidden()


@pytest.mark.parametrize("way", ["closed", "elsewhere"])
def test_left(people: Callable[..., Person], order: Order, way: str) -> None:
    """A closed tab, or another page in it, frees the lock at once, by a beacon."""
    first = people("anna").open(page_of(order))
    assert holders(order)
    if way == "closed":
        first.close(run_before_unload=True)
    else:
        first.goto("/admin/")
    assert eventually(lambda: not holders(order))


def test_reload_and_back(people: Callable[..., Person], order: Order) -> None:
    """The same tab has the lock again, after a reload and after a way there and back."""
    tab = people("anna").open(page_of(order))
    says(tab, "You are editing this.")
    for _ in range(3):
        tab.reload()
        says(tab, "You are editing this.")
    tab.wait_for_url(lambda url: "edit-tab" not in url)
    tab.goto("/admin/")
    tab.go_back()
    says(tab, "You are editing this.")
    tab.fill("[name=item]", "car")
    save(tab)
    assert item_of(order) == "car"
    tab.go_back()
    says(tab, "You are editing this.")


def test_back_forward_cache(people: Callable[..., Person], order: Order) -> None:
    """A page that the browser kept takes the lock again. If the lock is busy, the page says so."""
    anna, ben = people("anna"), people("ben")
    tab = anna.open(page_of(order))
    tab.fill("[name=item]", "car")
    # Headless chromium keeps no page, so its events are played here.
    name = tab.input_value("[name=edit_lock_tab]")
    tab.evaluate("dispatchEvent(new PageTransitionEvent('pagehide', {persisted: true}))")
    assert eventually(lambda: not holders(order))
    tab.evaluate("dispatchEvent(new PageTransitionEvent('pageshow', {persisted: true}))")
    assert eventually(lambda: len(holders(order)) == 1)
    expect(tab.locator("[name=edit_lock_tab]")).not_to_have_value(name)  # the answer is there
    says(tab, "You are editing this.")
    tab.evaluate("dispatchEvent(new PageTransitionEvent('pagehide', {persisted: true}))")
    assert eventually(lambda: not holders(order))
    ben.open(page_of(order))
    tab.evaluate("dispatchEvent(new PageTransitionEvent('pageshow', {persisted: true}))")
    says(tab, "This is now being edited by ben.")
    assert tab.input_value("[name=item]") == "car"


def test_second_tab(people: Callable[..., Person], order: Order) -> None:
    """The second tab shows its user as the editor, and may take over. The first tab is told."""
    anna = people("anna")
    first = anna.open(page_of(order))
    with anna.context.expect_page() as opened:  # with a copy of the first one's session storage
        first.evaluate("window.open(location.href)")
    second = opened.value
    says(second, "This is being edited by you, in another tab.")
    take_over(second)
    says(first, "This is now being edited by you, in another tab.")


def test_double_click(people: Callable[..., Person], order: Order) -> None:
    """The browser requests the page twice, and shows one. The page does not report its own user as another editor."""
    anna = people("anna")
    anna.open(page_of(order)).close(run_before_unload=True)
    assert eventually(lambda: not holders(order))
    tab = anna.open("/admin/shop/order/")
    tab.dblclick("th.field-pk a")
    says(tab, "You are editing this.")


def test_idle(people: Callable[..., Person], order: Order, settings: Settings) -> None:
    """After a time without a key press, the lock is free for others. One click goes on."""
    set_locks(settings, EDIT_IDLE=1)
    tab = people("anna").open(page_of(order))
    tab.fill("[name=item]", "car")
    says(tab, "Nothing was typed for")
    assert holders(order) == []
    assert tab.input_value("[name=item]") == "car"
    set_locks(settings, EDIT_IDLE=1_800)
    tab.click("text=Continue editing")
    says(tab, "You are editing this.")
    assert len(holders(order)) == 1


def test_draft(people: Callable[..., Person], order: Order) -> None:
    """Unsaved text is offered again in the same tab, and ends with the save."""
    tab = people("anna").open(page_of(order))
    tab.fill("[name=item]", "car")
    tab.select_option("[name=state]", "paid")
    assert eventually(lambda: "car" in tab.evaluate("JSON.stringify(sessionStorage)"))
    tab.reload()
    says(tab, "You are editing this.")
    assert tab.input_value("[name=item]") == "bike"
    tab.click("text=Put it into the form")
    assert (tab.input_value("[name=item]"), tab.input_value("[name=state]")) == ("car", "paid")
    tab.click("text=Save and continue editing")
    says(tab, "You are editing this.")
    assert item_of(order) == "car"
    assert tab.locator('[data-part="draft"]').is_hidden()
    assert "draft" not in tab.evaluate("JSON.stringify(sessionStorage)")


def test_draft_of_another(people: Callable[..., Person], order: Order) -> None:
    """F208: A draft belongs to its user. The next user in the same tab is offered nothing, and finds nothing."""
    anna = people("anna")
    tab = anna.open(page_of(order))
    tab.fill("[name=item]", "private")
    assert eventually(lambda: "private" in tab.evaluate("JSON.stringify(sessionStorage)"))
    ben = patiently(lambda: staff("ben"))
    anna.context.clear_cookies()
    base = tab.evaluate("location.origin")
    anna.context.add_cookies([{"name": "sessionid", "value": ben.cookies["sessionid"].value, "url": base}])
    tab.goto(page_of(order))
    tab.wait_for_selector("[data-mongolock-editing]")
    assert tab.locator('[data-part="draft"]').is_hidden()
    assert "private" not in tab.evaluate("JSON.stringify(sessionStorage)")


#: Colours fade to those of another scheme, or to those of a link with the focus.
FADED = """async () => {
    await new Promise(resolve => requestAnimationFrame(() => requestAnimationFrame(resolve)));
    await Promise.allSettled(document.getAnimations().map(animation => animation.finished));
}"""


def accessible(tab: Any, axe: str, *schemes: str) -> None:
    """Axe finds nothing, in light, in dark."""
    for scheme in schemes:
        tab.emulate_media(color_scheme=scheme)
        tab.evaluate(FADED)
        tab.evaluate(axe)
        found = tab.evaluate("axe.run(document.querySelector('main'))")["violations"]
        assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found] == []


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.program)])
def test_accessible(people: Callable[..., Person], order: Order, *, whole: bool) -> None:
    """Every state of the panel is accessible, in the admin and outside of it. By default, only the reader and a refused
    save are checked."""
    schemes = ("light", "dark") if whole else ("dark",)
    more = schemes if whole else ()
    axe = Path(sync_playwright.__file__).with_name("axe.min.js").read_text()
    anna, boss = people("anna", bypass_csp=True), people("boss", "take_over_edit_lock", bypass_csp=True)
    first, second = anna.open(page_of(order)), boss.open(page_of(order))
    accessible(first, axe, *more)
    second.keyboard.press("Tab")  # all of it by the keyboard, too
    second.focus("summary")
    second.keyboard.press("Enter")
    accessible(second, axe, *schemes)
    first.fill("[name=item]", "car")
    second.focus("text=Yes, take over")
    second.keyboard.press("Enter")
    says(first, "This is now being edited by boss.")
    accessible(first, axe, *more)
    second.fill("[name=item]", "boat")
    save(second)
    first.click("text=Continue editing")
    says(first, "changed meanwhile")
    first.click("[name=_save]")
    expect(first.locator(".errorlist.nonfield")).to_contain_text("Not saved")
    accessible(first, axe, *schemes)
    accessible(anna.open(f"/own/{order.pk}/"), axe, *more)
