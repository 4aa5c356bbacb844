"""Flows that export ads, in processes of their own, some of which are killed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from django.db import connections
from pymongo.collection import Collection
from pytest_django import Settings
from pytest_django.live_server_helper import LiveServer

from testproject.external.models import Call, ShownAd
from testproject.shop import audit, services
from testproject.shop.models import Ad, ad_exports
from tests.waiting import eventually

WITH_MONGO = pytest.mark.django_db(databases=["default", "mongo"], transaction=True)
FAILED = Ad.ExportStatus.FAILED, Ad.ExportStatus.WITHDRAW_FAILED


@pytest.fixture
def external(live_server: LiveServer, settings: Settings) -> Settings:
    """The external service over HTTP; quick, and sometimes refusing."""
    settings.EXTERNAL_URL = f"{live_server.url}/external"
    settings.EXTERNAL_FAILURES = 0.02
    settings.EXTERNAL_DELAY = (0.0, 0.03)
    return settings


@dataclass
class Story:
    """What the processes said: the accepted events of each ad, newest last; how many were killed; what was swept."""

    accepted: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    killed: int = 0
    swept: int = 0

    def wrong_finals(self) -> dict[str, str]:
        """The ads that do not stand, here or at the external service, as their last accepted event demands."""
        wrong = {}
        for ad in Ad.objects.filter(pk__in=list(self.accepted)):
            last = max(self.accepted[str(ad.pk)], key=lambda event: event["version"])
            shown = ShownAd.objects.filter(pk=str(ad.pk)).first()
            price = shown.content["price"] if shown and shown.shown else None
            status = "withdrawn" if last["price"] is None else "exported"
            if (ad.export_status, price, ad.deleted) != (status, last["price"], last["deleted"]):
                wrong[str(ad.pk)] = f"{last}: {ad.export_status}, shown with {price}, version {ad.document_version}"
        return wrong

    def exports_after_deletion(self) -> list[Call]:
        """Calls that showed an ad again after the withdrawal of the deleted one."""
        found = []
        for ad_id, events in self.accepted.items():
            deletion = min((event["version"] for event in events if event["deleted"]), default=None)
            calls = Call.objects.filter(ad_id=ad_id, sequence__isnull=False).order_by("sequence")
            gone = False
            for call in calls:
                gone |= deletion is not None and call.kind == Call.Kind.WITHDRAW and call.version >= deletion
                if gone and call.kind == Call.Kind.EXPORT:
                    found.append(call)
        return found


def process(settings: Settings, locking: bool, *arguments: object) -> subprocess.Popen[str]:
    """A process on the test's databases."""
    env = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "testproject.settings",
        "MONGODB_NAME": connections["mongo"].settings_dict["NAME"],
        "EXTERNAL_URL": settings.EXTERNAL_URL,
        "SHOP_LOCKING": str(locking),
        "SHOP_STALE_AFTER": "3",
    }
    argv = [sys.executable, "-m", "tests.documents.export_flows", *map(str, arguments)]
    return subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@contextlib.contextmanager
def sweeping(story: Story, settings: Settings) -> Iterator[None]:
    """Sweep and retry meanwhile, and until nothing is pending or failed any more."""
    sweeper = process(settings, True, "sweeper")
    try:
        yield
        unsettled = Ad.objects.filter(export_status__in=[*FAILED, *ad_exports.rules.pending])
        assert eventually(lambda: not unsettled.exists(), 60), list(unsettled.values())
    finally:
        out, _ = sweeper.communicate("", timeout=30)
    assert sweeper.returncode == 0
    for line in out.splitlines():
        if "documents" in (said := json.loads(line)):
            story.swept += sum(found["cleared"] for found in said["documents"])


def play(settings: Settings, *, flows: int, events: int, ads: int, locking: bool, risk: float, die_at: int) -> Story:
    """Run the story; a flow that was killed is started again for the rest of its events."""
    story = Story()
    ids = [str(services.create_ad("78"[number % 2], f"ad {number}", "", 1).pk) for number in range(ads)]

    together = threading.Barrier(flows)

    def supervise(number: int) -> None:
        rest, first = events, die_at if number == 0 else 0
        while rest > 0:
            running = process(settings, locking, "flow", rest, risk, first, *ids)
            assert running.stdout is not None
            running.stdout.readline()
            if rest == events:
                together.wait(60)
            out, _ = running.communicate("\n", timeout=500)
            said = [json.loads(line) for line in out.splitlines()]
            rest -= sum("event" in line for line in said)
            for line in said:
                if "ad" in line:
                    story.accepted.setdefault(line["ad"], []).append(line)
            assert running.returncode in (0, -9)
            story.killed += running.returncode == -9
            first = 0

    with sweeping(story, settings) if locking else contextlib.nullcontext(), ThreadPoolExecutor(flows) as pool:
        for done in [pool.submit(supervise, number) for number in range(flows)]:
            done.result()
    return story


@WITH_MONGO
def test_processes_lose_no_increment(collection: Collection[dict[str, Any]], settings: Settings) -> None:
    """Four processes × 25 increments by read and write, in both faces: none is lost, and some had to come again."""
    collection.insert_one({"_id": 1, "documentVersion": 1, "number": 0})
    faces = ("blocking", "async", "blocking", "async")
    started = [process(settings, True, "count", 25, collection.name, face) for face in faces]
    for one in started:
        assert one.stdout is not None
        one.stdout.readline()
    for one in started:
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
    said = [json.loads(one.communicate(timeout=60)[0]) for one in started]
    found = collection.find_one()
    assert found is not None
    assert (found["number"], found["documentVersion"], found["state"]) == (100, 101, "counted")
    assert sum(one["refused"] for one in said) > 0


def assert_right(story: Story) -> None:
    """Every final state is the one of the last accepted event; whoever was killed left nothing behind."""
    found = audit.judge()
    assert story.wrong_finals() == {}
    assert story.exports_after_deletion() == []
    assert (found.wrong_exports, found.wrong_withdrawals, found.overlaps) == ([], [], [])
    assert story.killed > 0
    assert story.swept >= story.killed
    assert not Ad.objects.exclude(locked_by=None).exists()


@WITH_MONGO
@pytest.mark.timeout(240)
def test_short(external: Settings) -> None:
    """Four flows × 25 events on six ads, and a flow that is killed in the middle of one."""
    assert_right(play(external, flows=4, events=25, ads=6, locking=True, risk=0.01, die_at=3))


@WITH_MONGO
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_short_without_lock(external: Settings) -> None:
    """The same flows without the lock in the ad leave ads in the wrong state, here or at the external service."""
    external.EXTERNAL_DELAY = (0.0, 0.1)
    story = play(external, flows=4, events=25, ads=3, locking=False, risk=0.0, die_at=0)
    found = audit.judge()
    assert story.wrong_finals() or found.wrong_exports
    assert found.overlaps


@WITH_MONGO
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("locking", [True, False])
def test_long(external: Settings, locking: bool) -> None:
    """Four flows × 500 events at random on fifty ads: right with the lock in the ad, wrong without it."""
    story = play(external, flows=4, events=500, ads=50, locking=locking, risk=0.005 if locking else 0.0, die_at=3)
    found = audit.judge()
    facts = {"accepted": sum(map(len, story.accepted.values())), "killed": story.killed, "swept": story.swept}
    sys.stdout.write(f"{facts | found.counts() | {'wrong_finals': len(story.wrong_finals())}}\n")  # shown by -s
    if locking:
        assert_right(story)
    else:
        assert story.wrong_finals() or found.wrong_exports
        assert found.overlaps
