"""The parts of a session by themselves, without a server and threads, by a clock that the test sets."""

import asyncio
import contextlib
import logging
import os
import threading
import weakref
from datetime import UTC, datetime
from queue import Empty
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from django_mongolock.engine.protocol import procedures
from django_mongolock.engine.protocol.actions import FOREVER, Acquisition, Granted
from django_mongolock.engine.rule.document import Step, Terms
from django_mongolock.engine.rule.replies import Beat, Found
from django_mongolock.engine.session import bulk, grant_registry
from django_mongolock.engine.session import ending as ending_module
from django_mongolock.engine.session.background import Background
from django_mongolock.engine.session.ending import REMOVAL_PAUSES, Cleanup, Ending, EndReason, Leftover, Orphans
from django_mongolock.engine.session.grant import NOT_FOUND, Grant, OwnerRef, OwnerToken, State
from django_mongolock.engine.session.grant_registry import ForeignThread, GrantRegistry, LocalQueue, current_worker
from django_mongolock.engine.session.heartbeat import Heartbeat
from django_mongolock.engine.session.lanes import RENEWAL, REQUEST
from django_mongolock.engine.session.releases import Releases, UnconfirmedRelease
from django_mongolock.engine.session.renewals import Renewals
from django_mongolock.exceptions import LockBackendFailed, LockQueueFull

NOW = datetime.now(UTC)
TTL = procedures.TOMBSTONE_TTL / 1000


class Bare:
    """A session in which nothing happens by itself.

    - calls: the calls handed to its threads.
    - takes: whether its threads accept calls.
    - looks: the times at which its heartbeat is due.
    """

    pid = os.getpid()

    def __init__(self) -> None:
        self.time, self.asked, self.takes = 100.0, 0, True
        self.looks, self.calls = list[float](), list[tuple[Any, int, str | None]]()
        self.heartbeat = Mock(now=self.now, schedule=self.looks.append, threads=self)
        self.threads = self
        self.registry = GrantRegistry(self.heartbeat)
        self.queue = LocalQueue(3, self.registry)
        self.notifications, self.store = Mock(), Mock()
        self.commands: Any = Mock(timeout=5.0, numbers=iter(range(7, 99)), releases=Releases())
        session: Any = self
        self.background = Background(session.heartbeat)
        self.cleanup = Cleanup(session, self.commands)
        self.ending = Ending(session, self.cleanup)
        self.renewals = Renewals(session, self.commands, self.ending)
        self.orphans = Orphans(session, self.ending)

    def now(self) -> float:
        self.asked += 1
        assert self.asked < 10_000  # in a loop without an end
        return self.time

    def submit(self, call: Any, priority: int = -1, key: str | None = None) -> bool:
        if self.takes:
            self.calls.append((call, priority, key))
        return self.takes

    @property
    def left(self) -> list[tuple[str, bool]]:
        """The grants that are going to be removed, and whether a minimum hold stays."""
        return [(each.grant, each.stays) for each in self.background.pending if isinstance(each, Leftover)]

    def grant(
        self,
        key: str = "k",
        until: float | None = None,
        *,
        name: str = "",
        worker: object = "w",
        auto_renew: bool = True,
        **terms: Any,
    ) -> Grant:
        """Return a registered grant, with a lease of 30 seconds and a place of 12.

        - until: the end of the grant, if it is held.
        """
        acquisition = Acquisition(
            key, name or key, Terms(**{"lease": 30, "margin": 1, "waiter_lease": 12, **terms}), "s"
        )
        grant = Grant(acquisition, worker=worker, auto_renew=auto_renew, now=self.now)
        if until is not None:
            assert grant.mark_held(Granted(5, NOW, until, self.time))
        self.registry.grants[grant.id] = grant
        return grant

    def line(self, *names: str, **terms: Any) -> list[Grant]:
        """Return grants that wait for "k", in the order of *names*."""
        grants = [self.grant(name=name, **terms) for name in names]
        for grant in grants:
            self.queue.join(grant, trial=False)
        return grants


@pytest.fixture
def bare() -> Bare:
    return Bare()


def is_woken(grant: Grant) -> bool:
    """Return whether the grant was woken since the last call."""
    woken, grant.waiting._woken = grant.waiting._woken, False
    return woken


# Renewals


def test_when_a_grant_is_looked_at(bare: Bare) -> None:
    """P7: A grant is due at its renewal, and at its end at the latest. Without renewals only its end counts."""
    due = bare.renewals.next_due
    assert due() == FOREVER
    for until, renew_at, auto_renew, moment in (
        *((130, 110, True, 110), (130, 110, False, 130), (130, 131, True, 130), (None, 104, True, 104)),
    ):
        bare.grant(until=until, auto_renew=auto_renew).lease.renew_at = renew_at
        assert due() == moment
    bare.grant("b", until=103, auto_renew=False)
    assert due() == 103
    bare.time = 103
    bare.renewals.do_due(103)
    assert "b" not in bare.registry.grants
    assert bare.notifications.report_end.call_args.kwargs == {"noticed": True}


def test_which_grants_are_renewed_together(bare: Bare, monkeypatch: pytest.MonkeyPatch) -> None:
    """P8, F66, F238: A renewal takes the holders that are due within a third of the shortest lease, the most urgent
    first. A deferred holder is not renewed before its time. Holders that have failed are renewed by themselves, a stuck
    one alone. A holder that has failed twice has a lower priority for a thread. Waiters come last."""
    monkeypatch.setattr(bulk, "BATCH", 3)
    for key, renew_at, others in (
        *(("d", 100, {"lease": 60}), ("b", 100, {}), ("e", 110, {}), ("a", 90, {}), ("later", 110.5, {})),
        *(
            ("c", 100, {"deferred": True}),
            ("deferred", 100.5, {"deferred": True}),
            ("under way", 90, {"renewing": True}),
        ),
        *(("once", 100, {"failures": 1, "stuck": True}), ("twice", 99, {"failures": 2, "stuck": True})),
        *(("not yet", 101, {"failures": 1, "stuck": True}), ("x", 100, {"failures": 3}), ("y", 101, {"failures": 1})),
    ):
        lease = bare.grant(key, 130, lease=others.pop("lease", 30)).lease
        lease.renew_at, lease.once_more, lease.until = renew_at, True, 130 + ord(key[0]) / 1_000
        for name, value in others.items():
            setattr(lease, name, value)
    bare.grant("waits").lease.renew_at = 99
    bare.renewals.do_due(100)
    made = [("".join(grant.key for grant in each.args[0]), priority, key) for each, priority, key in bare.calls]
    assert made == [
        *(("abc", RENEWAL, None), ("de", RENEWAL, None), ("xy", RENEWAL, None)),
        *(("once", RENEWAL, "once"), ("twice", REQUEST, "twice"), ("waits", RENEWAL, None)),
    ]
    under_way = {grant.key for grant in bare.registry.grants.values() if grant.lease.renewing}
    assert under_way == {*"abcdexy", "once", "twice", "waits", "under way"}
    assert not any(grant.lease.once_more for each, *_ in bare.calls for grant in each.args[0])
    bare.calls.clear()
    bare.renewals.do_due(100)
    assert not bare.calls


@pytest.mark.parametrize(("in_threads", "takes"), [(True, False), (False, True)])
def test_a_renewal_without_a_thread(bare: Bare, in_threads: bool, takes: bool) -> None:
    """P6: A renewal without a thread is made at once."""
    bare.renewals.in_threads, bare.takes = in_threads, takes
    bare.grant(until=130).lease.renew_at = 100
    bare.store.renew.return_value = {}
    bare.renewals.do_due(100)
    assert (bare.store.renew.call_count, bare.calls) == (1, [])


@pytest.mark.parametrize(
    ("leases", "until", "failures", "timeout", "limit"),
    [
        *(((12,), None, 0, 5, 2), ((12,), None, 1, 5, 4), ((30,), 130, 0, 5, 5)),
        *(((30, 15), 130, 0, 5, 2.5), ((30,), 112, 0, 5, 2), ((6,), 112, 0, 5, 1), ((30,), 130, 0, 1, 1)),
        *(((0.3,), 130, 0, 5, 0.1), ((0.6,), 130, 1, 5, 0.2)),
        *(((12,), 103, 0, 5, 0.75), ((12,), 103, 1, 5, 2)),
    ],
)
def test_how_long_a_renewal_may_take(
    bare: Bare, *, leases: tuple[float, ...], until: float | None, failures: int, timeout: float, limit: float
) -> None:
    """P7, F178, F237: A renewal may take a sixth of the shortest lease, and a third later. A lock just handed over
    counts with the time of its place. A renewal that begins late gets a quarter of the time left, and later two
    thirds."""
    grants = [bare.grant(until=until, lease=lease) for lease in leases]
    for grant in grants:
        grant.lease.failures, bare.commands.timeout = failures, timeout
    assert bare.renewals._limit(grants) == pytest.approx(limit)


@pytest.mark.parametrize(
    ("behind", "counted", "sent"),
    [((0, 0), (False, False), ()), ((0, 1), (False, False), (0, 1)), ((0, 0), (True, False), (0, 0))],
)
def test_what_a_renewal_asks(
    bare: Bare, behind: tuple[int, ...], counted: tuple[bool, ...], sent: tuple[int, ...]
) -> None:
    """P5: A renewal asks that each grant lives on. If waiters of this process stand behind a grant or stood there, it
    tells their number. A grant with news in the meantime is renewed again at once."""
    grants = [bare.grant("b"), bare.grant("a")]
    for grant, number, was in zip(grants, behind, counted, strict=True):
        grant.waiting.behind, grant.waiting.counted, grant.lease.renewing = number, was, True

    def renew(keys: list[str], step: Step, timeout: float) -> dict[str, Found]:
        assert (keys, timeout) == (["a", "b"], 2)
        assert step == Step(renew=("b", "a"), beat=7, behind=sent)
        grants[1].lease.once_more = True
        bare.time = 103
        return {key: Found(5, {}, {"x": Beat(7), key: Beat(7)}) for key in keys}

    bare.store.renew = renew
    bare.renewals.renew(grants)
    assert [grant.waiting.counted for grant in grants] == [number > 0 for number in behind]
    assert [(grant.lease.until, grant.lease.renew_at) for grant in grants] == [(112, 104), (112, 103)]
    assert bare.looks == [103]
    assert not any(grant.lease.renewing for grant in grants)


@pytest.mark.parametrize(
    ("held", "failures", "level", "told"),
    [
        *(((True, False), (1, 0), "WARNING", "renewal failed"), ((False, False), (0, 1), "WARNING", "places in")),
        *(((False, True), (2, 1), "DEBUG", "renewal failed"), ((False, False), (1, 1), "DEBUG", "places in")),
    ],
)
def test_a_renewal_that_fails_is_told_once(
    bare: Bare,
    *,
    held: tuple[bool, ...],
    failures: tuple[int, ...],
    level: str,
    told: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """F153: A failed renewal is logged as a warning if it is news for one of its grants. A grant that was never held
    counts as a place only."""
    caplog.set_level(logging.DEBUG)
    grants = [bare.grant(key, 130 if each else None) for key, each in zip("ab", held, strict=True)]
    for grant, number in zip(grants, failures, strict=True):
        grant.lease.failures = number
    bare.store.renew.side_effect = LockBackendFailed("no answer")
    bare.renewals.renew(grants)
    assert [(record.levelname, told in record.getMessage()) for record in caplog.records] == [(level, True)]
    assert [grant.lease.failures for grant in grants] == [number + 1 for number in failures]


def found(token: int, holder: Beat | None = None, *waiters: str, beat: int = 7) -> Found:
    """Return the reply of a renewal that found the grant "k" as *holder*, or among the *waiters*."""
    return Found(token, {} if holder is None else {"k": holder}, {name: Beat(beat) for name in waiters})


@pytest.mark.parametrize(
    ("answer", "sent", "length", "until", "becomes"),
    [
        *((None, 105, 30, 130, "late"), (found(5, Beat(7, None, 5)), 105, 30, 135, "renewed")),
        *((found(5, Beat(6, None, 5)), 105, 30, 130, "late"), (found(6, Beat(7, None, 6)), 105, 30, 130, "lost")),
        *(
            (found(5, None, "k"), 105, 30, 130, "lost"),
            (found(5), 100, 30, 130, "lost"),
            (found(5), 99, 30, 130, "late"),
        ),
        *((found(4), 105, 30, 130, "late"), (found(5, Beat(7, None, 5)), 105, 12, 130, "stands")),
        (found(5, Beat(7, None, 5)), 95, 30, 130, "stands"),
        (found(6, Beat(7, "ann", 5), "x"), 106, 30, 136, "renewed"),
    ],
)
def test_what_a_renewal_says_of_a_holder(
    bare: Bare, *, answer: Found | None, sent: float, length: float, until: float, becomes: str
) -> None:
    """P1, P7, F62, F99, F160: A renewal extends a holder's lease only by an answer to its own command. The lease counts
    from the sending, and never gets shorter. An answer that is not older than the grant and does not show the grant
    reports a loss. Without an answer the renewal is tried again."""
    grant = bare.grant(until=130)
    grant.lease.failures, bare.time = 1, 107
    bare.renewals.judge(grant, answer, 7, sent, length)
    assert grant.lease.until == until
    assert (grant.state is State.LOST) is (becomes == "lost")
    assert grant.lease.failures == {"late": 2, "renewed": 0, "stands": 1, "lost": 1}[becomes]
    assert not is_woken(grant)
    ends, asks = bare.notifications.report_end.mock_calls, bare.notifications.report_release_request.mock_calls
    assert ends == ([call(grant, noticed=True)] if becomes == "lost" else [])
    assert asks == ([call(grant, "ann")] if until == 136 else [])


def test_whether_a_lock_is_still_uncontended(bare: Bare) -> None:
    """P8: A lock is uncontended, with the short release, as long as no waiter was ever found."""
    grant, answer = bare.grant(until=130), found(5, Beat(7, None, 5))
    for before, seen, after in (
        (True, answer, True),
        (False, answer, False),
        (True, found(5, Beat(7, None, 5), "x"), False),
    ):
        grant.lease.uncontended = before
        bare.renewals.judge(grant, seen, 7, 105, 30)
        assert grant.lease.uncontended is after


@pytest.mark.parametrize(("failures", "at_once"), [(0, True), (1, True), (2, False), (3, False)])
def test_a_renewal_is_tried_again_at_once_twice(bare: Bare, failures: int, at_once: bool) -> None:
    """F66: A failed renewal is retried first alone, then with more time. Later retries are rarer."""
    grant = bare.grant(until=130)
    grant.lease.failures = failures
    bare.renewals.judge(grant, None, 7, 100, 30)
    assert (grant.lease.renew_at == 100) is at_once


@pytest.mark.parametrize(
    ("answer", "at_head", "known", "until", "last_token", "head", "woken"),
    [
        *((None, -1, 3, 0, 3, -1, False), (found(5, None, "k"), -1, 3, 112, 5, 5, True)),
        *((found(5, None, "k"), 4, 9, 112, 9, 5, True), (found(5, None, "k"), 5, 3, 112, 5, 5, False)),
        *((found(5, None, "x", "k"), -1, 3, 112, 5, -1, False), (found(5, None, "k", "x"), 6, 3, 112, 5, 6, False)),
        *((found(6, Beat(7, None, 6)), -1, 3, 112, 5, -1, True), (found(6), -1, 3, 0, 3, -1, True)),
        (found(5, None, "k", beat=6), -1, 3, 0, 3, 5, True),
    ],
)
def test_what_a_renewal_says_of_a_waiter(
    bare: Bare, *, answer: Found | None, at_head: int, known: int, until: float, last_token: int, head: int, woken: bool
) -> None:
    """P5, F28: A waiter is woken, and not renewed, if it is the first for an unknown token or has left the queue. A
    bell with a later token still counts."""
    waiter = bare.grant()
    waiter.waiting.at_head, waiter.waiting.last_token = at_head, known
    bare.renewals.judge(waiter, answer, 7, 100, 12)
    stands = waiter.lease.until, waiter.waiting.last_token, waiter.waiting.at_head, is_woken(waiter), waiter.state
    assert stands == (until, last_token, head, woken, State.WAITING)
    is_gone = answer is not None and not {*answer.waiters, *answer.holders} & {"k"}
    assert (waiter.waiting.place_gone, waiter.lease.renew_at == FOREVER) == (is_gone, is_gone)
    assert waiter.lease.failures == (not until and not is_gone)


# Ends


@pytest.mark.parametrize(
    ("how", "state", "reason", "in_doubt", "known", "removed", "told"),
    [
        *(
            (EndReason.LOST, State.RELEASED, "", True, True, False, ""),
            (EndReason.LOST, State.LOST, "x", False, True, True, "end"),
        ),
        *(
            (EndReason.LOST, State.LOST, "x", False, False, False, "end"),
            (EndReason.LOST, State.LOST, "x", True, False, False, "end"),
        ),
        (EndReason.LOST, State.LOST, NOT_FOUND, False, True, False, "end"),
        *(
            (EndReason.LOST, State.LOST, NOT_FOUND, True, True, True, "end"),
            (EndReason.ABANDONED, None, "", False, True, True, "end"),
        ),
        *(
            (EndReason.ABANDONED, State.HELD, "", False, False, True, "end"),
            (EndReason.REFUSED, None, "", True, True, False, "refused"),
        ),
        *(
            (EndReason.RELEASED, State.RELEASED, "", True, True, False, "end"),
            (EndReason.REPLACED, State.RELEASED, "", True, True, False, "end"),
        ),
    ],
)
def test_what_each_end_of_a_grant_needs(
    bare: Bare,
    *,
    how: EndReason,
    state: State | None,
    reason: str,
    in_doubt: bool,
    known: bool,
    removed: bool,
    told: str,
) -> None:
    """P6, P7: An ending grant is removed if its entry may be left, and its end is reported. If a grant was found lost
    and was released meanwhile, the releasing thread does both."""
    grant = bare.grant(until=None if state is None else 130, min_hold=9)
    grant.state, grant.reason, grant.outcome_unknown = state or State.WAITING, reason, in_doubt
    token = grant.new_owner_token(Mock())
    if not known:
        bare.registry.grants.clear()
    bare.time = 104
    bare.ending.end(grant, how, stays=True, noticed=True, reason="why")
    assert bare.left == [("k", True)] * removed
    assert (
        bare.notifications.mock_calls
        == {
            "": [],
            "end": [call.report_end(grant, noticed=True)],
            "refused": [call.report_not_acquired(grant, "why", 4.0)],
        }[told]
    )
    assert (grant.owner_ref is None) is bool(told)
    assert bool(bare.registry.grants) is not bool(told)
    assert (grant.state is State.HELD) is False
    del token


def test_a_forked_child_ends_nothing_of_its_parent(bare: Bare) -> None:
    """F29: A forked child only forgets the grant."""
    grant, bare.pid = bare.grant(until=130), -1
    bare.ending.end(grant, EndReason.ABANDONED)
    assert (bare.registry.grants, bare.left, bare.notifications.mock_calls) == ({}, [], [])


def test_who_is_woken_by_an_end(bare: Bare) -> None:
    """P5: The first waiter of a line is woken when the grant of this process in that line ends, and not before."""
    held = bare.grant(name="held", until=130)
    bare.registry.add_held(held)
    first, second = bare.line("first", "second")
    assert bare.ending.forget(second)
    assert not is_woken(first)
    assert bare.ending.forget(held)
    assert not bare.ending.forget(held)
    assert (is_woken(first), is_woken(second)) == (True, False)


@pytest.mark.parametrize("by_release", [False, True])
def test_a_grant_that_is_not_found(bare: Bare, by_release: bool) -> None:
    """P7: A grant that is not found is reported as lost once. A released grant is reported only by its release
    command."""
    grant = bare.grant(until=130)
    assert grant.mark_released() is True
    assert bare.ending.not_found(grant, by_release=by_release, noticed=True) is by_release
    assert not bare.ending.not_found(grant, by_release=by_release)
    assert bare.notifications.mock_calls == [call.report_end(grant, noticed=True)] * by_release


# Removals


@pytest.mark.parametrize(("until", "doubt", "in_bulk"), [(130, False, True), (130, True, False), (None, False, False)])
def test_a_removal(bare: Bare, until: float | None, *, doubt: bool, in_bulk: bool) -> None:
    """P6, F17: A removal is tried at once, and as long as a copy of its command may arrive or its lease may live. If
    such a copy may arrive, the removal is a command of its own and leaves a tombstone."""
    grant = bare.grant(until=until, min_hold=1)
    grant.outcome_unknown = doubt
    (first,) = bare.line("first")
    bare.cleanup.ensure_removed(grant, stays=True)
    (left,) = bare.background.pending
    assert (left.due, left.give_up, left.pauses) == (100, 100 + 33 + TTL, REMOVAL_PAUSES)
    assert (left.group is not None) is in_bulk
    assert left.attempt([left], 3.0) == ()
    assert bare.commands.send.mock_calls == [call(procedures.removal_for_good("k", "k", stays=True), 3.0)]
    assert is_woken(first)


def test_many_removals(bare: Bare) -> None:
    """P8, F180: Many removals are one command. Before the end of the process, the majority has to confirm it."""
    grants = [bare.grant(key, 130) for key in "ba"]
    for grant in grants:
        bare.cleanup.ensure_removed(grant)
    left = list(bare.background.pending)
    assert left[0].attempt(left, FOREVER) == ()
    step = Step(remove=("b", "a"), force=True)
    assert bare.store.renew.mock_calls == [call(["a", "b"], step, 5.0)]
    assert not bare.store.release_uncontended.mock_calls


def test_a_release_that_is_made_again_is_tried_for_a_while(bare: Bare) -> None:
    """F7: A release is repeated when it is due and the primary is another one."""
    bare.commands.releases.made(UnconfirmedRelease("k", "g", "one", 100))
    bare.store.primary.return_value = "two"
    assert bare.cleanup.next_due() == 102
    bare.cleanup.do_due(101.9)
    assert not bare.left
    bare.time = 104
    bare.cleanup.do_due(102)
    assert bare.left == [("g", False)]
    assert next(iter(bare.background.pending)).give_up == 104 + TTL


def test_the_grants_that_are_left_at_exit(bare: Bare, monkeypatch: pytest.MonkeyPatch) -> None:
    """P6, F182: All grants are removed in bulk. Uncontended locks use the short command, the others the rule. Locks
    with a minimum hold are sent apart, and so are waiters."""
    sent = list[tuple[str, str]]()

    def release(keys: list[str], ids: list[str], limit: float) -> set[str]:
        assert (ids, limit) == ([f"g{key}" for key in keys], 50.0)
        sent.append(("short", "".join(keys)))
        return {"b"}

    def renew(keys: list[str], step: Step, limit: float) -> dict[str, Found]:
        held = "m" in keys
        assert step == Step(remove=tuple(f"g{key}" for key in keys), force=not held)
        sent.append(("rule", "".join(keys)))
        return {}

    bare.takes, bare.store.release_uncontended, bare.store.renew = False, release, renew
    held = [bare.grant(key, 130, name=f"g{key}", min_hold=float(key in "mn")) for key in "abmnc"]
    waits = [bare.grant(key, name=f"g{key}", min_hold=1) for key in "wx"]
    for each in waits:
        each.lease.until = 104
    for each in (*held, *waits):
        bare.cleanup.ensure_removed(each, stays=each.token > 0, at_exit=True)
    bare.background.begin_to_finish(100)
    bare.cleanup.finish()
    assert sent == [("short", "abc"), ("rule", "mn"), ("rule", "wx")]
    assert bare.commands.send.mock_calls == [call(procedures.removal_for_good("b", "gb"), 50.0)]


@pytest.mark.parametrize("token", [0, 7])
def test_a_lock_that_was_never_granted_is_not_reported_at_exit(
    bare: Bare, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, token: int
) -> None:
    """F226: A wrong password or an absent server leaves no lock, and nothing to warn of."""
    sleep = SimpleNamespace(sleep=lambda _: setattr(bare, "time", bare.time + 1))
    monkeypatch.setattr("django_mongolock.engine.session.background.time", sleep)
    grant = bare.grant(until=130)
    grant.token = token
    bare.cleanup.ensure_removed(grant)
    with caplog.at_level("INFO"):
        bare.background.begin_to_finish(3)
        bare.cleanup.finish()
    assert ("not released at exit" in caplog.text) is (token == 7)


# Grants that no code can release


class Ended(threading.Thread):
    """A thread that is not alive."""


def test_who_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """F33: A worker has ended if its thread or its task's event loop has ended. The main thread has not ended when the
    interpreter exits."""
    alive, here = grant_registry._Alive(), threading.current_thread()
    loop = asyncio.new_event_loop()
    task = loop.create_task(asyncio.sleep(0))
    loop.run_until_complete(task)
    for worker, ended in (
        *((None, False), ("w", False), (here, False), (Ended(), True), (weakref.ref(task), False)),
        *(
            (weakref.ref(OwnerToken()), False),
            (ForeignThread(alive), False),
            (ForeignThread(grant_registry._Alive()), True),
        ),
    ):
        assert ending_module._has_ended(worker) is ended
    loop.close()
    assert ending_module._has_ended(weakref.ref(task))
    main = Ended()
    monkeypatch.setattr(threading, "main_thread", lambda: main)
    assert not any(ending_module._has_ended(each) for each in (main, here))


@pytest.mark.parametrize(
    ("until", "owner", "worker", "releaser", "why"),
    [
        *(
            (130, "lives", "w", None, ""),
            (130, None, "w", None, ""),
            (130, "died", "w", None, "its lock object is gone"),
        ),
        *(
            (130, "lives", Ended(), None, "its thread"),
            (130, "lives", "w", Ended(), "its thread"),
            (None, "lives", "w", None, ""),
        ),
        *(
            (None, "lives", Ended(), None, ""),
            (None, None, "w", Ended(), "its thread"),
            (None, "died", "w", None, "given up"),
        ),
    ],
)
def test_what_is_released_that_no_code_can_release(
    bare: Bare,
    *,
    until: float | None,
    owner: str | None,
    worker: object,
    releaser: object,
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """P6, F33: A held grant is released if its thread has ended, if the thread that was releasing it has ended, or if
    its lock object is gone. A minimum hold stays."""
    grant = bare.grant(until=until, worker=worker, min_hold=1)
    grant.releaser, grant.acquired_from = releaser, "a.py:1"
    token = None if owner is None else grant.new_owner_token(Mock())
    if owner == "died":
        del token
    gone = owner == "died" and until is not None
    with pytest.warns(ResourceWarning, match="'k', acquired at a.py:1") if gone else contextlib.nullcontext():
        bare.orphans.do_due(100)
    bare.orphans.do_due(100)
    assert bare.left == [("k", why != "given up")] * bool(why)
    assert bare.notifications.mock_calls == [call.report_end(grant, noticed=True)] * bool(why)
    assert (why in caplog.text) is (why != "given up")


def test_whose_wait_ends_with_its_thread(bare: Bare) -> None:
    """P6: A wait ends with its thread. The waiter leaves its line, and the next one is woken."""
    ended, second = bare.line("ended", "second")
    ended.worker = Ended()
    bare.orphans.do_due(100)
    assert (list(bare.queue.waiting), bare.left) == (["second"], [("ended", False)])
    assert (is_woken(second), bare.orphans.next_due()) == (True, FOREVER)


@pytest.mark.parametrize("state", [State.WAITING, State.HELD, State.RELEASED])
def test_what_its_owner_has_dropped(bare: Bare, state: State) -> None:
    """F65: A signal has struck in the clean-up of a caller. The caller may have left the line and woken nobody. Only a
    grant that was held is kept for a minimum hold."""
    grant = bare.grant(name="g", until=None if state is State.WAITING else 130, min_hold=1)
    grant.state = state
    bare.queue.waiting["g"] = grant
    token = grant.new_owner_token(bare.orphans.adopt)
    (first,) = bare.line("first")
    with pytest.warns(ResourceWarning) if state is State.HELD else contextlib.nullcontext():
        del token
    stays = state is not State.WAITING
    assert bare.left == [("g", stays)]
    assert bare.notifications.mock_calls == [call.report_end(grant, noticed=True)]
    assert (list(bare.queue.waiting), is_woken(first), grant.held) == (["first"], True, False)
    bare.background.pending.clear()
    for ref in (OwnerRef(OwnerToken()), Mock(grant=grant)):  # a signal has struck before it was set; all is done
        bare.orphans.adopt(ref)
    assert not bare.left


# Lines


def test_who_stands_in_a_line(bare: Bare) -> None:
    """P5, F69: Waiters that compete on the same terms share a line, with at most the length of a queue. The first asks
    for all of them. A single try asks in any case."""
    first, second, third = bare.line("first", "second", "third")
    queue = bare.queue
    assert [queue.turn(grant) for grant in (first, second)] == [("now", None), ("behind", first)]
    assert [grant.reporting.busy for grant in (first, second)] == [False, True]
    assert second.line is third.line is first.line
    with pytest.raises(LockQueueFull, match="'k'"):
        queue.join(bare.grant(name="fourth"), trial=False)
    trial = bare.grant(name="trial")
    assert (queue.join(trial, trial=True), trial.reporting.busy) == ("now", False)
    assert (list(queue.waiting), list(queue.lines[first.line])) == (
        ["first", "second", "third", "trial"], ["first", "second", "third"]
    )  # fmt: skip
    assert first.waiting.behind == 2
    queue.leave(trial)
    queue.leave(second)
    assert (list(queue.waiting), first.waiting.behind, is_woken(first)) == (["first", "third"], 1, False)
    queue.leave(first)
    assert (first.waiting.behind, third.waiting.behind, is_woken(third)) == (0, 0, True)
    queue.leave(free := bare.grant("free"))
    assert queue.turn(free) == ("now", None)
    queue.leave(third)
    assert (queue.waiting, queue.lines, is_woken(third)) == ({}, {}, False)
    bare.registry.add_held(bare.grant(until=130))
    waiter = bare.grant(name="waiter")
    assert (queue.join(waiter, trial=False), waiter.reporting.busy) == ("next", True)
    queue.wake_first(("free", "exclusive", 1, 1, None, 0))
    queue.wake_first_of("free")
    assert not is_woken(waiter)
    queue.wake_first_of("k")
    assert is_woken(waiter)


@pytest.mark.parametrize(
    ("leaves", "reserved", "cancelled", "chosen"),
    [
        *(("", "", "", "a"), ("a", "", "", "b"), ("b", "", "", "c"), ("c", "", "", None), ("", "a", "", "b")),
        *(("a", "bc", "", None), ("", "abc", "", None), ("", "", "a", None), ("trial", "", "", None)),
    ],
)
def test_to_whom_a_key_is_handed_over(
    bare: Bare, leaves: str, reserved: str, cancelled: str, chosen: str | None
) -> None:
    """P2, P5: A key is handed over to the first of its line, or to the next behind the leaving one.
    Waiters with a hand-over under way are skipped. While the first waiter has cancelled its wait, none is chosen."""
    line = {grant.id: grant for grant in bare.line("a", "b", "c")}
    trial = bare.grant(name="trial")
    bare.queue.join(trial, trial=True)
    for name, grant in line.items():
        grant.waiting.handover_reserved, grant.waiting.cancelled = name in reserved, name in cancelled
    holder = bare.grant(name="holder", until=130)
    bare.registry.grants.clear()
    heir = bare.queue.reserve_handover({"": holder, "trial": trial, **line}[leaves])
    assert (heir and heir.id) == chosen
    assert list(bare.registry.grants) == ([chosen] if chosen else [])
    if heir is not None:
        assert (heir.waiting.handover_reserved, bare.looks) == (True, [heir.lease.renew_at])
    assert bare.queue.reserve_handover(bare.grant("free")) is None


@pytest.mark.parametrize(
    ("mode", "sent", "until", "unknown", "chosen"),
    [
        *(("shared", True, 0, False, "b"), ("shared", False, 0, False, "a"), ("shared", True, 112, False, "a")),
        *(("shared", True, 0, True, "a"), ("exclusive", True, 0, False, "a")),
    ],
)
def test_who_asks_for_himself_is_handed_nothing(
    bare: Bare, *, mode: str, sent: bool, until: float, unknown: bool, chosen: str
) -> None:
    """P2, F158: A waiter with a command on its way gets no hand-over if several may hold the key, because the command
    may grant it. A command without an answer is no obstacle."""
    first, _ = bare.line("a", "b", mode=mode, capacity=2 if mode == "shared" else 1)
    first.waiting.sent, first.lease.until, first.outcome_unknown = sent, until, unknown
    holder = bare.grant(name="holder", until=130)
    holder.line = first.line
    heir = bare.queue.reserve_handover(holder)
    assert heir is not None
    assert heir.id == chosen


@pytest.mark.parametrize("answer", [None, "answer"])
def test_the_end_of_a_hand_over(bare: Bare, answer: Any) -> None:
    """F99: The waiter of a hand-over is woken. A late copy of the command is remembered if one may still arrive."""
    waiter = bare.grant()
    waiter.waiting.handover_reserved = True
    bare.queue.finish_handover(waiter, answer)
    assert (waiter.outcome_unknown, waiter.waiting.answer) == (answer is None, answer)
    assert (waiter.waiting.handover_reserved, is_woken(waiter)) == (False, True)


def test_where_a_grant_is_found(bare: Bare) -> None:
    """P6: A grant is found by its id, by its holder and, if it is exclusive, by its line, until it ends."""
    one, two = bare.grant(name="one", until=130), bare.grant(name="two", until=130)
    shared, registry = bare.grant("s", until=130, mode="shared", capacity=2), bare.registry
    for grant in (one, shared, two):
        registry.add_held(grant)
    assert (registry.by_line, registry.held_by("w"), registry.held_by("x")) == (
        {two.line: two},
        {"k": two, "s": shared},
        {},
    )
    assert (registry.remove(one), registry.remove(one)) == (True, False)
    assert (registry.by_line, registry.held_by("w")) == ({two.line: two}, {"k": two, "s": shared})
    assert registry.remove(two)
    assert (registry.by_line, registry.held_by("w"), registry.grants) == ({}, {"s": shared}, {"s": shared})
    registry.remove(shared)
    assert registry._by_worker == {}


@pytest.mark.parametrize(("renew_at", "first"), [(90, 104), (104.5, 104.5)])
def test_when_a_place_is_first_renewed(bare: Bare, renew_at: float, first: float) -> None:
    """P5: A place is first renewed after a third of its time since the request, however long it has stood in line
    before."""
    grant = bare.grant()
    bare.registry.grants.clear()
    grant.lease.renew_at = renew_at
    bare.registry.expect(grant)
    assert (bare.registry.grants, grant.lease.renew_at, bare.looks) == ({"k": grant}, first, [first])


async def test_who_is_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: The worker is the task, or else the thread. A thread that Python did not start is known for its lifetime."""
    task = current_worker()
    assert isinstance(task, weakref.ref)
    assert task() is asyncio.current_task()
    monkeypatch.setattr(asyncio, "current_task", Mock(side_effect=RuntimeError))
    assert current_worker() is threading.current_thread()
    foreign = object.__new__(threading._DummyThread)
    monkeypatch.setattr(threading, "current_thread", lambda: foreign)
    worker = current_worker()
    assert isinstance(worker, ForeignThread)
    assert worker is current_worker()
    assert worker() is not None


# The heartbeat


class Inbox:
    """The inbox of a heartbeat.

    - timeouts: the timeouts of its reads.
    """

    def __init__(self, *items: Any) -> None:
        self.items, self.timeouts = [*items], list[float | None]()

    def put(self, item: Any) -> None:
        self.items.append(item)

    def get(self, timeout: float | None = -1) -> Any:
        self.timeouts.append(timeout)
        return self.get_nowait()

    def get_nowait(self) -> Any:
        if not self.items:
            raise Empty
        return self.items.pop(0)


@pytest.fixture
def heartbeat(bare: Bare) -> Any:
    """Return a heartbeat without a thread and without due work."""
    made: Any = Heartbeat(Mock(), bare.now)
    made.inbox, made.started = Inbox(), []
    made.set_tasks([Mock(), Mock()], Mock())
    for task, due in zip(made._tasks, (130, 120), strict=True):
        task.next_due.return_value = due
    return made


@pytest.mark.parametrize(
    ("closed", "alive", "due", "started", "woken"),
    [
        *((False, None, 100, True, True), (False, False, 100, True, True), (False, True, 100, False, True)),
        *((False, True, 110, False, False), (False, True, 111, False, False), (True, None, 100, False, False)),
    ],
)
def test_a_heartbeat_is_told_what_is_due(
    heartbeat: Any, *, closed: bool, alive: bool | None, due: float, started: bool, woken: bool
) -> None:
    """P6, F108: The thread of a heartbeat is started if there is none, and woken if it would sleep longer. After
    closing, neither happens."""
    heartbeat.thread = None if alive is None else Mock(is_alive=lambda: alive)
    heartbeat.threads.off_main_thread = lambda start, **_: heartbeat.started.append(start)
    heartbeat.wakes_at, heartbeat._closed = 110, closed
    heartbeat.schedule(due)
    assert (heartbeat.started, heartbeat.inbox.items) == ([heartbeat.start] * started, [None] * woken)


@pytest.mark.parametrize(
    ("closed", "alive", "fails", "starts"),
    [
        *((False, None, False, True), (False, False, False, True), (False, True, False, False)),
        *((True, None, False, False), (True, False, False, False), (False, None, True, True)),
    ],
)
def test_a_heartbeat_is_started(
    heartbeat: Any, *, monkeypatch: pytest.MonkeyPatch, closed: bool, alive: bool | None, fails: bool, starts: bool
) -> None:
    """P6: A heartbeat is started once, and again when its thread has died. During the shutdown of the interpreter it is
    not."""
    heartbeat.thread = before = None if alive is None else Mock(is_alive=lambda: alive)
    heartbeat._closed, thread = closed, Mock(start=Mock(side_effect=RuntimeError if fails else None))
    monkeypatch.setattr(threading, "Thread", made := Mock(return_value=thread))
    heartbeat.start()
    assert made.mock_calls[:1] == [call(target=heartbeat._run, name="mongolock-heartbeat", daemon=True)] * starts
    assert thread.start.call_count == starts
    assert heartbeat.thread is (thread if starts and not fails else before)


@pytest.mark.parametrize(
    ("due", "timeout", "items", "dropped"),
    [(FOREVER, None, ["a", None, "b"], ["a", "b"]), (103, 3, [], []), (90, 0, [None], [])],
)
def test_a_heartbeat_sleeps(
    heartbeat: Any, due: float, timeout: float | None, items: list[Any], dropped: list[str]
) -> None:
    """P8: A heartbeat sleeps until work is due or comes in, and takes all of the new work."""
    heartbeat.inbox = Inbox(*items)
    heartbeat._sleep(due)
    assert (heartbeat.inbox.timeouts, list(heartbeat._dropped)) == ([timeout], dropped)


def test_a_heartbeat_does_what_is_due(heartbeat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """P6: The heartbeat does due work again and again until it is closed, whatever fails. New work wakes it. An error
    in a dropped object, such as a warning, does not stop the next work."""
    slept, sleeps = list[float](), list[tuple[float, float]]()

    def pause(seconds: float) -> None:
        assert len(slept) < 2  # here, because failures elsewhere are retried for ever
        slept.append(seconds)

    def sleep(due: float) -> None:
        assert len(sleeps) < 4
        sleeps.append((due, heartbeat.wakes_at))
        heartbeat._dropped.extend(["bad", "ref"] if len(sleeps) == 1 else ["ref"])
        if len(sleeps) == 4:
            heartbeat.close()

    def work(now: float) -> None:
        assert (now, heartbeat.wakes_at) == (100, 0.0)
        if len(sleeps) == 2:
            raise ValueError

    def look() -> float:
        assert heartbeat.wakes_at == FOREVER
        return 130

    monkeypatch.setattr("django_mongolock.engine.session.heartbeat.time", SimpleNamespace(sleep=pause))
    heartbeat._sleep, heartbeat.adopt.side_effect = sleep, [ResourceWarning, None, None, None]
    heartbeat._tasks[0].next_due, heartbeat._tasks[1].do_due = look, work
    heartbeat._run()
    assert sleeps == [(120, 120)] * 4
    assert heartbeat._tasks[0].do_due.call_count == 2
    assert heartbeat.adopt.mock_calls == [call("bad"), *[call("ref")] * 3]
    assert slept == [0.1] * 2
    assert heartbeat.inbox.items == [None] * 3  # after each failure, and by the end
    heartbeat.wake()
    assert heartbeat.inbox.items == [None] * 4
