"""``python -m testproject.screenshots``: the pictures in the docs, from the real demo with its traffic and an incident.

The incident: a nightly report holds its lock and waits for another one, people wait for the report, and a worker was
killed. The edit locks: a second person in another browser, and an order whose price a program changes.
To add a picture, add a `Shot` to `SHOTS`; ``--only NAME`` takes that one, ``--to FOLDER`` writes them elsewhere.

``--situations`` shows the pages for a person on call instead. The pictures are of each situation in `SITUATIONS`, at
two widths, light and dark. Nobody keeps these pictures. A person looks at them, and says what they cannot tell.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from django_mongolock.inspection.snapshot import SILENT_AFTER
from testproject.chromium import NoBrowserError, chromium
from testproject.demo import site
from testproject.demo.__main__ import _options as demo_options
from testproject.demo.__main__ import running_site

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
LOCKS = "/admin/django_mongolock/lock/"
DASHBOARD = "/admin/django_mongolock/lockdashboard/"
#: The address of a form with an edit lock. Each picture uses a new order.
ORDER = "/admin/shop/order/{order}/change/"
#: The seconds of traffic before the first picture, so that there is something to show.
WARM_UP = 20.0
WIDE, NARROW = 1100, 320
#: The programs of the incident, each with a label and the locks that it acquires one after the other.
CAST = [
    ("import of the catalog", "catalog:import"),
    ("nightly report", "report:nightly", "catalog:import"),
    ("till 3", "report:nightly"),
    ("till 7", "report:nightly"),
    ("month end", "report:nightly"),
]


@dataclass(frozen=True)
class Shot:
    """One picture.

    - height: the height of the shown part.
    - until: the last element to show, however high the page is.
    - before: actions on the page first.
    - shared: whether a second person has the page open already.
    """

    name: str
    path: str
    width: int = WIDE
    height: int = 800
    until: str = ""
    before: Callable[[Page], object] | None = None
    shared: bool = False


def click(selector: str) -> Callable[[Page], object]:
    """Click on something."""
    return lambda page: page.click(selector)


SHOTS = [
    Shot("dashboard", DASHBOARD, until="#now"),
    Shot("dashboard-narrow", DASHBOARD, width=NARROW, height=780),
    Shot("lock", f"{LOCKS}report_3Anightly/change/", height=820),
    Shot(
        "force-release",
        f"{LOCKS}report_3Anightly/change/",
        height=740,
        before=click(".mongolock-next a[href*=force-release]"),
    ),
    Shot("edit-lock", ORDER, height=640, shared=True),
]


def hold(running: site.Site, label: str, *keys: str, lease: float = 30.0) -> subprocess.Popen[bytes]:
    """Start a program that acquires the keys, one after the other. Return when it holds the last one, or waits."""
    from django_mongolock import lock_info

    argv = site.module("testproject.demo.night", "hold", label, *keys)
    program = running.processes.start(label, argv, patience=1.0, env={"MONGOLOCK_LEASE": str(lease)})
    lock = lock_info(keys[-1])
    while label not in [each.label for each in (*lock.holders, *lock.waiters)]:
        running.watch(0.2)
        lock = lock_info(keys[-1])
    return program


def works(running: site.Site, key: str) -> None:
    hold(running, "nightly import", key)
    hold(running, "till 3", key)


def slow(running: site.Site, key: str) -> None:
    """Hold the lock for longer than ten times before."""
    from django_mongolock import mongo_lock

    for _ in range(10):
        with mongo_lock(key, label="nightly import"):
            time.sleep(0.2)
    works(running, key)
    running.watch(5.0)


def silent(running: site.Site, key: str) -> None:
    """Stop the holder, and wait until it has missed its renewal."""
    program = hold(running, "nightly import", key, lease=80.0)
    hold(running, "till 3", key)
    program.send_signal(signal.SIGSTOP)
    time.sleep(80.0 * SILENT_AFTER)


def dead(running: site.Site, key: str) -> None:
    """Kill the holder, and wait until its lease has ended."""
    program = hold(running, "nightly import", key, lease=5.0)
    running.watch(2.0)  # its history is written
    program.kill()
    time.sleep(10.0)


def asked(running: site.Site, key: str) -> None:
    from django_mongolock.models import Lock

    works(running, key)
    Lock.objects.get(pk=key).ask_to_release("anna, in the admin: we deploy at 3")


def chain(running: site.Site, key: str) -> None:
    """Let the holder wait for another lock."""
    hold(running, "import of the catalog", "catalog")
    hold(running, "nightly import", key, "catalog")
    hold(running, "till 3", key)
    hold(running, "till 7", key)


#: The situations, each with a key that does not give it away.
SITUATIONS = {
    "import:books": works,
    "import:films": slow,
    "import:games": silent,
    "import:maps": dead,
    "import:music": asked,
    "import:tools": chain,
}


def show_situations(running: site.Site, browser: Browser, folder: Path, names: Sequence[str]) -> None:
    """Take the pictures of each situation, and end it."""
    from django_mongolock.inspection.display import quote_key
    from django_mongolock.models import Lock

    with ExitStack() as people:
        pages = {
            (width, scheme): visit(people.enter_context(person(browser, running, width, 800, scheme)), site.ADMIN,
                                   running, LOCKS)
            for width in (390, 1280) for scheme in ("light", "dark")
        }  # fmt: skip
        for key, situation in SITUATIONS.items():
            name = situation.__name__
            if names and name not in names:
                continue
            before = len(running.processes.names)
            situation(running, key)
            lock, confirm = f"{LOCKS}{quote_key(key)}/change/", f"{LOCKS}force-release/?key={key}"
            addresses = {"dashboard": DASHBOARD, "list": LOCKS, "lock": lock, "confirm": confirm}
            for (width, scheme), page in pages.items():
                for shown, address in addresses.items():
                    page.goto(address)
                    page.screenshot(path=folder / f"{name}-{shown}-{width}-{scheme}.png", full_page=True)
            for program in reversed(running.processes.names[before:]):
                running.processes.stop(program)
            Lock.objects.filter(pk=key).force_release()  # no holder that was killed is in the next pictures
            print(name, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Take the pictures, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m testproject.screenshots", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--to", type=Path, default=IMAGES, help="folder of the pictures (docs/images)")
    parser.add_argument("--only", action="append", choices=[shot.name for shot in SHOTS], help="only this one")
    parser.add_argument("--situations", nargs="*", metavar="NAME", help="the situations of a lock, into --to")
    options = parser.parse_args(argv)
    wanted = [shot for shot in SHOTS if not options.only or shot.name in options.only]
    options.to.mkdir(parents=True, exist_ok=True)
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"  # Playwright has an event loop in this thread
    try:
        with running_site(demo_options(["--port", "0"])) as running, chromium() as browser:
            if options.situations is not None:
                show_situations(running, browser, options.to, options.situations)
                return 0
            incident(running)
            running.watch(WARM_UP)
            for shot in wanted:
                for scheme in ("light", "dark"):
                    take(browser, running, shot, scheme, options.to)
    except NoBrowserError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def incident(running: site.Site) -> None:
    """Play an incident with long holders, waiters, a chain of locks, and a program that was killed."""
    from testproject.demo.checks import kill_program  # Django is set up only now

    for label, *keys in CAST:
        hold(running, label, *keys)
    kill_program("invoices:2026-11")


def take(browser: Browser, running: site.Site, shot: Shot, scheme: str, folder: Path) -> None:
    """One picture of a page, as the superuser sees it."""
    address = shot.path.format(order=new_order())
    with ExitStack() as people:
        if shot.shared:
            visit(people.enter_context(browser.new_context(base_url=running.base)), site.EDITOR, running, address)
        context = person(browser, running, shot.width, shot.height, scheme)
        page = visit(people.enter_context(context), site.ADMIN, running, address)
        if shot.before is not None:
            shot.before(page)
        page.evaluate("scrollTo(0, 0)")
        page.wait_for_load_state("networkidle")
        path = folder / f"{shot.name}{'-dark' if scheme == 'dark' else ''}.png"
        box = page.locator(shot.until).bounding_box() if shot.until else None
        height = box["y"] + box["height"] if box else shot.height
        page.screenshot(path=path, full_page=True, clip={"x": 0, "y": 0, "width": shot.width, "height": height})
    shrink(path)
    print(f"{path} {path.stat().st_size // 1024} KB", flush=True)


def person(browser: Browser, running: site.Site, width: int, height: int, scheme: str) -> BrowserContext:
    """A browser of this size."""
    return browser.new_context(
        base_url=running.base,
        color_scheme="dark" if scheme == "dark" else "light",
        viewport={"width": width, "height": height},
    )


def new_order() -> int:
    """Make an order to edit, and return its number."""
    from django.contrib.auth.models import User

    from testproject.shop.models import Order

    buyer = User.objects.get(username=site.EDITOR)
    return int(Order.objects.create(buyer=buyer, item="train ticket", price=39).pk)


def visit(context: BrowserContext, name: str, running: site.Site, address: str) -> Page:
    """A user logs in and opens a page."""
    # Hide the list of the other models, because it says nothing about locks.
    context.add_init_script("localStorage.setItem('django.admin.navSidebarIsOpen', 'false')")
    page = context.new_page()
    page.goto(f"/admin/login/?next={address}")
    page.fill("#id_username", name)
    page.fill("#id_password", running.password)
    page.click("input[type=submit]")
    page.wait_for_selector("#logout-form")  # it is neither the login again nor an error of the server
    return page


def shrink(path: Path) -> None:
    """Make a picture small. A page has few colours."""
    from PIL import Image

    with Image.open(path) as picture:
        picture.convert("RGB").quantize(128).save(path, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
