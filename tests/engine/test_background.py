"""P6: Work in the background is tried again until it is done."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from django_mongolock.engine.protocol.actions import FOREVER
from django_mongolock.engine.session import background as background_module
from django_mongolock.engine.session import bulk
from django_mongolock.engine.session.background import (
    AT_EXIT_PAUSE,
    GIVE_UP_AFTER,
    LONGEST_EXIT,
    Background,
    Task,
)
from django_mongolock.engine.session.bulk import SHORT_LIMIT
from django_mongolock.engine.session.lanes import BACKGROUND, RELEASE
from django_mongolock.exceptions import LockBackendFailed


class World:
    """A heartbeat, threads and a store in which nothing happens by itself.

    - calls: calls that the threads have taken, each with its priority and key.
    - takes: whether there are threads.
    - looks: times at which the heartbeat has to look.
    - answers: whether the store answers an empty command.
    """

    def __init__(self) -> None:
        self.time, self.takes, self.answers = 100.0, True, True
        self.looks, self.calls = list[float](), list[tuple[Callable[[], object], int, str | None]]()
        self.schedule, self.threads = self.looks.append, self

    def now(self) -> float:
        return self.time

    def submit(self, call: Callable[[], object], *, priority: int, key: str | None = None) -> bool:
        if self.takes:
            self.calls.append((call, priority, key))
        return self.takes

    def work(self) -> None:
        """Make the waiting calls, and the calls that come meanwhile."""
        while self.calls:
            self.calls.pop(0)[0]()

    def primary(self) -> str:
        return "one"

    def renew(self, keys: object, step: object, limit: float) -> None:
        if not self.answers:
            raise LockBackendFailed("no answer")


class Attempts:
    """An attempt that counts, and fails for batches with a stuck key.

    - stuck: keys without an answer.
    - undone: keys that are not done.
    """

    def __init__(self) -> None:
        self.made, self.stuck, self.undone = list[tuple[str, float]](), set[str](), set[str]()

    def __call__(self, tasks: Sequence[Task], limit: float) -> Collection[Task]:
        self.made.append(("".join(str(task.key) for task in tasks), limit))
        if any(task.key in self.stuck for task in tasks):
            raise LockBackendFailed("no answer")
        return [task for task in tasks if task.key in self.undone]


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def background(world: World) -> Background:
    fake: Any = world
    return Background(fake, fake)


@pytest.fixture
def attempts() -> Attempts:
    return Attempts()


def task(
    attempts: Attempts, key: str, group: object = None, due: float = 100.0, *, pause: float = 0.0, tries: int = 0
) -> Task:
    pauses = (pause, 1.0)
    return Task(attempt=attempts, pauses=pauses, give_up=200.0, due=due, key=key, group=group, tries=tries)


@pytest.mark.parametrize(
    ("outcomes", "times"),
    [
        ([True], [101]),
        ([False, True], [101, 103]),
        ([False] * 3, [101, 103, 107]),
        ([None, False, True], [101, 103, 107]),
        ([None] * 4 + [False], [101, 103, 107, 111, 115]),
        ([ValueError(), True], [101, 103]),
        ([LockBackendFailed("refused", passing=False)] * 3, [101, 103, 107]),
    ],
    ids=str,
)
def test_a_call_is_repeated(world: World, background: Background, outcomes: list[Any], times: list[float]) -> None:
    """F84: A call is repeated after each pause while the answer is no, and after the last pause without an answer."""
    left, made = list(outcomes), list[float]()

    def call() -> bool:
        made.append(world.time)
        outcome = left.pop(0)
        if outcome is None or isinstance(outcome, Exception):
            raise outcome or LockBackendFailed("no answer")
        return bool(outcome)

    background.repeat(call, (1.0, 2.0, 4.0))
    while background.pending:
        assert world.looks[-1] == background.next_due()
        world.time = background.next_due()
        background.do_due(world.time)
        assert background.next_due() == FOREVER
        world.work()
    assert (made, left) == (times, [])


def test_a_call_is_given_up(world: World, background: Background, caplog: pytest.LogCaptureFixture) -> None:
    """P6: A call is given up after some time without an answer, with a warning."""

    def call() -> None:
        raise LockBackendFailed("no answer")

    background.repeat(call, (0.0,))
    for seconds, pending in ((0.0, 1), (GIVE_UP_AFTER - 1, 1), (1.0, 0)):
        world.time += seconds
        background.do_due(world.time)
        world.work()
        assert len(background.pending) == pending
        assert ("given up" in caplog.text) is not pending


def test_tasks_are_tried_when_they_are_due(world: World, background: Background, attempts: Attempts) -> None:
    """P8: A group is tried by one command, other tasks in the lanes of their keys. Without threads, all are tried at
    once."""
    for key, group, due in (("a", "g", 100), ("b", None, 100), ("c", "g", 99), ("d", "h", 101), ("e", "h", 100)):
        background.add(task(attempts, key, group, due))
    background.do_due(100)
    background.do_due(100)
    assert [how for _, *how in world.calls] == [[BACKGROUND, None], [BACKGROUND, "b"], [BACKGROUND, "e"]]
    world.work()
    assert attempts.made == [("ac", FOREVER), ("b", FOREVER), ("e", FOREVER)]
    assert [each.key for each in background.pending] == ["d"]
    world.takes, world.time = False, 101.0
    background.do_due(101)
    assert not background.pending


def test_a_failed_group_is_split(
    world: World, background: Background, attempts: Attempts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F180: A failed group is split down to the task without an answer, with a short limit, if the server answers an
    empty command."""
    monkeypatch.setattr(bulk, "PARTS", 2)
    attempts.stuck, attempts.undone = {"c"}, {"d"}
    for key in "abcd":
        background.add(task(attempts, key, "g"))
    background.do_due(100)
    world.work()
    assert attempts.made == [("abcd", FOREVER), *((each, SHORT_LIMIT) for each in ("ab", "cd", "c", "d"))]
    assert {(each.key, each.due) for each in background.pending} == {("c", 101), ("d", 101)}
    world.answers = False
    attempts.made.clear()
    background.do_due(101)
    world.work()
    assert attempts.made == [("cd", FOREVER)]


def test_the_end_of_a_process(
    world: World, background: Background, attempts: Attempts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P6: Every task is tried in time, with the priority of releases. An answer to a group puts the end off."""

    def sleep(_: float) -> None:
        assert {priority for _, priority, _ in world.calls} <= {RELEASE}
        world.work()
        world.time += 0.5

    monkeypatch.setattr(background_module, "time", SimpleNamespace(sleep=sleep))
    attempts.stuck, attempts.undone = {"stuck"}, {"undone"}
    for key, due, tries in (("a", 100, 0), ("stuck", 100, 0), ("undone", 160, 1), ("later", 100.6, 0)):
        background.add(task(attempts, key, due=due, tries=tries, pause=float(key == "later")))
    for key in "bc":
        background.add(task(attempts, key, "group", due=101.2, pause=1.0))
    background.begin_to_finish(2.0)
    assert background.end == 102
    background.finish()
    made = [key for key, _ in attempts.made]
    assert made == ["a", "stuck", "undone", "stuck", "stuck", "later", "stuck", "bc", "stuck", "stuck", "stuck"]
    assert attempts.made[0] == ("a", 0.5)
    assert attempts.made[-1] == ("stuck", 0.125)
    assert [each.key for each in background.pending] == ["stuck"]
    assert next(iter(background.pending)).due == pytest.approx(world.time - 0.5 + AT_EXIT_PAUSE)
    assert world.time == 103.5


def test_the_end_is_not_put_off_for_ever(world: World, background: Background, attempts: Attempts) -> None:
    background.begin_to_finish(2.0)
    world.time = 100 + LONGEST_EXIT
    for key in "ab":
        background.add(task(attempts, key, "group"))
    background.do_due(world.time)
    world.work()
    assert background.end == 100 + LONGEST_EXIT
