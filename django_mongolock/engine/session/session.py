"""One per process: the store's client, the grants of the process, and the thread that keeps them alive."""

from __future__ import annotations

import functools
import itertools
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from ...exceptions import LockBackendFailed, LockError, LockMisused, LockQueueFull
from .. import clock, processes, protocol, runner
from ..document import Terms, milliseconds
from ..grant import CLOSED, TAKEN, Callback, Grant, LineKey, OwnerRef, OwnerToken, State
from ..logs import DEBUG, INFO, WARNING, log, log_exception
from ..protocol import (
    FOREVER,
    Action,
    Answer,
    Apply,
    FindDeadlock,
    Granted,
    Pause,
    Protocol,
    QueueNext,
    Read,
    Release,
    ReleaseUncontended,
    Turn,
    WaitResult,
)
from ..replies import Found, News, Reply
from ..step import Step
from ..store import Store
from .free_keys import FreeKeys
from .heartbeat import Heartbeat
from .releases import Releases, UnconfirmedRelease
from .wakeups import Listener
from .worker_threads import WorkerThreads

T = TypeVar("T")

#: How many keys one renewal takes. One that did not get through is made again key by key: so a document that cannot be
#: written costs the others of its process no more than the time of one command.
RENEWAL_BATCH: Final = 1_000
#: Threads that send renewals, each a batch at a time.
RENEWERS: Final = 8
#: Threads that send commands for coroutines and for the main thread, and how many of them are kept for releases.
SENDERS: Final = 24
FOR_RELEASES: Final = 8
#: Who has waited for less than this has its place in a queue by when its command comes, in seconds.
JUST_CAME: Final = 0.05

#: However little time is left for it, a command that may still help gets so many seconds.
SHORTEST_COMMAND: Final = 0.1

#: With more waiters than this in one process, its change stream does not rest: to ask all of them costs more.
CROWD: Final = 64
#: How many seconds a place in a queue takes at least: a hand-over has to be written to the journal.
FASTEST: Final = 0.002

#: Threads that remove what is not known to have ended: a thousand of them must not keep a command of the program
#: waiting.
REMOVERS: Final = 4
#: How long to wait before a removal that failed is tried again, in seconds.
REMOVE_AGAIN_AFTER: Final = 1.0
#: Threads that call `on_lost` and `on_release_requested`.
CALLERS: Final = 4

#: Called with what happens to a grant: "contended" if it must wait, then "acquired" or "not_acquired"; after "acquired"
#: also "release_requested", and once either "released" or "lost".
Observer = Callable[[str, Grant], object]


@dataclass(slots=True)
class PendingRemoval:
    """A grant that may still stand in the document of its key, and the command that ends it. Times by the session's
    clock."""

    action: Apply | Release
    give_up: float
    try_at: float


class Session:
    """What one process has to do with the locks of one store.

    A daemon thread, started with the first grant, renews all grants in bulk, removes what has an unknown outcome and
    reports losses. A forked child does not use its parent's session: see `sessions`.

    now: the clock that deadlines are counted by, in seconds. Who moves it calls `wake`.
    """

    def __init__(
        self,
        store: Store,
        command_timeout: float = 5.0,
        observer: Observer | None = None,
        now: Callable[[], float] = clock.now,
    ) -> None:
        self.id = secrets.token_hex(6)
        self.pid = os.getpid()
        self.store = store
        self.command_timeout = command_timeout
        self.now = now
        self._observer = observer
        self._numbers = itertools.count(1)
        self._grants: dict[str, Grant] = {}
        self._waiting: dict[str, Grant] = {}
        self._by_worker: dict[tuple[str, object], Grant] = {}
        self._holding: dict[object, set[str]] = {}
        self._lines: dict[LineKey, OrderedDict[str, Grant]] = {}
        self._held_here: dict[LineKey, Grant] = {}
        self._pending_removals: dict[str, PendingRemoval] = {}
        self._releases = Releases()
        self._free_keys = FreeKeys()
        self._mutex = threading.Lock()
        self._heartbeat = Heartbeat(self.next_due, self._look_after, self._elsewhere, now)
        self._senders = WorkerThreads(SENDERS, reserved=FOR_RELEASES)
        self._renewers = WorkerThreads(RENEWERS)
        self._removers = WorkerThreads(REMOVERS)
        #: For callbacks, which may take their time: no command waits for them.
        self._callers = WorkerThreads(CALLERS)
        self._listener = Listener(store, self.id, self._on_news, self._expected, self._look, now=now)
        self._look_at = float("inf")
        self._seconds_per_place: OrderedDict[str, float] = OrderedDict()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Session {self.id}, pid {self.pid}, {len(self._grants)} grants>"

    # Running protocols

    def run(self, steps: Protocol[T]) -> T:
        """Run a protocol, blocking.

        In the main thread the commands are sent by another one: what a signal handler raises there (Ctrl-C,
        Celery's soft time limit) must not strike inside the driver, whose pool does not survive it.
        """
        if threading.current_thread() is threading.main_thread():
            return runner.run(steps, functools.partial(self._perform, self._send_elsewhere))
        return runner.run(steps, functools.partial(self._perform, self._send))

    async def arun(self, steps: Protocol[T]) -> T:
        """See run(). A waiting coroutine holds no thread; only a command on its way does."""
        return await runner.arun(steps, self._aperform)

    def _perform(self, send: Callable[[Action], Any], action: Action | Pause) -> Any:
        return self._pause(action) if isinstance(action, Pause) else send(action)

    async def _aperform(self, action: Action | Pause) -> Any:
        return await (self._apause(action) if isinstance(action, Pause) else self._asend(action))

    def _seconds_for(self, action: Action) -> float:
        """How long *action* may take: whoever waits is to be back within its wait and the time of one command."""
        match action:
            case Apply(_, step) if not step.given:
                grant = self._waiting.get(step.ask)
            case Read(_, grant_id) | QueueNext(_, grant_id) | FindDeadlock(_, grant_id):
                grant = self._waiting.get(grant_id)
            case _:
                grant = None
        left = FOREVER if grant is None else max(SHORTEST_COMMAND, grant.back_by - self.now())
        return min(left, self.command_timeout / (4 if isinstance(action, QueueNext) else 1))

    def _send(self, action: Action, left: float = FOREVER) -> Any:
        """Carry out *action*. left: at most so many seconds."""
        timeout = min(left, self._seconds_for(action))
        match action:
            case Apply(key, step):
                return self._apply(key, step, timeout)
            case Release(key, step):
                return self._remember(action, self.store.release(key, step, timeout))
            case ReleaseUncontended(key, grant_id):
                uncontended = self.store.release_uncontended(key, grant_id, timeout)
                if uncontended:
                    self._free_keys.released(key)
                return self._remember(Release(key, Step(remove=(grant_id,), force=True)), uncontended)
            case QueueNext(key, grant_id):
                return self._queue_next(key, grant_id, timeout)
            case FindDeadlock(key, grant_id):
                return self.store.deadlock(key, grant_id, timeout)
            case Read(key, grant_id, owner):
                sent = self.now()
                return self._answer(grant_id, self.store.read(key, grant_id, timeout, owner), sent)
        raise TypeError(f"not a command: {action!r}")

    def _apply(self, key: str, step: Step, timeout: float) -> Answer:
        """Send a step with a number of its own: only what carries that number was given by this very command."""
        grant, sent = self._grants.get(step.ask), self.now()
        step = replace(step, beat=self.next_number())
        if step.add is not None and grant is not None:
            grant.sent = True
            step = self._with_arrival(step, step.add, grant, sent)
        try:
            reply = self._take(key, step, timeout)
        except LockBackendFailed:
            if step.add is not None and grant is not None:
                grant.outcome_unknown = True
            raise
        self._releases.confirmed(self.store.sent_to(), sent)
        return self._answer(step.ask, reply, sent, step.beat)

    def _with_arrival(self, step: Step, entry: dict[str, Any], grant: Grant, now: float) -> Step:
        """The step with how long *grant* has waited, and how many wait behind it here."""
        if now - grant.began >= JUST_CAME:
            step = replace(step, waited=milliseconds(now - grant.began))
        if behind := self._behind(grant):
            step = replace(step, add={**entry, "behind": behind})
        return step

    def _behind(self, grant: Grant) -> int:
        """How many wait in this process behind *grant*, which stands for them in the document."""
        with self._mutex:
            line = self._lines.get(grant.line, OrderedDict())
            return len(line) - 1 if next(iter(line), None) == grant.id else 0

    def _queue_next(self, key: str, grant_id: str, timeout: float) -> None:
        """See protocol.QueueNext."""
        grant = self._waiting.get(grant_id)
        next_waiter = None if grant is None else self.reserve_handover(grant)
        if next_waiter is None:
            return
        answer = None
        try:
            answer = self._send(next_waiter.acquisition.enter(False), timeout)
        except LockError as error:
            log(DEBUG, "the next in line was not queued", key=key, error=error)
        finally:
            self.finish_handover(next_waiter, answer)

    def _take(self, key: str, step: Step, timeout: float) -> Reply:
        """Apply the step; if the key is probably free, first in the form that is short for the server."""
        if step.only_adds and self._free_keys.guess(key):
            started = self.now()
            if (reply := self.store.take_free(key, step, timeout)) is not None:
                return reply
            self._free_keys.was_wrong(key)
            timeout = max(timeout / 2, timeout - (self.now() - started))
        return self.store.apply(key, step, timeout)

    def _answer(self, grant_id: str, reply: Reply, sent: float, number: int = -1) -> Answer:
        """Make the answer to the command of that *number*, and note what it is worth.

        Rule: a belief is made of local time only. The command has given a whole place in the queue, or a whole lease,
        if its number stands in the entry; that is worth as long as its length, from before the command was *sent*. A
        read has no number, so it is worth nothing. If the grant comes by the stream, its place is worth as much.
        """
        former = None if reply.former is None else self.fate(reply.former.process)
        answer = Answer(reply, sent, self.now(), reply.beat == number, former)
        grant = self._grants.get(grant_id)
        if grant is None:
            return answer
        if grant.state is State.WAITING and not reply.held:
            grant.busy, grant.held_by = True, reply.holder or grant.held_by
        if reply.place is not None and answer.whole:
            length = min(grant.lease, grant.terms.holder_lease_of(reply.waiter_lease))
            grant.waiter_lease = max(grant.waiter_lease, length)  # longer than asked for, where the queue was long
            grant.renewed(sent + length, answer.now)
            if grant.queued is None:
                grant.queued = reply.place, answer.now
        return answer

    def _remember(self, again: Release, was_there: bool) -> bool:
        """A lock was given back to the primary: be ready to do it again at the next one. Returns *was_there*."""
        if was_there and not self._closed and (primary := self.store.sent_to()):
            self._releases.made(UnconfirmedRelease(again, primary, self.now()))
            self._heartbeat.see_to(self._releases.look_at)
        return was_there

    def _send_elsewhere(self, action: Action) -> Any:
        send, withdrawn = functools.partial(self._send, action), self._about_to_send(action)
        timeout = self._seconds_for(action)
        return self._senders.call(send, timeout, urgent=_is_release(action), on_withdrawn=withdrawn)

    def _elsewhere(self, call: Callable[[], None]) -> None:
        """Call, but not in the main thread: starting a thread waits for an Event, see `worker_threads`."""
        if threading.current_thread() is threading.main_thread():
            self._senders.call(lambda _: call(), urgent=True)
        else:
            call()

    async def _asend(self, action: Action) -> Any:
        send, withdrawn = functools.partial(self._send, action), self._about_to_send(action)
        timeout = self._seconds_for(action)
        return await self._senders.acall(send, timeout, urgent=_is_release(action), on_withdrawn=withdrawn)

    def _about_to_send(self, action: Action) -> Callable[[], object] | None:
        """Note that the grant which *action* adds may be on its way from now on; return what takes that back."""
        grant = self._grants.get(action.step.ask) if isinstance(action, Apply) and action.step.add else None
        if grant is None or grant.sent:
            return None
        grant.sent = True
        return functools.partial(setattr, grant, "sent", False)

    def _pause(self, pause: Pause) -> WaitResult:
        grant = self._waiting[pause.grant]
        self._notify_contention(grant)
        grant.wakeup.wait(self._seconds(pause))
        return self._wait_result(grant)

    async def _apause(self, pause: Pause) -> WaitResult:
        grant = self._waiting[pause.grant]
        self._notify_contention(grant)
        await grant.wakeup.await_(self._seconds(pause))
        return self._wait_result(grant)

    def _seconds(self, pause: Pause) -> float:
        if pause.poll == protocol.FOREVER:
            return pause.timer
        grant = self._waiting[pause.grant]
        grant.listens_from = self.now() + pause.skip_stream_for
        if not self._listener.want(grant.listens_from):
            self._elsewhere(self._listener.start)
        return pause.timer if self._listener.listening else min(pause.timer, pause.poll)

    def _wait_result(self, grant: Grant) -> WaitResult:
        if self._closed:
            raise LockMisused("the session was closed while somebody waited in it")
        grant.listens_from = float("inf")
        answer, grant.answer = grant.answer, None
        turn, first = self._turn(grant)
        holder = first.held_by if first is not None else grant.held_by
        # Where the majority confirms by memory alone, news of a grant may be older than what the journals will tell.
        queued_until = grant.queued_until if self.store.is_journaled else 0.0
        return WaitResult(self.now(), grant.news, answer, queued_until, turn, grant.cancelled, holder)

    # What wakes a waiter

    def _on_news(self, grant_id: str, news: News) -> None:
        """The change stream says that a grant is held."""
        if (grant := self._waiting.get(grant_id)) is not None:
            grant.news = news
            grant.listens_from = float("inf")  # at once: the stream must not be read on for it
            grant.wakeup.wake()

    def _expected(self) -> float:
        """When the next news from the change stream may come."""
        waiting = list(self._waiting.values())
        if len(waiting) > CROWD:
            return 0.0
        return min((grant.listens_from for grant in waiting), default=float("inf"))

    def _look(self, after: float = 0.0) -> None:
        """Everybody who waits shall look, *after* so many seconds: news may have passed unheard."""
        if after > 0:
            self._look_at = self.now() + after
            self._heartbeat.see_to(self._look_at)
            return
        for grant in list(self._waiting.values()):
            grant.wakeup.wake()

    def seconds_per_place(self, key: str) -> float:
        """How many seconds a place in the queue of *key* took when we last stood there."""
        return self._seconds_per_place.get(key, FASTEST)

    def _pass(self, grant: Grant, now: float) -> None:
        """Note how fast the queue went that *grant* has stood in."""
        if grant.queued is not None:
            place, since = grant.queued
            self._seconds_per_place[grant.key] = (now - since) / (place + 1)
            while len(self._seconds_per_place) > CROWD:
                self._seconds_per_place.popitem(last=False)

    def wake(self) -> None:
        """The clock was moved: everybody who sleeps until some time shall look at it again."""
        self._heartbeat.wake()
        self._look()

    def cancel(self, grant: Grant) -> None:
        """End the wait for *grant*, from any thread."""
        grant.cancelled = True
        grant.wakeup.wake()

    # The line of those of this process who want the same key

    def join(self, grant: Grant, *, trial: bool) -> Turn:
        """Stand in line for *grant*, unless it is only to be tried. Returns whether it may be asked for now.

        Raises LockQueueFull where the line is as long as any queue may be.
        """
        with self._mutex:
            line = self._lines.get(grant.line, OrderedDict())
            if not trial and len(line) >= self.store.limits.waiters:
                raise LockQueueFull(grant.key)
            self._waiting[grant.id] = grant
            if not trial:
                self._lines.setdefault(grant.line, OrderedDict())[grant.id] = grant
        turn: Turn = "now" if trial else self._turn(grant)[0]
        grant.busy = turn != "now"
        return turn

    def _turn(self, grant: Grant) -> tuple[Turn, Grant | None]:
        """Where *grant* stands in its line, and who is before it all: the first in line, or who holds the lock here."""
        with self._mutex:
            first = self._first(grant.line)
        if first is not None and first is not grant:
            return "behind", first
        return ("next" if grant.line in self._held_here else "now"), None

    def leave(self, grant: Grant) -> None:
        """Stand in line no more: it is held, or nobody waits for it any longer."""
        with self._mutex:
            self._waiting.pop(grant.id, None)
            line = self._lines.get(grant.line, OrderedDict())
            was_first = next(iter(line), None) == grant.id
            line.pop(grant.id, None)
            if not line:
                self._lines.pop(grant.line, None)
        if was_first:
            self._wake_first(grant.line)

    def _wake_first(self, key: LineKey) -> None:
        with self._mutex:
            first = self._first(key)
        if first is not None:
            first.wakeup.wake()

    def _first(self, key: LineKey) -> Grant | None:
        """Who stands first in that line. Call it with the mutex held."""
        line = self._lines.get(key)
        return next(iter(line.values())) if line else None

    def reserve_handover(self, grant: Grant) -> Grant | None:
        """Reserve the hand-over of *grant*'s key to the next in line, and return that grant; `finish_handover` ends
        it."""
        with self._mutex:
            line = iter(self._lines.get(grant.line, {}).values())
            next_waiter = next(line, None)
            if grant.id in self._waiting:  # it stands in line itself
                while next_waiter is not None and next_waiter is not grant:
                    next_waiter = next(line, None)
                next_waiter = next(line, None)
            # Reserved twice, a second command would be on its way after the first has been answered.
            if next_waiter is None or next_waiter.cancelled or next_waiter.handover_reserved:
                return None
            next_waiter.handover_reserved = True
            next_waiter.enters(self.now())
            self._grants[next_waiter.id] = next_waiter
        self._heartbeat.see_to(next_waiter.renew_at)
        return next_waiter

    def finish_handover(self, next_waiter: Grant, answer: Answer | None) -> None:
        """Pass the *answer* on to the waiter that the hand-over was reserved for; None if it is not known."""
        next_waiter.outcome_unknown |= answer is None
        next_waiter.answer = answer
        next_waiter.handover_reserved = False
        next_waiter.wakeup.wake()

    # The grants of this process

    def new_grant(
        self, key: str, terms: Terms, worker: object, *, auto_renew: bool = True, max_hold: float | None = None
    ) -> Grant:
        """Make a grant that nobody has heard of yet."""
        # The random part: a clone of this machine, or a child that was forked past our notice, makes other ids.
        grant_id = f"{self.id}.{self.next_number()}-{secrets.token_hex(4)}"
        nested = bool(self._holding.get(worker))
        return Grant(
            grant_id, key, terms, auto_renew=auto_renew, worker=worker, max_hold=max_hold, nested=nested, now=self.now
        )

    def name_worker(self, worker: object) -> str:
        """A name for a thread or task, which nobody else has, for as long as it holds a lock or waits for one."""
        held = self._grants.get(next(iter(self._holding.get(worker, ())), ""))
        return f"{self.id}/{secrets.token_hex(4)}" if held is None else held.acquisition.worker

    def name_process(self) -> str:
        """A name for this process, by which `fate` can tell that it is gone."""
        return processes.this_process()

    def fate(self, process: str) -> processes.Fate:
        """What became of the process of that name."""
        return processes.fate(process)

    def expect(self, grant: Grant) -> None:
        """The grant is about to be asked for: have its place in the queue renewed from now on."""
        grant.enters(self.now())
        with self._mutex:
            self._grants[grant.id] = grant
        self._heartbeat.see_to(grant.renew_at)

    def next_number(self) -> int:
        return next(self._numbers)

    def held_by(self, key: str, worker: object) -> Grant | None:
        """The grant of *key* that this thread or task holds."""
        return self._by_worker.get((key, worker))

    def acquired(self, grant: Grant, granted: Granted, waited: float) -> None:
        """The grant is held."""
        grant.hold(granted, waited)
        self._pass(grant, granted.now)
        with self._mutex:
            self._by_worker[grant.key, grant.worker] = grant
            self._holding.setdefault(grant.worker, set()).add(grant.id)
            if grant.terms.mode == "exclusive":
                self._held_here[grant.line] = grant
        self.leave(grant)
        self._heartbeat.see_to(min(grant.renew_at, grant.ends_at))
        grant.reported = "acquired"
        self._observe("acquired", grant)

    def not_acquired(self, grant: Grant, reason: str) -> None:
        """Nobody tries to acquire the grant any more."""
        if grant.reported == "":
            self._notify_contention(grant)
            grant.reported, grant.reason, grant.waited = "end", reason, self.now() - grant.began
            self._observe("not_acquired", grant)

    def forget(self, grant: Grant) -> bool:
        """The grant has ended: renew it no more. Return whether that is news."""
        with self._mutex:
            was_held = self._held_here.get(grant.line) is grant
            if was_held:
                del self._held_here[grant.line]
            known = self._grants.pop(grant.id, None) is not None
            if self._by_worker.get((grant.key, grant.worker)) is grant:
                del self._by_worker[grant.key, grant.worker]
            held = self._holding.get(grant.worker, set())
            held.discard(grant.id)
            if not held:
                self._holding.pop(grant.worker, None)
        if was_held:
            self._wake_first(grant.line)
        return known

    def owner_token(self, grant: Grant) -> OwnerToken:
        """An owner token for *grant*: if it dies before `finish` was called, the grant is taken back in the background.

        Cleaning up is Python code, and a second signal may strike in it. That an object dies and is put into a queue
        is done by the interpreter, and always happens.
        """
        owner_token = OwnerToken()
        # The callback is no Python, which a signal could strike.
        ref = OwnerRef(owner_token, self._heartbeat.inbox.put)
        ref.grant = grant
        grant.owner_ref = ref
        return owner_token

    def finish(self, grant: Grant) -> None:
        """Everything that was to be done for the grant has been done."""
        grant.owner_ref = None

    def released(self, grant: Grant) -> None:
        """The grant was given back."""
        self.forget(grant)
        self.finish(grant)
        self._notify_end(grant)

    def abandon(self, grant: Grant, *, stays: bool = False) -> None:
        """Give up a grant of which it is not known how it stands: have it removed in the background, for sure.

        stays: see `protocol.removal_for_good`.
        """
        grant.release()
        self.forget(grant)
        if self.pid != os.getpid():
            return
        give_up = self.now() + grant.terms.server_lease + protocol.TOMBSTONE_TTL / 1000
        self._remove_later(grant.id, protocol.removal_for_good(grant.key, grant.id, stays=stays), give_up)
        self._heartbeat.see_to(self.now())
        self.finish(grant)
        self._notify_end(grant)

    def _remove_later(self, grant_id: str, action: Apply | Release, give_up: float) -> None:
        """Have *action* sent until it succeeds, or until *give_up*."""
        with self._mutex:
            self._pending_removals[grant_id] = PendingRemoval(action, give_up, self.now())

    def _release_again(self) -> None:
        """See whether there was a failover that may have undone what was released."""
        for release in self._releases.undone(self.store.primary(), self.now()):
            log(DEBUG, "released again after a failover", key=release.again.key)
            self._remove_later(release.again.step.remove[0], release.again, self.now() + protocol.TOMBSTONE_TTL / 1000)

    def _ensure_removed(self, grant_id: str) -> None:
        """Try once to have a grant removed."""
        pending = self._pending_removals.get(grant_id)
        if pending is None:
            return
        key = pending.action.key
        try:
            self._send(pending.action)
        except Exception as error:  # noqa: BLE001 - it is logged, and nobody else tries again
            if self.now() < pending.give_up:
                log(DEBUG, "removal postponed", key=key, error=error)
                pending.try_at = self.now() + REMOVE_AGAIN_AFTER
                self._heartbeat.see_to(pending.try_at)
                return
            log(WARNING, "removal given up, the lease ends by itself", key=key, error=error)
        else:
            if isinstance(pending.action, Release):
                # This primary has the release, also where there was nothing to do; the majority need not have it yet.
                self._remember(pending.action, was_there=True)
        with self._mutex:
            if self._pending_removals.get(grant_id) is pending:
                del self._pending_removals[grant_id]

    # What is reported of them

    def _notify_contention(self, grant: Grant) -> None:
        """Somebody else has what the grant is about to wait for, or was tried for: report that once."""
        if grant.busy and not grant.contended:
            grant.contended = True
            self._observe("contended", grant)

    def _notify_end(self, grant: Grant) -> None:
        """What was reported as acquired is not held any more: report that once, whatever way it ended."""
        if grant.reported == "acquired":
            grant.reported = "end"
            self._observe("lost" if grant.state is State.LOST else "released", grant)

    def _observe(self, event: str, grant: Grant) -> None:
        facts: dict[str, object] = {"key": grant.key, "template": grant.template}
        if event in ("contended", "not_acquired"):
            facts["holder"] = grant.held_by
        else:
            facts["token"] = grant.token
        if event in ("lost", "not_acquired"):
            facts["reason"] = grant.reason
        level = WARNING if event == "lost" and grant.reason != CLOSED else DEBUG
        log(level, f"lock {event.replace('_', ' ')}", **facts)
        if self._observer is not None:
            try:
                self._observer(event, grant)
            except Exception:  # noqa: BLE001 - it is logged
                log_exception("observer failed", event=event, key=grant.key)

    # What the heartbeat does

    def drop(self, grants: Iterable[Grant], user: int) -> None:
        """A lock object is gone, and its grants were not given back. Called by the garbage collector, so anywhere:
        takes no lock and waits for nothing."""
        for grant in grants:
            grant.used_no_more(user)
            if not grant.users and grant.state is State.HELD:
                self._heartbeat.inbox.put(grant)

    def _look_after(self, dropped: list[Grant | OwnerRef]) -> None:
        for item in dropped:
            self._dropped(item)
        self.beat()

    def _dropped(self, dropped: Grant | OwnerRef) -> None:
        if isinstance(dropped, OwnerRef):
            if (grant := getattr(dropped, "grant", None)) is not None:  # a signal may strike before it is set
                self._unguarded(grant)
        elif not dropped.users and dropped.state is State.HELD:
            self._let_go(dropped, "its lock object is gone")

    def _unguarded(self, grant: Grant) -> None:
        """Whoever asked for the grant was struck while cleaning up: do it instead."""
        if grant.owner_ref is None:
            return
        self.leave(grant)
        if grant.state is State.HELD:
            self._let_go(grant, "nobody has it any more")
        else:
            self.abandon(grant)
        self._wake_first(grant.line)

    def _let_go(self, grant: Grant, why: str) -> None:
        """Release what nobody is going to release any more."""
        log(WARNING, f"lock released, {why}", key=grant.key, acquired=grant.acquired_from)
        self.abandon(grant)

    def next_due(self) -> float:
        """When there is something to do, if nothing comes up before."""
        with self._mutex:
            times = [min(g.renew_at, g.ends_at) if g.renewable else g.ends_at for g in self._grants.values()]
            times += [pending.try_at for pending in self._pending_removals.values()]
            times += [self._look_at, self._releases.look_at]
        return min(times)

    def beat(self) -> None:
        """Do what is due: report losses, renew, remove."""
        with self._mutex:
            grants = list(self._grants.values())
            pending = list(self._pending_removals.items())
        now = self.now()
        if self._look_at <= now:
            self._look_at = float("inf")
            self._look()
        for grant in grants:
            if (ref := grant.owner_ref) is not None and ref() is None:
                self._unguarded(grant)
            elif grant.state is State.LOST or (grant.state is State.HELD and not grant.held):
                self.lost(grant)
            elif grant.state is State.HELD and _has_ended(grant.worker):
                self._let_go(grant, "its thread has ended")
        for state in (State.HELD, State.WAITING):
            self._renew_due([grant for grant in grants if grant.state is state and grant.renewable], now)
        for grant_id, open_end in pending:
            if open_end.try_at <= now:
                under_way = self._removers.submit(functools.partial(self._ensure_removed, grant_id))
                open_end.try_at = float("inf") if under_way else now + REMOVE_AGAIN_AFTER
        if self._releases.look_at <= now:
            self._release_again()

    def _renew_due(self, grants: list[Grant], now: float) -> None:
        """Renew what is late, all of it holders or all of it waiters: nobody's lease waits for somebody's place."""
        late = [grant for grant in grants if grant.renew_at <= now]
        if not late:
            return
        # Take along what would be due before these are again: one command instead of many, from then on too.
        soon = now + min(grant.length / 3 for grant in late)
        due = [grant for grant in grants if grant.renew_at <= soon and not grant.failures]
        due.sort(key=lambda grant: grant.key)
        for start in range(0, len(due), RENEWAL_BATCH):
            self._have_renewed(due[start : start + RENEWAL_BATCH])
        for grant in late:
            if grant.failures:
                self._have_renewed([grant])

    def _have_renewed(self, grants: list[Grant]) -> None:
        """Renew a batch in a thread of its own."""
        for grant in grants:
            grant.renewing = True
        if not self._renewers.submit(functools.partial(self._renew, grants)):
            self._renew(grants)

    def _renew(self, grants: list[Grant]) -> None:
        """Renew a batch and tell apart what is gone for good and what may only be late."""
        number, sent = self.next_number(), self.now()
        # Now: who waits while the command is sent, and holds the lock when it is answered, was given a place by it.
        lengths = [grant.length for grant in grants]
        behind = tuple(self._behind(grant) for grant in grants)
        step = Step(
            renew=tuple(grant.id for grant in grants),
            beat=number,
            behind=behind if any(grant.counts or count for grant, count in zip(grants, behind, strict=True)) else (),
        )
        timeout = min(self.command_timeout, *(max(0.1, length / 3) for length in lengths))
        found: dict[str, Found] = {}
        try:
            found = self.store.renew(sorted({grant.key for grant in grants}), step, timeout)
        except LockBackendFailed as error:
            news = any(not grant.failures for grant in grants)
            log(WARNING if news else DEBUG, "renewal failed", grants=len(grants), error=error)
        finally:
            for grant, length, count in zip(grants, lengths, behind, strict=True):
                grant.counts = count > 0
                self._judge(grant, found.get(grant.key), number, sent + length)
                grant.renewing = False
            self._heartbeat.see_to(min(grant.renew_at for grant in grants))

    def _judge(self, grant: Grant, found: Found | None, number: int, until: float) -> None:
        """Note how a renewal found the grant. until: until when that is good, if it got through."""
        beats = {} if found is None else {**found.waiters, **found.holders}
        beat = beats.get(grant.id)
        if beat is not None and beat.number == number:
            grant.uncontended = grant.uncontended and found is not None and not found.waiters
            # Rule: a belief is made of local time only, of the length that this command has given.
            grant.renewed(until, self.now())
            if beat.release_requested_by is not None and grant.release_requested_by is None:
                self._release_requested(grant, beat.release_requested_by)
        elif grant.state is State.HELD and found is not None and grant.id not in beats and found.token >= grant.token:
            # Majority-committed, and no older than the grant itself; an id never comes back.
            if grant.lose(TAKEN):
                self.lost(grant)
        else:
            grant.postpone(self.now(), at_once=not grant.failures)
        if grant.state is State.WAITING and found is not None:
            if grant.id not in found.waiters:
                grant.wakeup.wake()  # granted, and the news was missed; or gone from the queue
            elif not grant.at_head and next(iter(found.waiters)) == grant.id:
                grant.at_head = True
                grant.wakeup.wake()  # it has moved up, and must know when the holder's lease ends

    def _release_requested(self, grant: Grant, by: str) -> None:
        """Another process wants the lock: notify its holder, once."""
        grant.release_requested_by = by
        log(INFO, "release requested", key=grant.key, by=by)
        self._observe("release_requested", grant)
        self._call(grant.on_release_requested, grant)

    def lost(self, grant: Grant) -> None:
        """Tell everybody, once, that a grant was lost, and see to it that it does not keep others waiting."""
        if not self.forget(grant):
            return
        # Taken away, but a copy of its command may be on its way still: it must not bring the grant back.
        if grant.reason != TAKEN or grant.outcome_unknown:
            self.abandon(grant)
        self.finish(grant)
        self._notify_end(grant)
        self._call(grant.on_lost, grant)

    def _call(self, callback: Callback | None, grant: Grant) -> None:
        """Call the program's function, in a thread of its own. Its lock may be about to go: from here on it stays."""
        if callback is not None and (call := callback()) is not None:
            self._callers.submit(functools.partial(_call_safely, call, grant))

    # The end

    def close(self, timeout: float = 2.0) -> None:
        """Release what is held, remove what is pending, and close the client."""
        self._closed = True
        self._listener.close()
        self._heartbeat.close()
        end = self.now() + timeout
        self._release_again()
        with self._mutex:
            grants = list(self._grants.values())
            pending = list(self._pending_removals)
        self.command_timeout = min(self.command_timeout, timeout)
        for grant in grants:
            if self.now() >= end:
                log(WARNING, "not released at exit, its lease ends by itself", key=grant.key)
                continue
            # A waiter's command may be on its way still: its place in the queue must not come back.
            waits = grant.state is State.WAITING
            if grant.lose(CLOSED):
                end_it = (
                    protocol.ensure_removed(grant.key, grant.id)
                    if waits
                    else protocol.release(grant.key, grant.id, stays=grant.terms.min_hold > 0)
                )
                try:
                    runner.run(end_it, functools.partial(self._perform, self._send))
                except LockError as error:
                    log(WARNING, "not released at exit", key=grant.key, error=error)
            self.forget(grant)
            self._notify_end(grant)
        for grant_id in pending:
            if self.now() < end:
                self._ensure_removed(grant_id)
        self._look()
        self._senders.close()
        self._renewers.close()
        self._removers.close()
        self._callers.close()
        self.store.close()


def _is_release(action: Action) -> bool:
    """Does it let somebody else in? Then it goes before what asks for a lock."""
    return isinstance(action, Release | ReleaseUncontended) or (isinstance(action, Apply) and bool(action.step.remove))


def _has_ended(worker: object) -> bool:
    """Is it a thread that has ended? The main thread has when the interpreter exits, and then `close` releases."""
    return isinstance(worker, threading.Thread) and worker is not threading.main_thread() and not worker.is_alive()


def _call_safely(callback: Callable[[], object], grant: Grant) -> None:
    try:
        callback()
    except Exception:  # noqa: BLE001 - it is logged
        log_exception("callback failed", key=grant.key)
