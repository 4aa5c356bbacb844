"""Flows that export ads, in processes of their own, some of which are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import pytest
from django.db import connections
from pymongo.collection import Collection
from pytest_django import Settings
from pytest_django.live_server_helper import LiveServer

from django_mongolock.documents.updates import process_of
from django_mongolock.engine.protocol.processes import fate
from testproject.external import views
from testproject.external.models import Call, ShownAd
from testproject.mongo import database
from testproject.shop import audit, services
from testproject.shop.models import Ad, ad_exports
from tests.support.waiting import eventually

WITH_MONGO = pytest.mark.django_db(databases=["default", "mongo"], transaction=True)
FAILED = Ad.ExportStatus.FAILED, Ad.ExportStatus.WITHDRAW_FAILED
#: Within how many seconds the call that a killed run has sent begins at the service.
BEGUN: Final = 1.0
#: The calls that the service works on: the ad of each, and its thread.
_under_way: Final[set[tuple[str, int]]] = set()


@pytest.fixture
def external(live_server: LiveServer, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The external service over HTTP; quick, and sometimes refusing."""
    answer = views._answer

    def noted(request: Any, ad_id: str, *rest: Any) -> Any:
        call = ad_id, threading.get_ident()
        _under_way.add(call)
        try:
            return answer(request, ad_id, *rest)
        finally:
            _under_way.discard(call)

    monkeypatch.setattr(views, "_answer", noted)
    settings.EXTERNAL_URL = f"{live_server.url}/external"
    settings.EXTERNAL_FAILURES = 0.02
    settings.EXTERNAL_DELAY = (0.0, 0.03)
    return settings


@dataclass
class Story:
    """What the processes said: the accepted events of each ad, newest last; how many runs were killed; problems."""

    accepted: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    events: int = 0
    killed: int = 0
    refused: int = 0
    problems: list[str] = field(default_factory=list)
    ended: bool = False

    def read(self, said: dict[str, Any]) -> None:
        """Take in one line."""
        if "ad" in said:
            self.accepted.setdefault(said["ad"], []).append(said)
        elif "killed" in said:
            self.events, self.killed, self.ended = said["events"], said["killed"], True
        self.refused += "refused" in said
        self.problems += [said["problem"]] if "problem" in said else []

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


def process(settings: Settings, locking: bool, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """A process on the test's databases."""
    env = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "testproject.settings",
        "MONGODB_NAME": connections["mongo"].settings_dict["NAME"],
        "EXTERNAL_URL": settings.EXTERNAL_URL,
        "SHOP_LOCKING": str(locking),
        **environment,
    }
    argv = [sys.executable, "-m", "tests.documents.export_flows", *map(str, arguments)]
    return subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@contextmanager
def aged() -> Iterator[None]:
    """Have the ads of runs that were killed be stale soon, instead of after `stale_after`: when the service has
    finished their calls. Those of living runs are not, however slow the machine is."""
    ads, dead, over = database()[Ad._meta.db_table], dict[Any, float](), threading.Event()

    def age() -> None:
        while not over.wait(0.05):
            for ad in ads.find({"exportStatus": {"$in": list(ad_exports.rules.pending)}, "lockedBy": {"$ne": None}}):
                attempt, calls = ad["lockedByToken"], {ad_id for ad_id, _ in _under_way.copy()}
                if fate(process_of(attempt)) == "gone":
                    since = dead.setdefault(attempt, time.monotonic())
                    if time.monotonic() > since + BEGUN and str(ad["_id"]) not in calls:
                        past = {"$set": {"lockTimestamp": datetime(2000, 1, 1, tzinfo=UTC)}}
                        ads.update_one({"_id": ad["_id"], "lockedByToken": attempt}, past)

    thread = threading.Thread(target=age)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def play(settings: Settings, *, events: int, ads: int, kills: int, locking: bool, stale_after: float = 60.0) -> Story:
    """Run the story: four flows, each with two living runs. With locking, until every ad is settled."""
    ids = [str(services.create_ad(str(number // 5), f"ad {number}", "", 1).pk) for number in range(ads)]
    story = Story()
    environment = {"SHOP_STALE_AFTER": str(stale_after)}
    running = process(settings, locking, "supervise", events, kills, 0.02 if kills else 0.0, *ids, **environment)
    assert running.stdout is not None
    assert running.stdin is not None
    running.stdout.readline()
    running.stdin.write("\n")
    running.stdin.flush()
    for line in running.stdout:
        story.read(json.loads(line))
        if story.ended:
            break
    rest: list[str] = []
    reader = threading.Thread(target=lambda: rest.extend(running.stdout or ()))
    reader.start()
    try:
        unsettled = Ad.objects.filter(export_status__in=[*FAILED, *ad_exports.rules.pending])
        assert not locking or eventually(lambda: not unsettled.exists(), 90), list(unsettled.values())
    finally:
        running.stdin.close()
        reader.join(60)
    assert running.wait(30) == 0
    for line in rest:
        story.read(json.loads(line))
    return story


@pytest.mark.long
@WITH_MONGO
def test_processes_lose_no_increment(collection: Collection[dict[str, Any]], settings: Settings) -> None:
    """Four processes × 25 increments by read and write, in both faces: none is lost, and some had to come again. Each
    has raised the version twice: when it was granted, and when it ended."""
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
    assert (found["number"], found["documentVersion"], found["state"]) == (100, 1 + 2 * 100, "counted")
    assert sum(one["refused"] for one in said) > 0


def assert_right(story: Story) -> None:
    """Every final state is the one of the last accepted event, no call met another one of the same ad, and whoever was
    killed left nothing behind. An ad demands nothing while none of its events was accepted: a kill may have been first.
    """
    found = audit.judge()
    wrong_finals = [pk for pk in found.wrong_finals if pk in story.accepted]
    assert story.problems == []
    assert story.wrong_finals() == {}
    assert story.exports_after_deletion() == []
    assert (found.wrong_exports, found.wrong_withdrawals, found.overlaps, wrong_finals) == ([], [], [], [])
    assert not Ad.objects.exclude(locked_by=None).exists()


@pytest.mark.long
@WITH_MONGO
@pytest.mark.timeout(240)
def test_short(external: Settings) -> None:
    """Four flows with two living runs each, 40 events on 20 ads, and 6 runs that are killed."""
    with aged():
        story = play(external, events=40, ads=20, kills=6, locking=True)
    assert_right(story)
    assert story.killed >= 6


@WITH_MONGO
@pytest.mark.long
@pytest.mark.timeout(240)
def test_short_without_lock(external: Settings) -> None:
    """The same flows without the lock in the ad leave ads in the wrong state, here or at the external service."""
    external.EXTERNAL_DELAY = (0.0, 0.1)
    story = play(external, events=100, ads=3, kills=0, locking=False)
    found = audit.judge()
    assert story.wrong_finals() or found.wrong_exports
    assert found.overlaps


@WITH_MONGO
@pytest.mark.program
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("locking", [True, False])
def test_long(external: Settings, locking: bool) -> None:
    """200 ads, four flows with two living runs each, 101 kills: right with the lock in the ad, wrong without it."""
    kills = 101 if locking else 0
    story = play(external, events=600, ads=200 if locking else 20, kills=kills, locking=locking, stale_after=10)
    found = audit.judge()
    facts = {"accepted": sum(map(len, story.accepted.values())), "events": story.events, "killed": story.killed}
    facts |= {"refused": story.refused} | found.counts() | {"wrong_states": len(story.wrong_finals())}
    sys.stdout.write(f"{facts}\n")  # shown by -s
    if locking:
        assert_right(story)
        assert story.killed >= kills
    else:
        assert story.wrong_finals() or found.wrong_exports
        assert found.overlaps
