"""Who looks on says what was wrong, and nothing that he does not know for sure."""

import itertools
from typing import Any, cast

import pytest

from django_mongolock.engine.lock import MongoLock
from tests.engine.watching import Grant, Kind, Watch, Watched

EXCLUSIVE, SHARED, TWO, THREE = Kind("exclusive"), Kind("shared"), Kind("semaphore", 2), Kind("semaphore", 3)


class Played:
    """A lock that is held or not, as the test says."""

    held = True


class Stage:
    """A watch by a clock that goes on by a second at each look at it."""

    def __init__(self) -> None:
        self.seconds = itertools.count(1.0)
        self.watch = Watch(now=lambda: float(next(self.seconds)))
        self.tokens = itertools.count(1)

    def got(self, kind: Kind, *, token: int | None = None, owner: object = None, **facts: Any) -> Watched:
        """Somebody has acquired a lock, which was looked at as if by a thread that is not scheduled often: once."""
        now = self.watch.now()
        number = next(self.tokens) if token is None else token
        grant = Grant("k", number, kind, "somebody", **{"asked": now, "had": now, **facts})
        return self.watch.got(cast("MongoLock", Played()), grant, owner, shares=owner is not None)

    def end(self, watched: Watched) -> None:
        """It is not held any more."""
        cast("Any", watched.lock).held = False

    @property
    def violations(self) -> list[str]:
        return self.watch.violations


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_held_before_and_after_is_held_meanwhile(stage: Stage) -> None:
    """P1: two that exclude each other overlap for sure if one is held before and after the other is."""
    first = stage.got(EXCLUSIVE)
    stage.got(EXCLUSIVE)
    assert stage.violations == []
    stage.watch.look(first)
    assert "both held" in stage.violations[0]


def test_what_nobody_saw_counts_for_nothing(stage: Stage) -> None:
    """That the first was held, and then the second, says nothing, however long it took to look."""
    first = stage.got(EXCLUSIVE)
    second = stage.got(EXCLUSIVE)
    stage.end(first)
    stage.watch.look_at_all()
    stage.watch.look(second)
    assert stage.violations == []


@pytest.mark.parametrize(
    ("kinds", "wrong"),
    [
        ([EXCLUSIVE, SHARED], True),
        ([SHARED, EXCLUSIVE], True),
        ([EXCLUSIVE, TWO], True),
        ([SHARED, TWO], True),
        ([TWO, THREE], True),
        ([SHARED] * 5, False),
        ([TWO] * 2, False),
        ([TWO] * 3, True),
        ([THREE] * 3, False),
        ([THREE] * 4, True),
    ],
    ids=str,
)
def test_who_excludes_whom(stage: Stage, kinds: list[Kind], wrong: bool) -> None:
    """P1: an exclusive all others, different kinds each other, and one more than its permits a semaphore."""
    for kind in kinds:
        stage.got(kind)
    stage.watch.look_at_all()
    assert bool(stage.violations) == wrong


def test_permits_are_counted_at_one_moment(stage: Stage) -> None:
    """P1: three that were held with the same one, but not at the same time, are not three."""
    long = stage.got(THREE)
    for _ in range(3):
        brief = [stage.got(THREE), stage.got(THREE)]
        stage.watch.look_at_all()
        for watched in brief:
            stage.end(watched)
    stage.watch.look(long)
    assert stage.violations == []


def test_what_is_over_is_over(stage: Stage) -> None:
    """P7: what was not held, or was released, is not held again."""
    lost, released = stage.got(SHARED), stage.got(SHARED)
    stage.end(lost)
    stage.watch.look(lost)
    cast("Any", lost.lock).held = True
    stage.watch.look(lost)
    stage.watch.releases(released)
    assert len(stage.violations) == 1
    stage.watch.released(released)
    assert len(stage.violations) == 2
    assert all("held again" in violation for violation in stage.violations)


def test_tokens_grow(stage: Stage) -> None:
    """P2: with the order in which they were asked for, one after the other had his, or were held; one for each."""
    stage.got(SHARED, token=5)
    stage.got(SHARED, token=4)
    assert "smaller token" in stage.violations.pop()
    stage.got(SHARED, token=6, asked=0.0)
    stage.got(SHARED, token=3, asked=0.0)
    assert not stage.violations
    stage.got(SHARED, token=6)
    assert "one token" in stage.violations.pop()
    stage.end(stage.got(EXCLUSIVE, token=2, asked=0.0))
    assert any("larger token" in violation for violation in stage.violations)


def test_one_grant_may_have_several_objects(stage: Stage) -> None:
    """Those of a thread that takes again what it has; they are held as long as any of them."""
    owner = object()
    first, again = stage.got(EXCLUSIVE, token=7, owner=owner), stage.got(EXCLUSIVE, token=7, owner=owner)
    assert again.grant is first.grant
    stage.got(EXCLUSIVE, token=7, owner=object())
    assert "one token" in stage.violations[0]


def test_taken_by_force(stage: Stage) -> None:
    """F50: from then on two may be held, for its holder learns of it later; not before."""
    first = stage.got(EXCLUSIVE)
    stage.watch.cut(first.grant)
    stage.got(EXCLUSIVE)
    stage.watch.look_at_all()
    assert stage.violations == []


def test_minimum_hold(stage: Stage) -> None:
    """P5: nobody gets what was released before its minimum hold was over, unless it was taken by force."""
    for forced in (True, False):
        first = stage.got(EXCLUSIVE)
        stage.watch.releases(first)
        stage.end(first)
        if forced:
            stage.watch.cut(first.grant)
        stage.watch.released(first, keeps=1000.0)
        second = stage.got(EXCLUSIVE)
        stage.watch.look(second)
        stage.end(second)
        stage.watch.look(second)
        assert any("minimum hold" in violation for violation in stage.violations) is not forced


def test_too_soon_and_too_late(stage: Stage) -> None:
    """P7: a lock is held until its time is over, unless somebody ends it; and no longer than max_hold."""
    early, ended = stage.got(SHARED, good=1000.0), stage.got(SHARED, good=1000.0)
    stage.watch.releases(ended)
    for watched in (early, ended):
        stage.end(watched)
        stage.watch.look(watched)
    assert len(stage.violations) == 1
    assert "before its time" in stage.violations.pop()
    late = stage.got(SHARED, last=stage.watch.now() + 20)
    for _ in range(20):
        stage.watch.look(late)
    assert "max_hold" in stage.violations[0]
