"""The protocol without any I/O, with its commands, their times, and its handling of the answers."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Generator
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from django_mongolock.engine.protocol import actions, procedures
from django_mongolock.engine.protocol.actions import (
    FOREVER,
    Acquisition,
    Answer,
    Apply,
    FindDeadlock,
    Granted,
    Pause,
    QueueNext,
    Read,
    ReleaseUncontended,
    Turn,
    WaitResult,
)
from django_mongolock.engine.protocol.procedures import WaitSchedule
from django_mongolock.engine.protocol.processes import NO_PROCESS, Fate
from django_mongolock.engine.rule.deadlock import Cycle, Wait
from django_mongolock.engine.rule.document import Mode, Step, Terms
from django_mongolock.engine.rule.replies import Former, News, Reply
from django_mongolock.exceptions import (
    LockBackendFailed,
    LockCancelled,
    LockDeadlock,
    LockMisused,
    LockNotAcquired,
    LockQueueFull,
)

NOW = datetime.now(UTC)
TERMS = Terms(lease=10, margin=1, waiter_lease=5)
ACQUISITION = Acquisition("k", "g", TERMS, "s")
#: Answers to a command that gave the lease itself, and to a command that found the lease of another command.
WHOLE = Reply(held=True, token=3, beat=7, acquired_at=NOW, first_end=11)
SHORT = replace(WHOLE, beat=6)
QUEUED = Reply(place=0, waiting=1, first_end=9, holder="somebody")
GONE = Reply(first_end=9, holder="somebody")


class Play:
    """A driver for one acquisition. Each call gives the outcome and shows the next action."""

    called_next = 0

    def __init__(self, wait: float | None, acquisition: Acquisition = ACQUISITION) -> None:
        self.now = 100.0
        deadline = FOREVER if wait is None else self.now + wait
        self.steps = procedures.acquire(acquisition, deadline, self.now, trial=wait == 0)
        self.action: Any = next(self.steps)
        self.result: Any = None

    def answer(self, reply: Reply, took: float = 0.01, former: Fate | None = None) -> Any:
        sent, self.now = self.now, self.now + took
        return self._send(Answer(reply, sent, self.now, isinstance(self.action, Apply) and reply.beat == 7, former))

    def fail(self, passing: bool = True, took: float = 1.0) -> Any:
        self.now += took
        self.action = self.steps.throw(LockBackendFailed("gone", "k", passing))
        return self.action

    def pause(self, beyond: float = 0.0) -> Any:
        """Let the pause end by itself. No session listens."""
        assert isinstance(self.action, Pause)
        seconds = min(self.action.timer, 1.0) if self.action.in_queue else self.action.timer
        assert seconds >= 0
        self.now += seconds + beyond
        return self._send(WaitResult(self.now))

    def hear(self, after: float = 0.01, **heard: Any) -> Any:
        """End the pause with something to hear."""
        assert isinstance(self.action, Pause)
        self.now += after
        return self._send(WaitResult(self.now, **heard))

    def _send(self, outcome: object) -> Any:
        try:
            self.action = self.steps.send(outcome)
            self.called_next += isinstance(self.action, QueueNext)
            while isinstance(self.action, QueueNext):
                self.action = self.steps.send(None)
        except StopIteration as end:
            self.action, self.result = None, end.value
        return self.action


def queued(reply: Reply = QUEUED, wait: float | None = 60) -> Play:
    """Somebody whose first command has found the lock held."""
    play = Play(wait)
    play.answer(reply)
    return play


def is_confirmation(action: Any) -> bool:
    """Return whether the action only renews the grant."""
    return isinstance(action, Apply) and action.step.renew == ("g",)


def test_a_single_try_is_one_command() -> None:
    """A try with wait=0 is one command, leaves nothing in the queue, and tells the holder and the time left."""
    play = Play(wait=0)
    assert play.action.step.trial
    with pytest.raises(LockNotAcquired) as refusal:
        play.answer(Reply(first_end=9, holder="somebody"))
    assert (refusal.value.holder, refusal.value.retry_after, refusal.value.owner) == ("somebody", 9, "")
    assert not isinstance(refusal.value, LockQueueFull)


@pytest.mark.parametrize(("left", "retry_after"), [(-3, 0), (0, 0), (None, 0), (0.5, 0.5)])
def test_a_refusal_tells_when_to_come_again_and_whose_the_lock_is(left: float | None, retry_after: float) -> None:
    with pytest.raises(LockNotAcquired) as refusal:
        Play(wait=0).answer(Reply(first_end=left, theirs={"owner": "bob", "acquired_at": NOW}))
    assert (refusal.value.retry_after, refusal.value.owner, refusal.value.waited) == (retry_after, "bob", 0)


@pytest.mark.parametrize(
    ("mode", "resize", "theirs", "refused"),
    [
        ("semaphore", False, ("semaphore", 3), True),
        ("semaphore", False, ("semaphore", 2), False),
        ("semaphore", False, ("shared", 3), False),
        ("semaphore", True, ("semaphore", 3), False),
        ("shared", False, ("semaphore", 3), False),
        ("semaphore", False, None, False),
    ],
)
def test_another_number_of_permits_is_a_mistake(
    mode: Mode, resize: bool, theirs: tuple[str, int] | None, refused: bool
) -> None:
    """Another number of permits is a mistake unless it is meant. Locks of other modes have no number to compare."""
    play = Play(60, replace(ACQUISITION, terms=replace(TERMS, mode=mode, capacity=2, resize=resize)))
    reply = replace(QUEUED, theirs=theirs and {"mode": theirs[0], "capacity": theirs[1]})
    with pytest.raises(LockMisused, match="3 permits") if refused else nullcontext():
        assert isinstance(play.answer(reply), Pause)


def test_a_queue_that_is_full_refuses_at_once() -> None:
    """The refusal has the holder, and comes without the wait."""
    with pytest.raises(LockQueueFull) as refusal:
        queued(GONE, wait=60)
    assert refusal.value.holder == "somebody"
    assert refusal.value.waited == pytest.approx(0.01)


def test_a_refusal_says_for_how_long_the_lock_is_held_and_how_many_wait() -> None:
    """A caller can decide by these facts whether to wait. An unknown fact does not look like a small value."""
    now = datetime(2026, 1, 1, tzinfo=UTC)
    holder = {"acquired_at": now - timedelta(seconds=2.5)}
    for reply, known in (
        (Reply(first_end=9, holder="another", theirs=holder, now=now, waiting=3), (2.5, 3)),
        (Reply(first_end=9, holder="another", theirs=holder, now=now - timedelta(seconds=5)), (0, 0)),
        (Reply(first_end=9, holder="another"), (math.inf, 0)),
    ):
        play = Play(wait=0)
        with pytest.raises(LockNotAcquired) as refusal:
            play.answer(reply)
        assert (refusal.value.held_for, refusal.value.waiting) == known


def test_a_last_try_after_a_wait_in_line_tells_the_whole_wait() -> None:
    """A refusal counts the wait from the first request, also if the command came back late. The last command is not
    part of the wait."""
    steps = procedures.acquire(ACQUISITION, 105.0, 105.4, since=100.0, trial=True)
    next(steps)
    with pytest.raises(LockNotAcquired) as refusal:
        steps.send(Answer(GONE, 105.4, 105.9))
    assert refusal.value.waited == pytest.approx(5.4)


def test_a_waiter_only_looks_until_it_is_granted_then_confirms() -> None:
    """F42: A waiter without bells polls. A grant that it sees is confirmed for a whole lease. The deadline counts from
    before that command, not from the poll that showed the grant."""
    play = queued()
    for _ in range(5):
        assert isinstance(play.action, Pause)
        assert isinstance(play.pause(), Read)
        play.answer(QUEUED)
    play.pause()
    confirm = play.answer(SHORT)
    assert confirm == Apply("k", Step(ask="g", renew=("g",)))
    play.now += 5
    play.answer(WHOLE)
    assert play.result.until == pytest.approx(play.now - 0.01 + TERMS.lease)


def test_a_look_alone_never_grants() -> None:
    """F6: A read never grants, even if it shows a whole lease. A write confirms the lease first."""
    play = queued()
    play.pause()
    assert is_confirmation(play.answer(WHOLE))
    assert play.result is None


@pytest.mark.parametrize("then", [GONE, *(replace(QUEUED, first_end=left) for left in (None, 0.0, -0.1))])
def test_a_pruned_waiter_enters_again_and_a_dead_holder_is_passed_over(then: Reply) -> None:
    """F27, F41: If the waiter is out of the queue, nobody holds the lock, or the holder's lease is over, an update
    decides."""
    play = queued(replace(QUEUED, first_end=0.5))
    assert play.action.timer == 0.5 + procedures.SLACK
    play.pause()
    action = play.answer(then)
    assert action == Apply("k", Step(ask="g", add=ACQUISITION.entry))


@pytest.mark.parametrize("left", [None, 0.0, -5.0])
def test_an_update_that_has_changed_nothing_is_not_sent_again_at_once(left: float | None) -> None:
    """The rule leaves a damaged document as it was. A waiter still checks its deadline and `cancel()`."""
    play, in_vain = queued(wait=5), replace(QUEUED, first_end=left)

    def go_on() -> None:
        for _ in range(3_000):
            play.pause() if isinstance(play.action, Pause) else play.answer(in_vain, took=0.0)

    with pytest.raises(LockNotAcquired):
        go_on()
    assert play.now == pytest.approx(105.0, abs=0.02)


def test_the_wait_ends_with_a_trial() -> None:
    """F43: At the end of the wait one last update either grants the lock or removes the waiter. There is nothing
    between."""
    play = queued(wait=5)
    while not isinstance(play.action, Apply):
        play.pause() if isinstance(play.action, Pause) else play.answer(QUEUED)
    assert play.action.step.trial
    assert play.called_next == 1  # who stands behind it here comes into the queue before it goes
    assert play.now == pytest.approx(105.0, abs=0.02)
    with pytest.raises(LockNotAcquired) as refusal:
        play.answer(GONE)
    assert refusal.value.waited == pytest.approx(5.0, abs=0.05)


def test_news_at_the_end_of_the_wait_are_no_last_try() -> None:
    """P6, F43: A waiter that hears of the lock or of its place only at the deadline has had no last try. The waiter is
    then granted the lock, or leaves the queue."""
    for heard in ({"answer": Answer(QUEUED, 105.0, 106.0, whole=True)}, {"news": News(9, NOW), "queued_until": 106.2}):
        play = queued(wait=5)
        action = play.hear(after=6, **heard)
        assert play.called_next == 0
        if "news" in heard:
            assert is_confirmation(action)
        else:
            assert (type(action), action.timer) == (Pause, 0.0)
            assert play.pause().step.trial
    play = queued(wait=5)
    play.now = 104.0
    assert play.hear(after=1).step.trial
    assert play.called_next == 1


def test_a_hand_over_that_finds_no_room_in_the_queue_refuses() -> None:
    with pytest.raises(LockQueueFull):
        queued().hear(answer=Answer(GONE, 100.0, 100.1))


def test_an_unknown_outcome_is_repeated_with_the_same_id() -> None:
    """F2, F8, F15: Steps are idempotent by the id of the grant. A command without an answer is sent again until it has
    one."""
    play = Play(wait=10)
    first = play.action
    for _ in range(3):
        assert isinstance(play.fail(), Pause)
        assert play.pause() == first
    play.answer(WHOLE)
    assert play.result is not None


def test_a_repeated_command_that_finds_its_own_grant_confirms_it() -> None:
    """F15: The first copy of the command was applied earlier. The lease is not whole any more, and its start is
    unknown."""
    play = Play(wait=10)
    play.fail()
    play.pause()
    assert is_confirmation(play.answer(SHORT))


def test_a_single_try_is_repeated_once_and_then_fails() -> None:
    """F9: One failure is retried even without any time to wait. The second one is raised."""
    play = Play(wait=0)
    play.fail()
    play.pause()
    with pytest.raises(LockBackendFailed):
        play.fail()


def test_a_single_try_does_not_wait_twice_for_a_server_that_is_away() -> None:
    """F9: A command that failed after seconds is not retried when no time is left to wait."""
    play = Play(wait=0)
    play.fail(took=5.0)
    with pytest.raises(LockBackendFailed):
        play.pause()


def test_a_wait_that_is_over_when_a_command_fails_is_not_made_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """F9: After many failures a pause is long. The last pause is no longer than the time left when the command was
    sent."""
    monkeypatch.setattr(procedures, "backoff", float)
    play = Play(wait=None)
    for attempt in (2, 3, 4):
        assert play.fail().timer == attempt
        play.pause()
    monkeypatch.setattr(procedures, "backoff", lambda attempt: 1.0)
    assert Play(wait=0).fail(took=1.0).timer == 0.1
    play = Play(wait=5.2)
    assert play.fail(took=4.0).timer == 1
    play.pause()
    assert play.fail(took=4.0).timer == pytest.approx(0.2)
    with pytest.raises(LockBackendFailed):
        play.pause()


@pytest.mark.parametrize(
    ("wait", "took", "sent"),
    [(2.0, (0.5, 0.5), 2), (4.0, (2.5,), 1), (4.0, (0.5, 0.5, 0.0), 3), (3.0, (2.5, 0.5), 1)],
)
def test_a_command_is_sent_once_more_at_the_end_of_the_wait(
    monkeypatch: pytest.MonkeyPatch, wait: float, took: tuple[float, ...], sent: int
) -> None:
    """F9: A last command is sent if the failure came at once, even after several failures. If the failure took the
    remaining time, no command is sent."""
    monkeypatch.setattr(procedures, "backoff", lambda attempt: 1.5)
    play, commands = Play(wait), 0
    with suppress(LockBackendFailed):
        for seconds in took:
            commands += isinstance(play.action, Apply)
            play.fail(took=seconds)
            play.pause()
        pytest.fail("it goes on")
    assert commands == sent


def test_it_goes_on_for_as_long_as_the_server_is_away() -> None:
    """F9: Retries go on without a limit, through any number of failures, with a pause of a second at most between two
    commands."""
    play = Play(wait=None)
    for _ in range(2_000):
        assert play.fail().timer <= 1
        assert isinstance(play.pause(), Apply)


@pytest.mark.parametrize("fails", [False, True])
def test_a_cancelled_wait_leaves_the_queue(fails: bool) -> None:
    """F43, P5, F176: The command that leaves the queue also releases a lock that was granted in that moment. The error
    tells the length of the wait, and a missing answer is its cause."""
    play = queued()
    action = play.hear(after=4, cancelled=True)
    assert action == Apply("k", Step(ask="g", remove=("g",), force=True))
    with pytest.raises(LockCancelled) as refusal:
        play.fail(took=0) if fails else play.answer(GONE)
    assert refusal.value.waited == pytest.approx(4, abs=0.1)
    assert isinstance(refusal.value.__cause__, LockBackendFailed) == fails


def test_a_wait_that_is_cancelled_while_the_server_is_away() -> None:
    """F176, F9: The wait ends at once, without another command."""
    play = Play(wait=60)
    play.fail(took=3)
    play.hear(after=2)
    play.fail(took=3)
    with pytest.raises(LockCancelled) as refusal:
        play.hear(after=1, cancelled=True)
    assert refusal.value.waited == pytest.approx(9)
    assert isinstance(refusal.value.__cause__, LockBackendFailed)


def test_a_downgrade_that_another_command_has_made_is_confirmed() -> None:
    """P1: The answer to a second copy is no lease. The reader asks for a lease of its own first."""
    steps = procedures.downgrade(ACQUISITION, "former", FOREVER, 100.0)
    next(steps)
    assert is_confirmation(steps.send(Answer(SHORT, 100.0, 100.1)))
    with pytest.raises(StopIteration) as end:
        steps.send(Answer(WHOLE, 100.1, 100.2, whole=True))
    assert end.value.value.until == 110.1


def test_a_downgrade_that_has_found_nothing_is_none() -> None:
    """P1: An entry that is only queued is no reader."""
    steps = procedures.downgrade(ACQUISITION, "former", FOREVER, 100.0)
    next(steps)
    assert is_confirmation(steps.send(Answer(QUEUED, 100.0, 100.1, whole=True)))
    with pytest.raises(StopIteration) as end:
        steps.send(Answer(QUEUED, 100.1, 100.2, whole=True))
    assert end.value.value is None


def test_a_downgrade_is_tried_until_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procedures, "backoff", lambda attempt: 1.5)
    steps = procedures.downgrade(ACQUISITION, "former", 110.0, 100.0)
    next(steps)
    for answer in (SHORT, WHOLE):
        pause = steps.throw(LockBackendFailed("gone", "k", True))
        assert pause == Pause("g", 1.5)
        steps.send(WaitResult(101.5))
        if answer is SHORT:
            steps.send(Answer(SHORT, 101.5, 102.0))


def test_a_final_refusal_is_raised_at_once() -> None:
    """F14: An error that cannot pass, such as missing rights or a wrong password, is not retried."""
    play = Play(wait=60)
    with pytest.raises(LockBackendFailed):
        play.fail(passing=False)


def test_an_answer_that_took_longer_than_its_lease_grants_nothing() -> None:
    """F16: An answer that took longer than the lease grants nothing. A renewal has to confirm the lease in time."""
    play = Play(wait=60)
    assert is_confirmation(play.answer(WHOLE, took=TERMS.lease))
    with pytest.raises(LockBackendFailed, match="longer than the lease"):
        play.answer(WHOLE, took=TERMS.lease)
    play = Play(wait=60)
    play.answer(WHOLE, took=TERMS.lease - 0.001)
    assert play.result is not None


@pytest.mark.parametrize(
    ("terms", "waiting", "uncontended"),
    [
        (TERMS, 0, True),
        (TERMS, 1, False),
        (replace(TERMS, min_hold=1), 0, False),
        (replace(TERMS, mode="shared"), 0, False),
    ],
)
def test_an_exclusive_grant_without_waiters_is_uncontended(terms: Terms, waiting: int, uncontended: bool) -> None:
    """The short release is for such grants, and ignores minimum holds."""
    play = Play(10, replace(ACQUISITION, terms=terms))
    play.answer(replace(WHOLE, waiting=waiting))
    assert play.result.uncontended is uncontended


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize(("copies", "tombstone_ttl"), [(False, 0), (True, procedures.TOMBSTONE_TTL)])
def test_what_is_removed_by_which_command(stays: bool, copies: bool, tombstone_ttl: int) -> None:
    """P8: Each removal is one command. Removal is forced unless the grant has a minimum hold, and leaves a tombstone if
    a copy of its command may still arrive."""
    step = Step(remove=("g",), given="g", force=not stays, tombstone_ttl=tombstone_ttl)
    assert next(procedures.release("k", "g", stays=stays, leave_tombstone=copies)) == Apply("k", step)
    for_good = Step(remove=("g",), ask="g", force=not stays, tombstone_ttl=procedures.TOMBSTONE_TTL)
    assert procedures.removal_for_good("k", "g", stays=stays) == Apply("k", for_good)
    resumed = Step(ask="g", add=ACQUISITION.entry, resumes=True, trial=True)
    resumed = replace(resumed, remove=("old",), given="old", force=True, tombstone_ttl=tombstone_ttl)
    steps = procedures.downgrade(ACQUISITION, "old", FOREVER, 0.0, leave_tombstone=copies)
    assert next(steps) == Apply("k", resumed)


@pytest.mark.parametrize("left", [set(), {"k"}])
def test_the_cheap_release_comes_first(left: set[str]) -> None:
    """P8: The whole release follows if the cheap one did nothing. The cheap one is skipped for an heir, and if copies
    are on their way."""
    steps = procedures.release("k", "g", uncontended=True)
    assert next(steps) == ReleaseUncontended(("k",), ("g",))
    if left:
        assert steps.send(left) == procedures.releasing("k", "g")
    else:
        with pytest.raises(StopIteration) as end:
            steps.send(left)
        assert end.value.value == (True, None)
    for others in ({"heir": ACQUISITION}, {"leave_tombstone": True}):
        assert isinstance(next(procedures.release("k", "g", uncontended=True, **others)), Apply)


# Bells, the line of the process, deadlocks


def test_news_of_the_grant_is_enough() -> None:
    """P8: A bell is rung for a grant that the majority has. A waiter that hears the bell holds the lock without another
    command, for as long as its place in the queue was good."""
    play = queued()
    play.hear(news=News(9, NOW), queued_until=play.now + 4)
    assert play.result == Granted(9, NOW, play.now - 0.01 + 4, play.now)


@pytest.mark.parametrize("token", [8, 9])
def test_news_from_before_this_place_in_the_queue_is_old(token: int) -> None:
    """P1, F28: A waiter that slept through a grant and queued again hears of that grant as well, or has heard of it.
    The grant is gone, as the last token answered to its queueing shows, however long the new place is good."""
    play = queued()
    play.pause()
    action = play.answer(replace(GONE, last_token=9))
    assert action.step.add == ACQUISITION.entry
    play.answer(replace(QUEUED, last_token=9))
    assert play.hear(news=News(token, NOW), queued_until=play.now + 4) == Read("k", "g")
    play.answer(replace(QUEUED, last_token=9))
    play.hear(news=News(10, NOW), queued_until=play.now + 4)
    assert play.result.token == 10


def test_what_a_renewal_found_makes_news_old() -> None:
    """P1, F28: News of a grant is old if a renewal has found this place in the queue after that grant."""
    play = queued()
    assert play.hear(news=News(9, NOW), queued_until=play.now + 4, last_token=9) == Read("k", "g")


def test_an_older_answer_makes_no_old_news_new() -> None:
    """P1, F28: The largest token of any answer decides whether news is old, also if a late answer is read after a later
    one. Here a hand-over that was to queue the waiter got its answer late. Meanwhile the waiter was granted the lock,
    slept through that, and queued again with its own command."""
    play = queued(replace(QUEUED, last_token=20))
    play.hear(answer=Answer(replace(QUEUED, last_token=8), 90.0, 95.0, whole=True))
    assert isinstance(play.action, Pause)
    action = play.hear(news=News(9, NOW), queued_until=play.now + 4)
    assert play.result is None
    assert action == Read("k", "g")


@pytest.mark.parametrize("token", [8, 9])
def test_a_hand_over_from_before_this_place_in_the_queue_is_old(token: int) -> None:
    """P1, F99: The answer to a hand-over is read late. Meanwhile that grant was removed and queued again."""
    play = queued(replace(QUEUED, last_token=9))
    handed_over = replace(WHOLE, token=token, last_token=token)
    action = play.hear(answer=Answer(handed_over, play.now - 2, play.now - 1, whole=True))
    assert (action, play.result) == (Read("k", "g"), None)
    play.answer(replace(QUEUED, last_token=9))
    play.hear(answer=Answer(replace(handed_over, token=10, last_token=10), play.now - 2, play.now - 1, whole=True))
    assert play.result.token == 10


def test_news_that_comes_in_time_is_enough() -> None:
    """P8: News with a quarter of a place left is used before a renewal."""
    play = Play(60)
    play.answer(QUEUED, took=0.5)
    play.hear(after=0.5, news=News(9, NOW), queued_until=101 + TERMS.waiter_lease / 4)
    assert play.result.until == 102.25


@pytest.mark.parametrize("left", [1.2, 0.0, -3.0])
def test_news_that_comes_late_is_confirmed(left: float) -> None:
    """P1, F26, F28: If little is left of the place in the queue, a renewal must show that the place still exists."""
    play = queued()
    assert is_confirmation(play.hear(news=News(9, NOW), queued_until=play.now + left))
    assert play.result is None
    assert play.answer(GONE) == Apply("k", Step(ask="g", add=ACQUISITION.entry))  # it is too late


def test_a_lock_without_renewal_takes_a_whole_lease() -> None:
    """With auto_renew=False, a whole lease counts from the grant."""
    play = Play(60, replace(ACQUISITION, whole=True))
    play.answer(QUEUED)
    assert is_confirmation(play.hear(news=News(9, NOW), queued_until=play.now + 4))
    play.answer(WHOLE)
    assert play.result.until == pytest.approx(play.now - 0.01 + TERMS.lease)


def test_a_session_that_listens_does_not_poll() -> None:
    """P8: Only the head of the queue wakes by itself, at the end of the holder's lease. Others wake at their
    deadline."""
    play = Play(wait=60)
    assert play.answer(QUEUED).timer == pytest.approx(9 + procedures.SLACK)
    play = Play(wait=60)
    assert play.answer(replace(QUEUED, place=3)).timer == pytest.approx(60, abs=0.1)
    play = Play(wait=None)
    assert play.answer(replace(QUEUED, place=3)).timer == FOREVER


def cycle(*waits: str) -> Cycle:
    """Return a cycle of waiters with these grants. The last one is the youngest."""
    return Cycle(tuple(Wait(f"k{g}", g, NOW + timedelta(seconds=n), "x") for n, g in enumerate(waits)))


@pytest.mark.parametrize(("found", "dies"), [(None, False), (cycle("g", "h"), False), (cycle("h", "g"), True)])
def test_only_a_holder_looks_for_a_deadlock_and_only_the_youngest_gives_up(found: Cycle | None, dies: bool) -> None:
    """F45, F44: All waiters in the cycle pick the same victim. The others go on waiting, and send nothing before
    that."""
    play = Play(None, replace(ACQUISITION, nested=True))
    asleep = play.answer(replace(QUEUED, place=3))
    assert asleep.timer == pytest.approx(procedures.DEADLOCK_CHECK_AFTER, abs=0.1)
    while not isinstance(play.action, FindDeadlock):
        play.pause() if isinstance(play.action, Pause) else play.answer(replace(QUEUED, place=3))
    assert play.now == pytest.approx(100 + procedures.DEADLOCK_CHECK_AFTER, abs=0.2)
    action: Any = play._send(found)
    if dies:
        assert action.step.remove == ("g",)
        with pytest.raises(LockDeadlock) as refusal:
            play.answer(GONE)
        assert refusal.value.waited == pytest.approx(procedures.DEADLOCK_CHECK_AFTER, abs=0.2)
    else:
        assert isinstance(action, Pause)
    play = Play(None)
    play.answer(replace(QUEUED, place=3))
    assert play.action.timer == FOREVER


def test_each_look_for_a_deadlock_is_twice_as_far_from_the_one_before() -> None:
    """F45: A long wait costs few searches for a deadlock."""
    schedule = WaitSchedule(0, deadlock_check_at=1)
    assert [now for now in range(40) if schedule.is_deadlock_check_due(now)] == [1, 3, 7, 15, 31]


class InLine(Play):
    """A driver for a waiter in line behind others of the process."""

    def __init__(self, turn: Turn, wait: float | None = 60) -> None:
        self.now = 100.0
        deadline = FOREVER if wait is None else self.now + wait
        self.steps = procedures.wait_in_line(ACQUISITION, turn, deadline, self.now)  # type: ignore[assignment]
        self.action = next(self.steps)
        self.result = None


def test_a_waiter_behind_another_sends_no_command() -> None:
    """P8: One waiter of a process stands in the document, however many threads and tasks wait."""
    play = InLine("behind")
    assert play.action == Pause("g", 60.0)
    play.hear(turn="behind")
    play.hear(turn="now")
    assert isinstance(play.result, WaitResult)


def test_the_next_in_line_waits_a_moment_for_the_hand_over() -> None:
    """After the moment, the waiter queues in the document, visible to all."""
    play = InLine("next")
    assert play.action.timer == pytest.approx(procedures.LOCAL_HANDOVER_GRACE)
    action = play.hear(turn="next", after=0.1)
    assert action.timer == pytest.approx(procedures.LOCAL_HANDOVER_GRACE - 0.1)
    play.hear(turn="next", after=procedures.LOCAL_HANDOVER_GRACE)
    assert isinstance(play.result, WaitResult)
    play = InLine("behind")
    for seconds, timer in ((3.0, 0.5), (0.25, 0.25)):
        assert play.hear(turn="next", after=seconds).timer == timer
    play.hear(turn="next", after=0.25)
    assert isinstance(play.result, WaitResult)
    play = InLine("next")
    assert isinstance(play.hear(turn="behind", after=procedures.LOCAL_HANDOVER_GRACE), Pause)  # put back meanwhile
    play = InLine("next")
    play.hear(answer=Answer(WHOLE, 1, 2))
    assert isinstance(play.result, WaitResult)


def test_the_wait_in_line_ends_in_time() -> None:
    """F67: A waiter behind others is refused at its deadline without a command, because the others are before it in any
    case. The next in line gets a last try. A cancelled waiter gets LockCancelled."""
    for seconds in (5, 6):
        with pytest.raises(LockNotAcquired) as refusal:
            InLine("behind", wait=5).hear(after=seconds, turn="behind", holder="host h")
        assert (refusal.value.waited, refusal.value.holder) == (seconds, "host h")
    assert InLine("behind", wait=-1).action.timer == 0.0
    play = InLine("next", wait=0.25)
    play.hear(after=0.25, turn="next")
    assert isinstance(play.result, WaitResult)
    play = InLine("next", wait=0.1)
    assert play.action.timer == pytest.approx(0.1)
    play.hear(after=5, turn="next")
    assert isinstance(play.result, WaitResult)
    with pytest.raises(LockCancelled) as cancelled:
        InLine("behind").hear(after=3, cancelled=True)
    assert cancelled.value.waited == 3


@pytest.mark.parametrize("turn", ["behind", "next"])
@pytest.mark.parametrize("heard", [{"after": 5}, {"cancelled": True}])
def test_an_answer_to_a_hand_over_comes_before_all_else(turn: Turn, heard: dict[str, Any]) -> None:
    """F36: The answer to a hand-over may have brought the lock or a place in the queue. A waiter that ignored it would
    leave the entry behind."""
    answer = Answer(WHOLE, 100.0, 100.1, whole=True)
    play = InLine(turn, wait=5)
    play.hear(answer=answer, turn=turn, **heard)
    assert play.result.answer is answer


def test_a_hand_over_is_one_command_for_two() -> None:
    """P8: A hand-over removes the giver's grant and adds the next one. If the giver's grant was not there any more,
    nothing happens."""
    steps = procedures.release("k", "giver", ACQUISITION)
    action: Any = next(steps)
    assert (action.step.remove, action.step.given, action.step.add) == (("giver",), "giver", ACQUISITION.entry)
    with pytest.raises(StopIteration) as end:
        steps.send(Answer(Reply(found=False), 1, 2))
    assert end.value.value == (False, None)
    next(steps := procedures.release("k", "giver", ACQUISITION))
    with pytest.raises(StopIteration) as end:
        steps.send(answer := Answer(WHOLE, 1, 2))
    assert end.value.value == (True, answer)


# Owners

OWNED = replace(ACQUISITION, terms=replace(TERMS, owner="o"))
FORMER = Former("old", "its process")


@pytest.mark.parametrize(
    ("wait", "process", "tombstone_ttl"),
    [(0, "its process", procedures.TOMBSTONE_TTL), (5, "its process", procedures.TOMBSTONE_TTL), (5, NO_PROCESS, 0)],
)
def test_an_owner_takes_the_place_of_a_former_grant_whose_process_is_gone(
    wait: float, process: str, tombstone_ttl: int
) -> None:
    """F49: The owner takes the place in one command, however short its wait. Commands of the killed process may still
    arrive."""
    play = Play(wait, OWNED)
    play.answer(replace(QUEUED if wait else GONE, former=Former("old", process)), former="gone")
    step = play.action.step
    assert (step.ask, step.add, step.remove, step.resumes, step.trial) == ("g", OWNED.entry, ("old",), True, wait == 0)
    assert step.force
    assert step.tombstone_ttl == tombstone_ttl
    play.answer(WHOLE)
    assert play.result.token == 3


@pytest.mark.parametrize("wait", [0, 5])
def test_a_former_grant_that_stays_is_removed_once_between_two_pauses(wait: float) -> None:
    """The rule leaves a damaged document as it was. A caller that cannot wait is refused, and one that can waits."""
    play, there = Play(wait, OWNED), replace(QUEUED if wait else GONE, former=FORMER)
    play.answer(there, former="gone")
    with nullcontext() if wait else pytest.raises(LockNotAcquired):
        play.answer(there, former="gone")
        assert isinstance(play.action, Pause)
        play.pause()
        assert play.answer(there, former="gone").step.resumes


@pytest.mark.parametrize("fate", ["alive", "unknown"])
def test_an_owner_waits_for_a_former_grant_whose_process_may_live(fate: Fate) -> None:
    """F49: The owner polls only if it could see the process end."""
    play = Play(100, OWNED)
    play.answer(replace(QUEUED, former=FORMER), former=fate)
    assert (play.action.timer == procedures.DEAD_OWNER_CHECK) == (fate == "alive")
    play.pause()
    assert play.action == Read("k", "g", "o")
    play.answer(replace(QUEUED, former=FORMER), former="gone")
    assert play.action.step.resumes


def test_what_leaves_the_queue_does_so_although_the_next_one_was_not_queued() -> None:
    """P6: The command that queues the next waiter of the line got no answer. The next waiter asks for itself."""
    steps = procedures.leave(ACQUISITION)
    assert isinstance(next(steps), QueueNext)
    action = steps.throw(LockBackendFailed("no answer", "k"))
    assert isinstance(action, Apply)
    assert action.step.remove == (ACQUISITION.grant,)


def test_an_answer_that_comes_during_a_pause_after_a_failure_counts() -> None:
    """P6: Another grant of the line has sent a command for the waiter meanwhile, and has the lock for it."""
    steps = procedures.acquire(ACQUISITION, 10.0, 0.0)
    next(steps)
    failed = LockBackendFailed("no answer", "k")
    failed.passing = True
    assert isinstance(steps.throw(failed), Pause)
    answer = Answer(Reply(held=True, token=7, acquired_at=datetime.now(UTC)), 11.0, 11.0, whole=True)
    with pytest.raises(StopIteration) as ended:
        steps.send(WaitResult(11.0, answer=answer))
    assert ended.value.value.token == 7


def test_what_an_action_is_about() -> None:
    """F110: An action names its key for its lane, if there is only one. The entry of an owner names its process."""
    assert [ReleaseUncontended(keys, keys).key for keys in (("a",), ("a", "b"))] == ["a", None]
    assert replace(OWNED, process="p").entry["process"] == "p"


# Pairs of a blocking and an awaited method, made of the same steps


class Counter:
    """A counter that adds a number by steps."""

    def __init__(self) -> None:
        self.total = 0

    def _add(self, number: int, *, times: int = 1) -> Generator[int, int, int]:
        """Add a number."""
        for _ in range(times):
            self.total += yield number
        return self.total

    add, aadd = actions.twins(_add)

    def _run(self, steps: Generator[Any, Any, Any]) -> Any:
        return actions.run(steps, lambda step: step * 10)

    async def _arun(self, steps: Generator[Any, Any, Any]) -> Any:
        async def perform(step: int) -> int:
            return step * 100

        return await actions.arun(steps, perform)


def test_the_same_steps() -> None:
    """Each method runs the same steps in its own way."""
    counter = Counter()
    assert counter.add(1) == 10
    assert Counter().add(1, times=2) == 20
    assert asyncio.run(counter.aadd(2, times=2)) == 410
    assert inspect.iscoroutinefunction(counter.aadd)


def test_what_is_shown() -> None:
    """Both methods have their own names. The signature is that of the steps, with their return value."""
    assert (Counter.add.__name__, Counter.add.__qualname__) == ("add", "Counter.add")
    assert (Counter.aadd.__name__, Counter.aadd.__doc__) == ("aadd", "See add().")
    assert Counter.add.__doc__ == "Add a number."
    assert str(inspect.signature(Counter().add)).startswith("(number: 'int', *, times: 'int' = 1) -> ")
