"""The life of a grant in this process, its lease and its renewals, by a clock that the test sets."""

import random
import weakref
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from django_mongolock.engine.protocol.actions import FOREVER, Acquisition, Granted
from django_mongolock.engine.rule.document import Terms
from django_mongolock.engine.session.grant import CLOSED, NOT_FOUND, Grant, OwnerToken, State, User

NOW = datetime.now(UTC)


class Clock:
    """A clock that shows the set time."""

    time = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def now() -> Clock:
    return Clock()


@pytest.fixture
def make(now: Clock) -> Callable[..., Grant]:
    """Return a function that makes a grant. The grant was asked for at 100, with a lease of 30 seconds and a place of
    12.

    - until: the end of the grant, if it is held.
    - others: options of the acquisition.
    """

    def make(
        until: float | None = None, *, auto_renew: bool = True, max_hold: float | None = None, **others: Any
    ) -> Grant:
        acquisition = Acquisition("k", "g", Terms(lease=30, margin=1, waiter_lease=12), "s", **others)
        grant = Grant(acquisition, worker="w", auto_renew=auto_renew, max_hold=max_hold, now=now)
        if until is not None:
            assert grant.mark_held(Granted(5, NOW, until, now.time))
        return grant

    return make


def seen(grant: Grant) -> tuple[object, ...]:
    """Return the public facts of *grant*."""
    return grant.held, grant.remaining, grant.held_for, grant.ends_at, grant.length, grant.renewable


def test_the_life_of_a_grant(make: Callable[..., Grant], now: Clock) -> None:
    """P1, P7: The life of a grant shows in held, remaining, held_for, ends_at, length and renewable."""
    grant = make()
    assert (seen(grant), grant.lease.renew_at, grant.lost) == ((False, 0, 0, FOREVER, 12, True), 104, False)
    grant.renewed(112, 100)
    assert (seen(grant), grant.lost) == ((False, 0, 0, FOREVER, 12, True), False)
    now.time = 103
    assert grant.mark_held(Granted(5, NOW, 133, 103, uncontended=True))
    assert not grant.mark_held(Granted(6, NOW, 133, 103))
    assert (grant.token, grant.acquired_at, grant.reporting.waited, grant.lease.uncontended) == (5, NOW, 3, True)
    assert (seen(grant), grant.lease.renew_at) == ((True, 30, 0, 133, 30, True), 113)
    now.time = 132.5
    assert seen(grant) == (True, 0.5, 29.5, 133, 30, True)
    now.time = 133
    assert (seen(grant), grant.lost) == ((False, 0, 30, 133, 30, False), True)
    assert grant.reason == "its lease ended before it was renewed"
    assert (grant.reporting.held_for, grant.token) == (30, 5)
    assert (make().token, make(90).remaining) == (0, 0)
    early = make(160)
    now.time = 99
    assert early.held_for == 0
    now.time = 140
    assert (grant.held_for, grant.ends_at, grant.mark_released(), grant.mark_lost("again")) == (30, 133, False, False)


def test_a_grant_that_is_released(make: Callable[..., Grant], now: Clock) -> None:
    """P7: A grant is released once. If its command does not find the grant, it was lost after all, unless its session
    was closed."""
    for reason, later in (("released", True), (CLOSED, False)):
        grant = make(130)
        assert (grant.mark_released(), grant.mark_released()) == (True, False)
        assert (grant.state, grant.reason, grant.ends_at, grant.remaining) == (State.RELEASED, "released", FOREVER, 0)
        assert (grant.renewable, grant.lost, grant.mark_lost(NOT_FOUND)) == (False, False, False)
        grant.reason = reason
        assert grant.mark_lost(NOT_FOUND, by_release=True) is later
        assert grant.lost is later
        assert not grant.mark_lost(NOT_FOUND, by_release=True)
    assert not make().mark_released()
    now.time = 200
    late = make(200)
    assert (late.lost, late.state) == (True, State.LOST)
    over = make(130)
    assert (over.mark_released(), over.lost, over.drop_user(weakref.ref(OwnerToken))) == (False, True, False)


def test_when_it_is_renewed(make: Callable[..., Grant], now: Clock) -> None:
    """P6: A grant is renewed after a third of its time. If it was queued for, the time of its place counts at first. A
    grant with a longest hold is not renewed beyond that. A deferred grant is renewed after two thirds."""
    for until, max_hold, ends, renew_at, renewable in (
        *((130.0, None, 130, 110, True), (112.0, None, 112, 104, True), (112.5, None, 112.5, 92.5, True)),
        *((130.0, 20.0, 120, 100, False), (130.0, 40.0, 130, 110, True), (130.0, 30.0, 130, 110, False)),
    ):
        grant = make(until, max_hold=max_hold)
        assert (grant.lease.until, grant.lease.renew_at, grant.renewable) == (ends, renew_at, renewable)
        assert grant.lease.last == (FOREVER if max_hold is None else 100 + max_hold)
    assert not make(130, auto_renew=False).renewable
    assert make(auto_renew=False).renewable
    grant = make(130)
    grant.lease.renewing = True
    assert not grant.renewable
    grant.defer_renewals()
    assert grant.lease.renew_at == 120
    grant.resume_renewals()
    assert grant.lease.renew_at == 110
    grant.lease.renew_at = 125
    grant.defer_renewals()
    assert grant.lease.renew_at == 125
    grant.lease.renew_at = 90
    grant.resume_renewals()
    assert grant.lease.renew_at == 90
    grant.lease.put_off(7)
    assert (grant.lease.until, grant.lease.renew_at) == (137, 97)
    now.time = 160
    capped = make(max_hold=40.0)
    assert capped.mark_held(Granted(5, NOW, 190, 160))
    now.time = 199
    capped.renewed(229, 199)
    assert (capped.lease.until, capped.lease.last) == (200, 200)
    now.time = 200
    assert (capped.held, capped.reason) == (False, "it was held longer than max_hold")
    now.time = 100
    for max_hold in (None, 40.0):
        reader = make(max_hold=max_hold)
        reader.lease.last = 115  # as a downgrade leaves it
        assert reader.mark_held(Granted(5, NOW, 130, 100))
        assert (reader.lease.until, reader.lease.last) == (115, 115)


def test_what_a_renewal_gives(make: Callable[..., Grant]) -> None:
    """P1, P7: A renewal brings no end nearer, and ends the count of failures. A longer lease stays long, and a loss
    stays a loss."""
    grant = make(130)
    for until, now, length, stands in (
        (129, 105, 99, (130, 30, 3, 110)),
        (130, 105, 0, (130, 30, 0, 110)),
        (140, 110, 0, (140, 30, 0, 120)),
        (170, 110, 60, (170, 60, 0, 130)),
        (171, 111, 30, (171, 60, 0, 131)),
    ):
        grant.lease.failures = 3 if length == 99 else grant.lease.failures
        grant.renewed(until, now, length)
        assert (grant.lease.until, grant.lease.length, grant.lease.failures, grant.lease.renew_at) == stands
    waiter = make()
    waiter.renewed(112, 100)
    assert (waiter.lease.until, waiter.lease.renew_at, waiter.state) == (112, 104, State.WAITING)
    grant.mark_lost("taken")
    grant.renewed(300, 112)
    assert grant.lease.until == 171


def test_a_renewal_that_failed_is_tried_again(make: Callable[..., Grant], monkeypatch: pytest.MonkeyPatch) -> None:
    """F28, F44, F66: A holder's renewal is retried at once, or within a second. A waiter's is retried later and later,
    up to a quarter of its place."""
    bounds = list[tuple[float, ...]]()

    def highest(*given: float) -> float:
        bounds.append(given)
        return given[1]

    monkeypatch.setattr(random, "uniform", highest)
    holder, waiter = make(130), make()
    holder.postpone(105, at_once=True)
    assert (holder.lease.failures, holder.lease.renew_at) == (1, 105)
    holder.postpone(106)
    assert (holder.lease.failures, holder.lease.renew_at) == (2, 107)
    found = list[float]()
    for _ in range(3):
        waiter.postpone(100, at_once=True)
        found.append(waiter.lease.renew_at)
    assert found == [101, 102, 103]
    assert set(bounds) == {(0.5, 1.0)}
    short = Grant(
        Acquisition("k", "g", Terms(lease=5, waiter_lease=2), "s"), worker=None, auto_renew=True, now=lambda: 0.0
    )
    for stands in (0.2, 0.4, 0.5, 0.5):
        short.postpone(0)
        assert short.lease.renew_at == pytest.approx(stands)
    for _ in range(2_000):
        short.postpone(0)  # with no number that is too large
    assert short.lease.renew_at == 0.5
    short.lease.waiter_length = FOREVER
    short.postpone(0)
    assert short.lease.renew_at == 1024


def test_who_has_a_grant(make: Callable[..., Grant], monkeypatch: pytest.MonkeyPatch) -> None:
    """F65: The users of a grant are the lock objects that share it. The last one stays noted, and dropped ones do not
    count. A single user allocates no object, because the garbage collector might run then under the mutex."""
    locks = [OwnerToken() for _ in range(3)]
    refs: list[weakref.ref[object]] = [weakref.ref(lock) for lock in locks]
    users = [User(ref, {}) for ref in refs]
    grant = make()
    assert not grant.add_user(users[0])
    assert not grant.users
    grant = make(130)
    for user in (*users, users[0]):
        assert grant.add_user(user)
    assert list(grant.users) == [users[1], users[2], users[0]]
    assert grant.drop_user(refs[1]) is None
    assert list(grant.users) == [users[2], users[0]]
    del locks[2], user
    assert grant.drop_user(refs[0]) is True
    assert (grant.state, list(grant.users)) == (State.RELEASED, [users[2], users[0]])
    assert not grant.add_user(users[1])
    assert (grant.drop_user(refs[0]), grant.mark_released()) == (False, False)
    one = make(130)
    one.users = (users[0],)
    assert one.drop_user(refs[0]) is True
    assert (two := make(130)).add_user(users[0])
    assert two.add_user(users[1])
    assert two.mark_released()  # of both
    assert make().drop_user(refs[0]) is False
    other = make(130)
    other.users = (users[1],)
    assert other.drop_user(refs[0]) is None
    assert other.held
    monkeypatch.delattr(Grant, "_users_but")
    assert other.drop_user(refs[1]) is True


def test_what_may_still_arrive(make: Callable[..., Grant], now: Clock) -> None:
    """F17, F99: A grant is in doubt after a command without an answer, or after a hand-over. A tombstone that was
    needed once stays needed."""
    grant = make(130)
    assert (grant.in_doubt, grant.needs_tombstone(), grant.outcome_unknown) == (False, False, False)
    grant.waiting.handover_reserved = True
    assert (grant.in_doubt, grant.needs_tombstone()) == (True, True)
    grant.waiting.handover_reserved = False
    assert (grant.in_doubt, grant.needs_tombstone()) == (True, True)
    reported = list[object]()
    assert grant.owner_token() is None
    token = grant.new_owner_token(reported.append)
    assert grant.owner_token() is token
    now.time = 130
    assert grant.owner_token() is None
    ref = grant.owner_ref
    assert ref is not None
    assert ref.grant is grant
    del token
    assert reported == [ref]
    for reported_as, news in (("", False), ("acquired", True), ("end", False)):
        grant.reporting.reported = reported_as  # type: ignore[assignment]
        assert grant.end_is_news() is news
        assert grant.reporting.reported == ("end" if news else reported_as)


def test_its_line(make: Callable[..., Grant]) -> None:
    """F45, F69: Grants that compete on the same terms share a line. A thread that holds another lock has a line of its
    own."""
    assert make().line == make().line
    assert make(nested=True).line != make().line
