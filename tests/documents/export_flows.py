"""What the export flows run in processes of their own: ``python -m tests.documents.export_flows ROLE ARGUMENTS…``."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import random
import signal
import sys
import threading
import time
import traceback
from typing import Any

import django
from pymongo import MongoClient

django.setup()

from django.conf import settings  # noqa: E402

from django_mongolock.documents import DocumentLock, HeldDocument  # noqa: E402
from django_mongolock.documents.errors import DocumentChanged, DocumentHeld  # noqa: E402
from testproject.shop import ad_events, services  # noqa: E402
from testproject.shop.models import Ad  # noqa: E402
from tests.support import DATABASE  # noqa: E402

tell = services.tell
KILLS = ("before", "during", "after")


def say(**facts: Any) -> None:
    os.write(1, (json.dumps(facts) + "\n").encode())  # one call: several processes write here


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Teller:
    """Tells the service, and the test what was accepted; and sometimes dies, before, while or after it does."""

    def __init__(self, risk: float) -> None:
        self.risk = risk

    def __call__(self, ad: Ad) -> Ad.ExportStatus:
        wanted = services.wanted(ad)
        say(ad=str(ad.pk), version=ad.document_version, deleted=ad.deleted, price=wanted.price if wanted else None)
        dies = random.choice(KILLS) if random.random() < self.risk else ""
        if dies == "before":
            die()
        if dies == "during":
            threading.Timer(0.004, die).start()
        status = tell(ad)
        if dies:
            die()
        return status


#: The flows, and how many runs of each live at once.
FLOWS, RUNS = ("messages", "sellers", "api", "retry"), 2


def messages(ad: str) -> None:
    """A consumer of messages: an ad was edited, or deleted."""
    ad_events.change(ad, **({"deleted": True} if random.random() < 0.02 else {"price": random.randint(1, 999)}))


def sellers(ad: str) -> None:
    """A consumer of messages: all ads of a seller are switched."""
    ad_events.switch_all(Ad.objects.get(pk=ad).user_id, opted_in=random.random() < 0.7)


def api(ad: str) -> None:
    """A request: opt one ad in or out."""
    ad_events.change(ad, opted_in=random.random() < 0.6)


def retry(ad: str) -> None:
    """The retry job, with the sweep."""
    time.sleep(random.uniform(0.05, 0.2))
    ad_events.retry_failed()


class Board:
    """What the runs and their supervisor share: how many events each run has begun; and whether they shall end."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 4 * (len(FLOWS) * RUNS + 1))
        self._numbers = memoryview(self._shared).cast("i")

    def begin(self, run: int) -> None:
        self._numbers[run + 1] += 1

    @property
    def events(self) -> int:
        """How many events were begun; those of the retry job do not count."""
        return sum(self._numbers[1 : 1 + (len(FLOWS) - 1) * RUNS])

    @property
    def ends(self) -> bool:
        return bool(self._numbers[0])

    def end(self, level: int) -> None:
        """1: all end but the retry job; 2: that one, too."""
        self._numbers[0] = level

    def goes_on(self, run: int) -> bool:
        return self._numbers[0] < (1 if is_event(run) else 2)


def work(board: Board, run: int, risk: float, ads: list[str]) -> None:
    """One run of a flow: one event after the other, each on a random ad."""
    random.seed()
    event = (messages, sellers, api, retry)[run // RUNS]
    services.tell = Teller(risk)
    while board.goes_on(run):
        board.begin(run)
        try:
            event(random.choice(ads))
        except DocumentHeld:
            say(refused=True)


class Supervisor:
    """Two living runs of each flow. One that was killed is started again at once."""

    def __init__(self, events: str, kills: str, risk: str, *ads: str) -> None:
        self.events, self.kills, self.risk, self.ads = int(events), int(kills), float(risk), list(ads)
        self.board = Board()
        self.running: dict[int, int] = {}
        self.killed = 0

    def run(self) -> None:
        """Go on until there were so many events, and so many runs were killed: by themselves around a call of the
        service, and by the supervisor at any moment. The retry job goes on until the input ends."""
        say(ready=True)
        sys.stdin.readline()
        for run in range(RUNS * (len(FLOWS) if settings.SHOP_LOCKING else len(FLOWS) - 1)):
            self.start(run)
        threading.Thread(target=self.listen, daemon=True).start()
        reported = False
        while self.running or not reported:
            time.sleep(0.02)
            if self.killed < self.kills and random.random() < 0.1:
                os.kill(random.choice(list(self.running)), signal.SIGKILL)
            self.reap()
            if self.board.events >= self.events and self.killed >= self.kills and not self.board.ends:
                self.board.end(1)
            if not reported and self.board.ends and not any(map(is_event, self.running.values())):
                reported = True
                say(events=self.board.events, killed=self.killed)

    def start(self, run: int) -> None:
        if child := os.fork():
            self.running[child] = run
            return
        try:
            work(self.board, run, self.risk if self.killed < self.kills else 0.0, self.ads)
        except BaseException:  # noqa: BLE001 - it is in the report
            say(problem=traceback.format_exc())
        os._exit(0)

    def reap(self) -> None:
        for child in list(self.running):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                run = self.running.pop(child)
                if os.WIFSIGNALED(status):
                    self.killed += 1
                    if self.board.goes_on(run):
                        self.start(run)

    def listen(self) -> None:
        sys.stdin.read()
        self.board.end(2)


def is_event(run: int) -> bool:
    """Whether a run is of a flow that brings events: of any but the retry job."""
    return run < RUNS * FLOWS.index("retry")


def supervise(*arguments: str) -> None:
    """Run the flows."""
    Supervisor(*arguments).run()


def count(times: str, collection: str, face: str) -> None:
    """Raise a number so many times by reading and writing, which only the lock keeps apart from the others."""
    client: MongoClient[dict[str, Any]] = MongoClient(os.environ["MONGODB_URI"])
    raw = client[DATABASE][collection]
    lock = DocumentLock[dict[str, Any]](
        raw, state="state", pending={"counting": "failed"}, final=["counted"], stale_after=60
    )

    def raise_it(held: HeldDocument[dict[str, Any]]) -> None:
        number = held.instance["number"]
        time.sleep(0)
        raw.update_one({"_id": 1}, {"$set": {"number": number + 1}})

    async def count_async() -> None:
        async with lock.hold(raw.find_one(), "counting") as held:
            raise_it(held)

    say(ready=True)
    sys.stdin.readline()
    refused = 0
    done = 0
    while done < int(times):
        try:
            if face == "async":
                asyncio.run(count_async())
            else:
                with lock.hold(raw.find_one()) as held:
                    raise_it(held)
            done += 1
        except (DocumentChanged, DocumentHeld):
            refused += 1
            time.sleep(random.random() / 100)
    say(refused=refused)


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    if role == "supervise":
        supervise(*arguments)
    else:
        count(*arguments)
