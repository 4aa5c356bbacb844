"""The demo, started as a person does, in a process of its own, with all of its processes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from django.contrib.auth.models import User
from django.test import Client
from pytest_django import Settings

from testproject.demo.browser import Browser
from tests.support.programs import processes
from tests.support.waiting import eventually

pytestmark = pytest.mark.long

#: The seconds for one run of the demo. On a loaded machine it takes a minute to start and to end.
LIMIT = 300
DEMO = [sys.executable, "-m", "testproject.demo", "--port", "0"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DEMO, *arguments], capture_output=True, text=True, timeout=LIMIT, check=False)


def number(report: str, name: str) -> int:
    found = re.search(rf"^ *{name} +(\d+)", report, re.MULTILINE)
    assert found, report
    return int(found[1])


@pytest.mark.timeout(LIMIT + 30)
@pytest.mark.parametrize("kind", [[], ["--document-locks"]], ids=["named", "in the ads"])
def test_check_finds_nothing_wrong(kind: list[str]) -> None:
    """With locks, there is no wrong re-export and no overlap. A killed holder's lock is free in time, and the pages
    answer."""
    ended = run("--check", "--seconds", "8", *kind)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert number(ended.stdout, "wrong re-exports") == 0
    assert number(ended.stdout, "overlaps") == 0
    assert number(ended.stdout, "calls to the external service") > 20


@pytest.mark.timeout(LIMIT + 30)
def test_without_locks_exports_go_wrong() -> None:
    """Without locks, the same traffic goes on until it shows a wrong re-export. The demo expects that."""
    ended = run("--check", "--no-locks", "--seconds", "2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert number(ended.stdout, "wrong re-exports") > 0


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_runs_until_its_end(end: signal.Signals) -> None:
    """The demo prints its addresses and its login. All its processes end with it, however it ends."""
    with running_demo() as demo:
        text = read_until(demo, "Ctrl-C")
        base, password = re.search(r"(http://\S+)/\n", text), re.search(r"admin / (\S+)", text)
        assert base
        assert password
        person = Browser(base[1])
        person.login("/admin/login/", "admin", password[1])
        assert "Wrong re-exports" in person.get("/").text
        # web, beat, traffic, the watcher, the worker and its four children, without the MongoDB of the test run
        eventually(lambda: len(descendants(demo.pid)) >= 9, 45)
        started = descendants(demo.pid)
        assert len(started) >= 9
        demo.send_signal(end)
        if end == signal.SIGTERM:  # reported at once, because the rest may take ten seconds
            assert "Stopped" not in read_until(demo, "Stopping")
        assert demo.wait(60) == (0 if end == signal.SIGTERM else -end)
        assert eventually(lambda: not started & processes().keys())


@contextmanager
def running_demo(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start the demo, and end it at the latest with the test."""
    demo = subprocess.Popen([*DEMO, *arguments], stdout=subprocess.PIPE, text=True)
    with demo:
        try:
            yield demo
        finally:
            demo.terminate()
            demo.wait(60)


def read_until(process: subprocess.Popen[str], mark: str) -> str:
    """Return the output of the process, up to a line with *mark*."""
    assert process.stdout
    text = ""
    while mark not in text:
        line = process.stdout.readline()
        assert line, f"the demo ended: {text}"
        text += line
    return text


def descendants(pid: int) -> set[int]:
    """Return all processes that *pid* started, directly or not."""
    parents = processes()
    found = {child for child, parent in parents.items() if parent == pid}
    return found.union(*(descendants(child) for child in found))


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
