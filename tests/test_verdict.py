"""The one verdict of a lock, with its state, the time since the last sign of life, and the outcome without any
action."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from bson.int64 import Int64

from django_mongolock.context import BROWSER, CLAIMED
from django_mongolock.inspection.snapshot import LockSnapshot, Verdict, read_snapshot
from django_mongolock.inspection.verdict import verdict_text
from tests.support.lock_documents import document, entry, now, waiter

NOW = now()
SERVER_LEASE = 33.0


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def holder(*, heard: float, held: float = 0.0, **facts: Any) -> dict[str, Any]:
    """Return a holder with a lease of half a minute that was renewed *heard* seconds ago."""
    granted = ago(max(heard, held))
    return entry(1, **{"until": ago(heard - SERVER_LEASE), "since": granted, "acquired_at": granted, **facts})


#: Mean and longest hold, in seconds.
Holds = tuple[float, float] | None


def judged(holders: list[dict[str, Any]], waiters: int, earlier: Holds, holds: int = 10) -> LockSnapshot:
    """Return the lock with these holders, after so many holds."""
    mean, longest = earlier or (0.0, 0.0)
    counted = holds if earlier else 0
    found = document("order:5", holders, [waiter(number) for number in range(waiters)])
    found |= {
        "acquisitions": Int64(counted + len(holders)),
        "held_ms": Int64(counted * mean * 1_000),
        "longest_hold_ms": Int64(longest * 1_000),
    }
    read = {
        "now": NOW,
        "whole": True,
        "released": any(each.get("released") for each in holders),
        "holding": len(holders),
        "more_permits": 0,
        "queue": {"waiting": waiters},
    }
    return read_snapshot({**found, **read})


ASKED: dict[str, Any] = {"release_requested_by": "anna, in the admin"}
CASES: dict[str, tuple[list[dict[str, Any]], int, Holds, Verdict | None, str]] = {
    "free": ([], 0, None, None, ""),
    "renewed": ([holder(heard=3)], 0, None, Verdict.WORKS, "Renewed 3.0 s ago. "),
    "renewed, and waited for": (
        [holder(heard=3, held=500)], 1, None, Verdict.WORKS,
        ("Renewed 3.0 s ago. The holder keeps it until its work is done. "
         "If that takes too long, ask for a release."),
    ),
    "just granted from the queue": ([holder(heard=2, until=ago(-8))], 0, None, Verdict.WORKS, "Renewed 2.0"),
    "twice the mean": ([holder(heard=3, held=19)], 0, (10.0, 12.0), Verdict.WORKS, "Renewed"),
    "the longest so far": ([holder(heard=3, held=99)], 0, (2.0, 100.0), Verdict.WORKS, "Renewed"),
    "short holds are not judged": ([holder(heard=3, held=4)], 0, (0.01, 0.01), Verdict.WORKS, "Renewed"),
    "longer than ever before": (
        [holder(heard=3, held=21)], 0, (10.0, 12.0), Verdict.SLOW,
        ("Earlier holds: 10 s on average, 12 s at most. Renewed 3.0 s ago: the holder keeps it until its work is done. "
         "If that takes too long, ask for a release."),
    ),
    "twice the longest, and ten times the mean": (
        [holder(heard=3, held=101)], 1, (10.0, 50.0), Verdict.HANGS,
        ("Earlier holds: 10 s on average, 50 s at most. Renewed 3.0 s ago: it may never get free by itself. "
         "Ask for a release, then force it."),
    ),
    "not yet a minute": ([holder(heard=3, held=59)], 0, (0.1, 0.2), Verdict.SLOW, "Earlier holds: 0.1 s on average"),
    "not yet twice the longest": ([holder(heard=3, held=99)], 0, (1.0, 50.0), Verdict.SLOW, "Earlier holds: 1.0 s on"),
    "asked": (
        [holder(heard=3, held=9, **ASKED, release_requested_at=ago(4))], 0, None, Verdict.ASKED,
        ("Asked 4.0 s ago to release it, by “anna, in the admin”. "
         "Renewed 3.0 s ago. The holder releases it when it can, at the latest when its work is done."),
    ),
    "asked a lease ago": (
        [holder(heard=3, held=90, **ASKED, release_requested_at=ago(31))], 1, None, Verdict.HANGS,
        ("Asked 31 s ago to release it, by “anna, in the admin”. "
         "Renewed 3.0 s ago: it may never get free by itself. Force the release."),
    ),
    "not renewed in time": (
        [holder(heard=13, held=90)], 0, None, Verdict.SILENT,
        ("Last renewed 13 s ago: its holder may be stopped, cut off or dead. Waiting is safest. "
         "If you do nothing: free in 20 s, unless the holder comes back."),
    ),
    "not renewed in time, and waited for": (
        [holder(heard=13)], 2, (1.0, 1.0), Verdict.SILENT,
        ("Last renewed 13 s ago: its holder may be stopped, cut off or dead. Waiting is safest. "
         "If you do nothing: the first waiter gets it in 20 s, unless the holder comes back."),
    ),
    "not renewed, and asked": ([holder(heard=13, **ASKED)], 0, None, Verdict.SILENT, "Last renewed"),
    "renewed a little late": ([holder(heard=11)], 0, None, Verdict.WORKS, "Renewed 11 s ago."),
    "one of two is renewed": ([holder(heard=25), holder(heard=2)], 0, None, Verdict.WORKS, "Renewed 2.0"),
    "a lease without end": ([holder(heard=3, server_lease=Int64(2**62))], 0, None, Verdict.WORKS, "Renewed 3.0 s ago."),
    "a claim": (
        [holder(heard=20, host=CLAIMED)], 0, None, Verdict.WORKS,
        "No process renews it. If you do nothing: free in 13 s, unless it is taken up again.",
    ),
    "a browser tab": ([holder(heard=20, host=BROWSER)], 0, None, Verdict.SILENT, "Last renewed"),
    "its lease is over": (
        [holder(heard=40)], 0, None, Verdict.STALE,
        ("Its holder is dead or cut off: its lease ended 7.0 s ago, without a release. "
         "If you do nothing: the next process that asks gets it."),
    ),
    "its lease is over, and waited for": (
        [holder(heard=40)], 1, None, Verdict.STALE,
        ("Its holder is dead or cut off: its lease ended 7.0 s ago, without a release. "
         "If you do nothing: the first waiter gets it."),
    ),
    "kept": (
        [holder(heard=3, released=ago(3))], 0, None, Verdict.KEPT,
        "Its work is done, and the job does not run again before. If you do nothing: free in 30 s.",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("holders", "waiters", "earlier", "verdict", "text"), CASES.values(), ids=list(CASES))
def test_the_table(
    holders: list[dict[str, Any]], waiters: int, earlier: Holds, verdict: Verdict | None, text: str
) -> None:
    """F147: There are six verdicts. "If you do nothing" is shown only if the lock gets free by itself."""
    found = judged(holders, waiters, earlier)
    assert found.verdict is verdict
    assert verdict_text(found).startswith(text)
    assert found.lives == (verdict in (Verdict.WORKS, Verdict.SLOW, Verdict.ASKED, Verdict.HANGS))
    if found.lives and "No process" not in text:
        assert "If you do nothing" not in verdict_text(found)


@pytest.mark.parametrize(("holds", "mean"), [(9, None), (10, 7.0)])
def test_a_mean_of_ten(holds: int, mean: float | None) -> None:
    """The mean of fewer than ten holds says nothing. The present hold is no part of it."""
    lock = judged([holder(heard=3, held=21)], 0, (7.0, 9.0), holds=holds)
    assert lock.mean_hold == mean
