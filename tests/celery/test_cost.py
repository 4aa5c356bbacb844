"""What the processes of a worker cost while they take locks, wait and are idle: connections and threads."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests import parts
from tests.celery import app as tasks
from tests.celery.conftest import MakePlace
from tests.celery.workers import Place
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.long,
    parts.needs("Redis"),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the connections of a process"),
]

ESTABLISHED = "01"


class Costs:
    """The processes of a worker's pool."""

    def __init__(self, here: Place, mongo: str) -> None:
        parent = here.workers[0].process.pid
        self.pids = [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
        self.port = urlsplit(mongo).port or 27017

    def connections(self) -> list[int]:
        """How many connections to MongoDB each of them has."""
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
        there = f":{self.port:04X}"
        open_ones = {f"socket:[{each[9]}]" for each in lines if each[2].endswith(there) and each[3] == ESTABLISHED}
        return [len(open_ones & self._files(pid)) for pid in self.pids]

    def _files(self, pid: int) -> set[str]:
        links = set()
        for file in Path(f"/proc/{pid}/fd").iterdir():
            try:
                links.add(str(file.readlink()))
            except FileNotFoundError:  # closed meanwhile
                continue
        return links

    def threads(self) -> list[int]:
        """How many threads each of them has, its main thread included."""
        return [len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in self.pids]

    def tell(self, when: str) -> None:
        """Print the figures."""
        found = [dict(sorted(Counter(each).items())) for each in (self.connections(), self.threads())]
        print(f"\n{when}: connections {found[0]}, threads {found[1]} (number: processes)")  # noqa: T201 - figures


@pytest.mark.parametrize("options", ["", "serverMonitoringMode=poll"])
def test_idle_processes(place: MakePlace, mongo_uri: str, name: str, options: str) -> None:
    """A process has no connection before its first lock, at most four later, and after a minute two or one."""
    here, count = place(mongo=f"{mongo_uri}&{options}" if options else ""), 3
    here.environment["TEST_IDLE_SECONDS"] = "1"
    here.start(concurrency=count)
    costs = Costs(here, mongo_uri)
    costs.tell("started")
    assert set(costs.connections()) == {0}
    monitors = 1 if options else 2
    for number in range(3 * count):
        tasks.early.delay(f"{name}-{number}", "own", 0.5)
    assert eventually(lambda: here.story.count("end", name="own") == 3 * count, 120), here.logs()
    costs.tell("each with a lock")
    assert set(costs.connections()) == {monitors + 1}
    for _ in range(count + 1):
        tasks.inside.delay(name, "wait", 0.4)
    assert eventually(lambda: set(costs.connections()) == {monitors + 2}, 30)
    costs.tell("waiting for one lock")
    assert max(costs.threads()) < monitors + 7
    assert eventually(lambda: here.story.count("end", name="wait") == count + 1, 120), here.logs()
    assert eventually(lambda: set(costs.connections()) == {monitors}, 20)
    costs.tell("idle")
