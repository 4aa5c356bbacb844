"""What the export flows run in processes of their own: ``python -m tests.documents.export_flows ROLE ARGUMENTS…``."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import threading
import time
from typing import Any

import django
from pymongo import MongoClient

django.setup()

from django.core.management import call_command  # noqa: E402

from django_mongolock import DocumentChanged, DocumentHeld, DocumentLock  # noqa: E402
from django_mongolock.documents import HeldDocument  # noqa: E402
from testproject.shop import ad_events, services  # noqa: E402
from testproject.shop.models import Ad  # noqa: E402

tell = services.tell
KILLS = ("before", "during", "after")


def say(**facts: Any) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Teller:
    """Tells the service, and the test what was accepted; and sometimes dies, before, while or after it does."""

    def __init__(self, risk: float, die_at: int) -> None:
        self.risk, self.die_at, self.told = risk, die_at, 0

    def __call__(self, ad: Ad) -> Ad.ExportStatus:
        self.told += 1
        wanted = services.wanted(ad)
        say(ad=str(ad.pk), version=ad.document_version, deleted=ad.deleted, price=wanted.price if wanted else None)
        dies = random.choice(KILLS) if self.told == self.die_at or random.random() < self.risk else ""
        if dies == "before":
            die()
        if dies == "during":
            threading.Timer(0.004, die).start()
        status = tell(ad)
        if dies:
            die()
        return status


def flow(events: str, risk: str, die_at: str, *ads: str) -> None:
    """So many random events on these ads."""
    services.tell = Teller(float(risk), int(die_at))
    say(ready=True)
    sys.stdin.readline()
    for _ in range(int(events)):
        ad, chance = random.choice(ads), random.random()
        say(event=True)
        if chance < 0.01:
            ad_events.change(ad, deleted=True)
        elif chance < 0.03:
            ad_events.switch_all(random.choice("78"), opted_in=random.random() < 0.7)
        elif chance < 0.2:
            ad_events.change(ad, opted_in=random.random() < 0.6)
        else:
            ad_events.change(ad, price=random.randint(1, 999))


def count(times: str, collection: str, face: str) -> None:
    """Raise a number so many times by reading and writing, which only the lock keeps apart from the others."""
    client: MongoClient[dict[str, Any]] = MongoClient(os.environ["MONGODB_URI"])
    raw = client["mongolock_tests"][collection]
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


def sweeper() -> None:
    """Sweep and retry, until told to end."""
    ended = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=listen, daemon=True).start()
    while not ended.wait(0.3):
        call_command("clear_stale_locks", interactive=False, json=True)
        ad_events.retry_failed()


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    if role == "flow":
        flow(*arguments)
    elif role == "count":
        count(*arguments)
    else:
        sweeper()
