"""A minimum hold ends when it was to end: a renewal that comes after the release leaves it alone (F64)."""

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from django_mongolock.engine.rule.document import Terms
from tests.engine.conftest import Here, LockMaker
from tests.engine.twins import Twin
from tests.support.waiting import eventually

#: The hold is longer than the lease, as that of a job is which runs once a day.
HELD = Terms(lease=3, margin=1, waiter_lease=3, min_hold=60)


#: The renewals that may be on their way when the lock is given back: that of the heartbeat, and an extension.
RENEWALS: dict[str, dict[str, Any]] = {"renewal": {}, "extension": {"lease": 90_000, "server_lease": 99_000}}


@pytest.mark.parametrize("kind", RENEWALS)
@pytest.mark.parametrize("way", ["one", "in bulk"])
def test_a_renewal_after_the_release_leaves_the_end_alone(twin: Twin, way: str, kind: str) -> None:
    """F64: the entry of a released lock is the same, to the millisecond, after a renewal that was on its way. Another
    one in the same renewal is renewed."""
    shared = replace(HELD, mode="shared", capacity=5)
    twin.add("g", shared)
    twin.add("other", shared)
    twin.release("g")
    released = twin.read()["holders"][0]
    time.sleep(0.05)  # so that an end that is counted from now is another one
    if way == "one":
        twin.apply(ask="g", renew=("g",), beat=7, **RENEWALS[kind])
    else:
        found = twin.renew("g", "other", beat=7, **RENEWALS[kind]).holders
        assert (found["g"].number, found["other"].number) == (0, 7)
    kept = twin.read()["holders"][0]
    assert kept["until"] - released["acquired_at"] == timedelta(seconds=HELD.min_hold)
    assert kept == released


def test_a_release_after_the_end_hands_the_lock_over(twin: Twin) -> None:
    """P5: nothing is kept of a hold that is over, and the release itself grants the lock to the one that waits."""
    twin.add("g", replace(HELD, min_hold=0.001))
    twin.add("next")
    time.sleep(0.05)
    assert twin.release("g")
    assert [holder["grant"] for holder in twin.read()["holders"]] == ["next"]


@pytest.mark.parametrize("early", [False, True])
def test_a_release_without_an_answer_leaves_the_hold_alone(
    here: Here, failpoint: Callable[..., None], early: bool
) -> None:
    """F64: the release is made again in the background, and the hold ends as it was to, unless it was to end early."""
    mine = here.lock(terms=HELD).acquire()
    failpoint(["findAndModify"], times=1, errorCode=50)
    assert mine.release(early=early)
    assert eventually(lambda: not any("released" not in holder for holder in here.entries()))
    spans = [holder["until"] - holder["acquired_at"] for holder in here.entries()]
    assert spans == ([] if early else [timedelta(seconds=HELD.min_hold)])


def test_a_thread_that_ends_while_it_holds_leaves_the_hold_alone(here: Here) -> None:
    """F64: its lock is released for it, and kept until the hold ends."""
    mine = here.lock(terms=HELD)
    here.in_thread(mine.acquire).join(10)
    here.timer.move(HELD.lease / 3)
    assert eventually(lambda: "released" in here.entries()[0])
    (held,) = here.entries()
    assert held["until"] - held["acquired_at"] == timedelta(seconds=HELD.min_hold)


def test_what_the_caller_never_had_is_not_kept(lock: LockMaker, entries: Callable[..., list[Any]]) -> None:
    """Of two keys the second is busy: the first is free again at once."""
    with lock("b", terms=Terms(lease=30)):
        assert not lock("a", "b", terms=HELD).try_acquire()
        assert entries("a") == []
