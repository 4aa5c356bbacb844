"""A bad night, with incidents to practise on. Buttons on the start page begin them, and ``dev.py demo --incident`` in
turn.

Each incident has steps with things to look at and buttons to press. A step is over when the locks say that it was done.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.urls import reverse
from django.utils import timezone

from django_mongolock import lock_info, mongo_lock
from django_mongolock.history.models import LockEvent
from django_mongolock.inspection.display import quote_key
from django_mongolock.models import Lock
from testproject.shop.models import Ad

DASHBOARD = "admin:django_mongolock_lockdashboard_changelist"
EVENTS = "admin:mongolock_history_lockevent_changelist"
#: The number of waiters for tickets.
CROWD = 300
STALE_SINCE = timedelta(minutes=10)


@dataclass
class Run:
    """An incident that was begun, with its programs, its start, its next step, and whether the trouble is there."""

    programs: list[subprocess.Popen[bytes]] = field(default_factory=list)
    since: datetime = field(default_factory=timezone.now)
    step: int = 0
    is_ready: bool = False

    def start(self, program: str, label: str, *more: str) -> subprocess.Popen[bytes]:
        """Start a program of `testproject.demo.night`."""
        argv = [sys.executable, "-m", "testproject.demo.night", program, label, *more]
        self.programs.append(subprocess.Popen(argv, stdin=subprocess.DEVNULL))
        return self.programs[-1]

    def hold(self, label: str, key: str) -> subprocess.Popen[bytes]:
        """Start a program that holds *key*, and return when it does."""
        program = self.start("hold", label, key)
        self.since = _eventually(lambda: _holder(key, label)).acquired_at
        return program

    def earlier(self, label: str, key: str) -> None:
        """Hold *key* ten times for a moment, so that its document has a mean hold."""
        for _ in range(10):
            with mongo_lock(key, label=label, wait=60):
                time.sleep(0.2)

    def end(self) -> None:
        """End its programs."""
        for program in self.programs:
            program.terminate()
        for program in self.programs:
            program.wait()
        self.programs.clear()

    def happened(self, event: str, *keys: str) -> bool:
        """Return whether the history has such an event."""
        found = LockEvent.objects.filter(event=event, key__in=keys, at__gte=self.since)
        return bool(found.exists())


@dataclass(frozen=True)
class Step:
    """A step, with its text, its button, and its end."""

    look: Callable[[], str]
    press: str
    is_done: Callable[[Run], bool]


@dataclass(frozen=True)
class Incident:
    """Trouble, with its news, its beginning, its cure, and its lesson."""

    name: str
    title: str
    story: str
    begin: Callable[[Run], object]
    steps: tuple[Step, ...]
    lesson: str


def page(key: str) -> Callable[[], str]:
    """The address of a lock's page."""
    return lambda: reverse("admin:django_mongolock_lock_change", args=[quote_key(key)])


def _hang(run: Run) -> None:
    run.earlier("the nightly import", "import:books")
    run.hold("the nightly import", "import:books")
    run.start("hold", "till 3", "import:books")
    _eventually(lambda: _waiting("import:books"))


def _kill(run: Run) -> None:
    run.hold("the nightly report", "report:nightly").kill()
    run.start("hold", "month end", "report:nightly")
    _eventually(lambda: _waiting("report:nightly"))


def _cross(run: Run) -> None:
    run.start("cross", "van to the south", "stock:north", "stock:south")
    run.start("cross", "van to the north", "stock:south", "stock:north")
    _eventually(lambda: run.happened("deadlock", "stock:north", "stock:south"))


def _crowd(run: Run) -> None:
    run.earlier("a report", "tickets")
    run.hold("a report that hangs", "tickets")
    run.start("crowd", "ticket", "tickets", str(CROWD))
    _eventually(lambda: _waiting("tickets") >= CROWD)


def _stale_ads() -> Any:
    return Ad.objects.filter(locked_by="web-3/night")


def _leave_document(run: Run) -> None:
    _stale_ads().delete()
    Ad.objects.create(
        user_id="night",  # the traffic leaves the ads of this seller alone
        title="Barometer, left pending by a dead worker",
        price=42,
        exported_version=1,
        export_status=Ad.ExportStatus.EXPORTING,
        locked_by="web-3/night",
        lock_timestamp=timezone.now() - STALE_SINCE,
    )


INCIDENTS = (
    Incident(
        "hung",
        "A worker hangs",
        "Till 3 does not answer: it waits for import:books, which the nightly import has held for hours.",
        _hang,
        (
            Step(
                page("import:books"),
                "The lease is renewed again and again: the process lives, and hangs. Press “Ask to release…”, and give "
                "a reason.",
                lambda run: run.happened("asked", "import:books"),
            ),
            Step(
                page("import:books"),
                "The import does not listen. Press “Force release…”, and give a reason.",
                lambda run: run.happened("forced", "import:books"),
            ),
        ),
        "Till 3 has the lock. The import learns at its next renewal that it has lost it; fencing tokens keep out what "
        "it writes until then.",
    ),
    Incident(
        "killed",
        "A worker was killed",
        "The nightly report was killed in the middle of its work, and the month end waits for report:nightly.",
        _kill,
        (
            Step(
                page("report:nightly"),
                "The time that is left only goes down. Press nothing: at zero, the next waiter gets the lock.",
                lambda _: _holder("report:nightly", "month end") is not None,
            ),
        ),
        "The lock of a dead process ends with its lease, and needs no help.",
    ),
    Incident(
        "deadlock",
        "Two programs block each other",
        "Deliveries are slow. One van takes stock:north and then stock:south, the other one the other way round.",
        _cross,
        (
            Step(
                lambda: reverse(EVENTS) + "?q=stock:",
                "At the event “deadlock” one van gave up, and the other has both locks now. Follow a key to the page "
                "of the lock, and press “Ask to release…” there, with a reason.",
                lambda run: run.happened("asked", "stock:north", "stock:south"),
            ),
        ),
        "That van has heard it and ended. The cure is in the code: mongo_lock(north, south) takes both in one order.",
    ),
    Incident(
        "crowd",
        "Three hundred wait",
        "No ticket can be bought: 300 buyers wait for the lock “tickets”, which a report holds that hangs.",
        _crowd,
        (
            Step(
                lambda: reverse(DASHBOARD),
                "The longest wait is that for “tickets”. Follow it to the lock's page, and press “Force release…” "
                "there, with a reason.",
                lambda run: run.happened("forced", "tickets"),
            ),
            Step(
                page("tickets"),
                "Reload the page: the holder is another one each time, until the lock is free.",
                lambda _: not Lock.objects.held().filter(pk="tickets").exists(),
            ),
        ),
        "All were served in the order in which they came.",
    ),
    Incident(
        "stale",
        "A document was left pending",
        "A barometer is not shown by the external service: its ad says “exporting”, and the worker died.",
        _leave_document,
        (
            Step(
                lambda: reverse("admin:shop_ad_changelist") + "?q=Barometer",
                "Select the ad, choose “Release the selected documents if their lock is stale”, and press “Go”.",
                lambda _: not _stale_ads().exists(),
            ),
        ),
        "The ad's export is “failed” now, which the retry job picks up.",
    ),
)

_runs: dict[str, Run] = {}
_mutex = threading.Lock()


def begin(name: str) -> None:
    """Begin the incident of that name, and end the others. Raises KeyError."""
    incident = {each.name: each for each in INCIDENTS}[name]
    with _mutex:
        _end()
        run = _runs[name] = Run()
    threading.Thread(target=_start, args=[incident, run], daemon=True).start()


def _start(incident: Incident, run: Run) -> None:
    """Start its programs, and wait until they are in trouble. If another incident was begun meanwhile, end them."""
    try:
        incident.begin(run)
    finally:
        with _mutex:
            run.is_ready = True
            if _runs.get(incident.name) is not run:
                run.end()


def end() -> None:
    """End all programs."""
    with _mutex:
        _end()


def _end() -> None:
    for run in _runs.values():
        run.end()
    _runs.clear()


def status() -> list[dict[str, Any]]:
    """Return all incidents, with their progress and the next step."""
    with _mutex:
        return [_status(incident, _runs.get(incident.name)) for incident in INCIDENTS]


def _status(incident: Incident, run: Run | None) -> dict[str, Any]:
    facts = {"name": incident.name, "title": incident.title, "story": incident.story, "begun": run is not None}
    if run is None or not run.is_ready:
        return facts
    while run.step < len(incident.steps) and incident.steps[run.step].is_done(run):
        run.step += 1
    if run.step == len(incident.steps):
        run.end()
        return {**facts, "step": run.step, "lesson": incident.lesson}
    step = incident.steps[run.step]
    return {**facts, "step": run.step, "look": step.look(), "press": step.press}


def _holder(key: str, label: str) -> Any:
    lock = Lock.objects.filter(pk=key).first()
    return None if lock is None else next((each for each in lock.holders if each.label == label), None)


def _waiting(key: str) -> int:
    return lock_info(key).waiting


def _eventually(look: Callable[[], Any], seconds: float = 120.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > end:
            raise TimeoutError("the incident did not begin")
        time.sleep(0.1)
    return found
