"""The demo as a person starts it: in a process of its own, with everything that it starts."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from django.contrib.auth.models import User
from django.test import Client
from pytest_django import Settings

from testproject.demo.browser import Browser
from tests.support.browsing import browser
from tests.support.waiting import eventually

pytestmark = pytest.mark.long

#: For one run of the demo, in seconds. On a loaded machine it takes a minute to start and to end.
LIMIT = 300
DEMO = [sys.executable, "-m", "testproject.demo", "--port", "0"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the demo to its end."""
    return subprocess.run([*DEMO, *arguments], capture_output=True, text=True, timeout=LIMIT, check=False)


def number(report: str, name: str) -> int:
    """Read a number from the demo's table."""
    found = re.search(rf"^ *{name} +(\d+)", report, re.MULTILINE)
    assert found, report
    return int(found[1])


@pytest.mark.timeout(LIMIT + 30)
@pytest.mark.parametrize("kind", [[], ["--document-locks"]], ids=["named", "in the ads"])
def test_check_finds_nothing_wrong(kind: list[str]) -> None:
    """With locks: no wrong re-export, no overlap, a killed holder's lock is free in time, the pages answer."""
    ended = run("--check", "--seconds", "8", *kind)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert number(ended.stdout, "wrong re-exports") == 0
    assert number(ended.stdout, "overlaps") == 0
    assert number(ended.stdout, "calls to the external service") > 20


@pytest.mark.timeout(LIMIT + 30)
def test_without_locks_exports_go_wrong() -> None:
    """Without locks the same traffic goes on until it shows a wrong re-export; that is what it is expected to show."""
    ended = run("--check", "--no-locks", "--seconds", "2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert number(ended.stdout, "wrong re-exports") > 0


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_runs_until_its_end(end: signal.Signals) -> None:
    """It prints where everything is and how to log in; all that it started ends with it, however it ends."""
    with running_demo() as demo:
        text = read_until(demo, "Ctrl-C")
        base, password = re.search(r"(http://\S+)/\n", text), re.search(r"admin / (\S+)", text)
        assert base
        assert password
        person = Browser(base[1])
        person.login("/admin/login/", "admin", password[1])
        assert "Wrong re-exports" in person.get("/").text
        # web, beat, traffic, the watcher, the worker and its four children; the MongoDB is that of the test run
        eventually(lambda: len(descendants(demo.pid)) >= 9, 45)
        started = descendants(demo.pid)
        assert len(started) >= 9
        demo.send_signal(end)
        if end == signal.SIGTERM:  # told at once, for what follows may take ten seconds
            assert "Stopped" not in read_until(demo, "Stopping")
        assert demo.wait(60) == (0 if end == signal.SIGTERM else -end)
        assert eventually(lambda: not started & alive())


def test_taken_port() -> None:
    """A port that is taken is one line, not a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = run("--port", str(taken.getsockname()[1]))
    assert ended.returncode == 1
    assert "is taken" in ended.stderr
    assert "Traceback" not in ended.stderr


@contextmanager
def running_demo(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start the demo; end it at the latest with the test."""
    demo = subprocess.Popen([*DEMO, *arguments], stdout=subprocess.PIPE, text=True)
    with demo:
        try:
            yield demo
        finally:
            demo.terminate()
            demo.wait(60)


def read_until(process: subprocess.Popen[str], mark: str) -> str:
    """Return what the process prints, up to a line with *mark*."""
    assert process.stdout
    text = ""
    while mark not in text:
        line = process.stdout.readline()
        assert line, f"the demo ended: {text}"
        text += line
    return text


def descendants(pid: int) -> set[int]:
    """Return all processes that *pid* started, and those that they started."""
    parents = processes()
    found = {child for child, parent in parents.items() if parent == pid}
    return found.union(*(descendants(child) for child in found))


def alive() -> set[int]:
    """Return the processes of this machine."""
    return set(processes())


def processes() -> dict[int, int]:
    """Return the parent of each process that is not a zombie."""
    table = subprocess.run(["ps", "-eo", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = (line.split() for line in table.splitlines())
    return {int(pid): int(parent) for pid, parent, state in rows if not state.startswith("Z")}


@pytest.mark.program
@pytest.mark.timeout(LIMIT + 30)
def test_a_bad_night_in_a_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--incident`, by what it prints alone: each step is followed in a browser, and the next one comes by itself."""
    monkeypatch.setenv("MONGOLOCK_LEASE", "6")
    with browser() as running, running_demo("--incident") as demo:
        text = read_until(demo, "Ctrl-C")
        base, password = re.search(r"(http://\S+)/\n", text), re.search(r"admin / (\S+)", text)
        assert base
        assert password
        page = running.new_page(base_url=base[1])
        page.goto("/admin/login/?next=/")
        page.fill("#id_username", "admin")
        page.fill("#id_password", password[1])
        page.click("input[type=submit]")
        assert page.locator(".incidents button").count() == 5

        def follow(*buttons: str) -> None:
            look = re.search(r"look at  (\S+)", read_until(demo, "look at"))
            assert look
            page.goto(look[1])
            for button in buttons:
                page.click(button)
            if buttons:
                page.wait_for_selector("input[name=reason]")
                page.fill("input[name=reason]", "a bad night")
                page.keyboard.press("Enter")
                page.wait_for_selector(".messagelist")

        follow("text=Ask to release…")
        follow("text=Force release…")
        assert "Till 3 has the lock" in read_until(demo, "Till 3")
        follow()  # a process was killed: wait
        follow("tr:has-text('deadlock') a", "text=Ask to release…")
        follow("a:has-text('tickets')", "text=Force release…")
        read_until(demo, "5 of 5")
        follow()
        assert "exporting" in page.inner_text("#result_list").lower()
        page.check("input[name=_selected_action]")
        page.select_option("select[name=action]", label="Release the selected documents if their lock is stale")
        page.click("button[name=index]")
        assert "The night is over" in read_until(demo, "The night is over")


def test_incidents_are_for_the_staff_of_the_demo(client: Client, db: None, settings: Settings) -> None:
    """Their programs are started for no other user, and on no other site."""
    for staff, switched_on in ((False, True), (True, False)):
        settings.SHOP_INCIDENTS = switched_on
        client.force_login(User.objects.create(username=f"staff {staff}", is_staff=staff))
        assert client.get("/incidents/").status_code == 403
        assert client.post("/incidents/hung/").status_code == 403
    settings.SHOP_INCIDENTS = True
    assert client.post("/incidents/none/").status_code == 404
    assert [each["begun"] for each in client.get("/incidents/").json()["incidents"]] == [False] * 5
