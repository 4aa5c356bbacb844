"""Defects that a simulation must find: old bugs, put back one at a time into the simulated code.

docs/evidence/mutants.md describes each of them. A new defence needs the patch that removes it, and a row in that file.
A patch that finds nothing to patch raises NothingToBreak. A patch for the pipeline or the driver patches its twin
instead, the rule in Python or the simulated connection.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from bson.int64 import Int64

from django_mongolock.engine.lock.grants import LockGrants
from django_mongolock.engine.protocol import procedures
from django_mongolock.engine.protocol.actions import FOREVER, Acquisition, Answer, Apply, Granted, WaitResult
from django_mongolock.engine.rule import in_python
from django_mongolock.engine.rule.document import Step, Terms
from django_mongolock.engine.rule.in_python import Moment, _Rule, is_there, reply_of
from django_mongolock.engine.rule.replies import Beat, Found, Reply
from django_mongolock.engine.session import lanes
from django_mongolock.engine.session.background import Background, Task
from django_mongolock.engine.session.commands import Commands
from django_mongolock.engine.session.ending import Cleanup, Ending, EndReason
from django_mongolock.engine.session.grant import Grant, State
from django_mongolock.engine.session.grant_registry import LocalQueue
from django_mongolock.engine.session.renewals import Renewals
from django_mongolock.engine.session.waits import Waits
from django_mongolock.exceptions import LockError
from verify.simulation import kernel, server
from verify.simulation.client import SimStore, Work
from verify.simulation.expressions import Document
from verify.simulation.server import Member, Parsed

Entries = list[Document]
Whole = Callable[..., Any]


class NothingToBreak(AssertionError):
    """The error for a patch whose target no longer exists."""


class Patches:
    """Changes to the engine of this process that can be undone."""

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of a module or class."""
        if name not in vars(owner):
            raise NothingToBreak(f"{owner.__name__} has no {name}")
        self._undo.callback(setattr, owner, name, vars(owner)[name])
        setattr(owner, name, value)

    def undo(self) -> None:
        """Restore the engine."""
        self._undo.close()


DEFECTS: Final[dict[str, Callable[[Patches], None]]] = {}


def _defect(patch: Callable[[Patches], None]) -> Callable[[Patches], None]:
    DEFECTS[patch.__name__.replace("_", "-")] = patch
    return patch


def _instead_of(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[[Patches], None]]:
    """Return a decorator for a defect that replaces a function. The defect gets the original function first."""

    def named(made: Callable[..., Any]) -> Callable[[Patches], None]:
        def patch(patches: Patches) -> None:
            whole = vars(owner).get(name)
            patches.set(owner, name, lambda *what, **how: made(whole, *what, **how))

        patch.__name__ = made.__name__
        return _defect(patch)

    return named


@contextlib.contextmanager
def broken(name: str | None) -> Iterator[None]:
    """Break the simulated code for a block. Without a *name*, nothing is broken. Raises KeyError."""
    patches = Patches()
    try:
        if name is not None:
            DEFECTS[name](patches)
            patches.set(server, "CHECKED", 0.0)  # a rule that differs from the pipeline must break a promise by itself
        yield
    finally:
        patches.undo()


@dataclass(frozen=True)
class Row:
    """A row of the table in docs/evidence/mutants.md.

    - breaks: promises, and rows of the failure table.
    """

    name: str
    text: str
    harm: str
    breaks: str
    finder: str


def _rows() -> Iterator[Row]:
    page = Path(__file__).parents[2] / "docs/evidence/mutants.md"
    for row in re.findall(r"(?m)^\| `([\w-]+)` \| (.*) \| (.*) \| (.*) \| (.*) \|$", page.read_text()):
        yield Row(*row)


#: Every defect in docs/evidence/mutants.md.
ROWS: Final = {row.name: row for row in _rows()}


def named(name: str) -> str:
    """Return the defect of that name, or the first one that breaks the row of that number in the failure table.

    Defects that the simulation finds come first.
    """
    rows = [row for row in ROWS.values() if name in re.findall(r"F\d+", row.breaks)]
    return min(rows, key=lambda row: row.finder != "simulation").name if rows else name


# The connection


@_instead_of(SimStore, "_write")
def client_clock(write: Whole, self: SimStore, key: str, step: Step, given: Any, parsed: Parsed, **how: Any) -> Any:
    now = Member(0, 1.0, 3.0 * (self._process.pid % 5)).time(self._kernel)
    parsed.moment = replace(parsed.moment, now=now)
    return write(self, key, step, given, parsed, **how)


@_instead_of(SimStore, "_write")
def w1_grants(write: Whole, self: SimStore, *what: Any, majority: bool = True, **how: Any) -> Any:
    return write(self, *what, majority=False, **how)


@_instead_of(SimStore, "_write")
def hand_over_w1(
    write: Whole, self: SimStore, key: str, step: Step, *what: Any, majority: bool = True, **how: Any
) -> Any:
    return write(self, key, step, *what, majority=majority and not step.given, **how)


@_instead_of(SimStore, "_write")
def release_by_key(write: Whole, self: SimStore, key: str, step: Step, given: Any, *what: Any, **how: Any) -> Any:
    holders = self._servers.documents.get(key, {}).get("holders", [])
    if step.remove and step.add is None and not step.tombstone_ttl and given is not None:
        step, given = Step(remove=tuple(e["grant"] for e in holders), force=True), lambda document: True
        how |= {"short": None}
    return (yield from write(self, key, step, given, *what, **how))


@_defect
def local_read_grant(patches: Patches) -> None:
    apply = SimStore.apply

    def read(self: Acquisition) -> Apply:
        return Apply(self.key, Step(ask=self.grant))

    def apply_or_look(self: SimStore, key: str, step: Step, timeout: float) -> Reply:
        if step != Step(ask=step.ask, beat=step.beat):
            return apply(self, key, step, timeout)

        def work(parsed: Parsed) -> Work:
            yield 0.0
            return reply_of(key, self._servers.documents.get(key), step.ask, parsed.moment.now)

        reply: Reply = self._send(work, timeout, key)
        return replace(reply, beat=step.beat) if reply.held else reply

    patches.set(Acquisition, "read", read)
    patches.set(SimStore, "apply", apply_or_look)


@_instead_of(SimStore, "renew")
def no_op_as_proof(_: Whole, self: SimStore, keys: Sequence[str], step: Step, timeout: float) -> Any:
    def work(parsed: Parsed) -> Work:
        yield 0.0
        documents = self._servers.documents
        mine = [key for key in keys if key in documents and is_there(documents[key], step.renew)]
        return {key: _all_renewed(documents[key], step.beat) for key in mine}

    found: dict[str, Found] = self._send(work, timeout)
    return found


def _all_renewed(document: Document, beat: int) -> Found:
    return Found(document["token"], {e["grant"]: Beat(beat, token=e["token"]) for e in document["holders"]}, {})


@_instead_of(SimStore, "_write")
def bell_before_majority(
    write: Whole, self: SimStore, key: str, step: Step, given: Any, parsed: Parsed, **how: Any
) -> Any:
    work = write(self, key, step, given, parsed, **how)
    while True:
        try:
            pause = next(work)
        except StopIteration as end:
            return end.value
        if parsed.has_written and not isinstance(pause, float):
            self.ring(reply_of(key, self._servers.documents.get(key), step.ask, parsed.moment.now).bells)
        yield pause


# The rule in Python


@_defect
def old_time_cuts(patches: Patches) -> None:
    begin, live = _Rule.__init__, _Rule.live_holders

    def init(self: _Rule, step: Step, limits: Any, moment: Moment, document: Document) -> None:
        begin(self, step, limits, moment, document)
        self.old_now = moment.now  # type: ignore[attr-defined]

    def cut(self: _Rule) -> Entries:
        old_now: datetime = self.old_now  # type: ignore[attr-defined]
        wholes = [old_now + timedelta(milliseconds=e["server_lease"]) for e in live(self)]
        return [{**e, "until": min(e["until"], whole)} for e, whole in zip(live(self), wholes, strict=True)]

    patches.set(_Rule, "__init__", init)
    patches.set(_Rule, "live_holders", cut)


@_instead_of(_Rule, "__init__")
def late_unnoticed(begin: Whole, self: _Rule, step: Step, limits: Any, moment: Moment, document: Document) -> None:
    begin(self, step, limits, moment, document)
    if self.late:
        self.late, self.clock, self.cluster_time = False, moment.clock, moment.cluster_time
        self.other_primary = self.is_other_primary(moment)
        self.now = moment.now if self.other_primary else max(moment.now, document["written_at"])


@_defect
def set_back_unnoticed(patches: Patches) -> None:
    patches.set(_Rule, "is_other_primary", lambda self, moment: self.document["clock"] != moment.clock)


@_instead_of(_Rule, "is_other_primary")
def no_clock_stamp(is_other: Whole, self: _Rule, moment: Moment) -> Any:
    return is_other(self, replace(moment, clock=self.document["clock"]))


@_defect
def other_primary_never(patches: Patches) -> None:
    patches.set(_Rule, "is_other_primary", lambda self, moment: False)


@_defect
def waiters_never_pruned(patches: Patches) -> None:
    patches.set(_Rule, "live_waiters", lambda self: self.document["waiters"])


@_instead_of(_Rule, "with_new")
def newest_first(with_new: Whole, self: _Rule, new: Document, queue: Entries, done: set[str], *, resumes: bool) -> Any:
    made = with_new(self, new, queue, done, resumes=resumes)
    known = {e["grant"] for e in queue}
    return sorted(made, key=lambda e: e["grant"] in known)


@_instead_of(_Rule, "renewed")
def released_renewed(_: Whole, self: _Rule, entries: Entries, length: str) -> Any:
    return [self.renew(e, length) if e["grant"] in self.step.renew else e for e in entries]


@_instead_of(_Rule, "without_removed")
def minimum_hold_ignored(_: Whole, self: _Rule, holders: Entries) -> Any:
    return [e for e in holders if e["grant"] not in self.step.remove]


@_defect
def counter_token(patches: Patches) -> None:
    patches.set(in_python, "_since_1970", lambda moment: 0)


@_instead_of(_Rule, "with_new")
def tombstones_ignored(
    with_new: Whole, self: _Rule, new: Document, queue: Entries, done: set[str], *, resumes: bool
) -> Any:
    alive = done - {e["grant"] for e in self.document["tombstones"]}
    return with_new(self, new, queue, alive, resumes=resumes)


@_instead_of(_Rule, "__init__")
def small_step_back(begin: Whole, self: _Rule, step: Step, limits: Any, moment: Moment, document: Document) -> None:
    begin(self, step, limits, moment, document)
    self.now = document["written_at"] if self.late else moment.now


@_instead_of(_Rule, "with_new")
def resumed_twice(with_new: Whole, self: _Rule, new: Document, queue: Entries, done: set[str], *, resumes: bool) -> Any:
    return with_new(self, new, queue, done, resumes=self.step.resumes)


@_instead_of(_Rule, "live_waiters")
def places_kept(_: Whole, self: _Rule) -> Any:
    return [e for e in self.document["waiters"] if e["until"] > self.now]


# The clocks


@_defect
def clocks_too_far_apart(patches: Patches) -> None:
    patches.set(kernel, "DRIFT", 0.2)


@_defect
def no_margin(patches: Patches) -> None:
    patches.set(Terms, "_margin_of", lambda self, lease: 0.0)


# The session


@_instead_of(procedures, "_newer")
def equal_old_token(newer_before: Whole, result: WaitResult, last_token: int) -> Any:
    return newer_before(result, last_token - 1)


@_instead_of(LocalQueue, "reserve_handover")
def handover_to_cancelled(reserve: Whole, self: LocalQueue, grant: Grant) -> Any:
    cancelled = [each.waiting for each in self.lines.get(grant.line, {}).values() if each.waiting.cancelled]
    for waiting in cancelled:
        waiting.cancelled = False
    try:
        return reserve(self, grant)
    finally:
        for waiting in cancelled:
            waiting.cancelled = True


@_defect
def no_fork_guard(patches: Patches) -> None:
    patches.set(LockGrants, "is_ours", property(lambda self: self.session is not None))


@_instead_of(Ending, "end")
def lost_not_removed(end: Whole, self: Ending, grant: Grant, how: EndReason, **options: Any) -> None:
    background = self._session.background
    pending = dict(background.pending)
    end(self, grant, how, **options)
    if how is EndReason.LOST:
        background.pending = pending


@_instead_of(LockGrants, "give_up")
def answer_forgotten(give_up: Whole, self: LockGrants, session: Any, grant: Grant, error: BaseException) -> None:
    if grant.waiting.answer is not None:
        grant.waiting.answer, grant.waiting.sent = None, False
    give_up(self, session, grant, error)


@_instead_of(Renewals, "judge")
def any_token(
    judge: Whole, self: Renewals, grant: Grant, found: Found | None, number: int, sent: float, length: float
) -> None:
    if found is not None and grant.state is State.HELD and grant.id in found.holders:
        mine = replace(found.holders[grant.id], token=grant.token)
        found = replace(found, holders={**found.holders, grant.id: mine})
    judge(self, grant, found, number, sent, length)


@_instead_of(Renewals, "judge")
def late_renewal(
    judge: Whole, self: Renewals, grant: Grant, found: Found | None, number: int, sent: float, length: float
) -> None:
    beat = None if found is None else found.holders.get(grant.id)
    if beat is not None and (beat.number, beat.token) == (number, grant.token) and length == grant.length:
        grant.lease.until = min(grant.lease.until, sent + length)
    judge(self, grant, found, number, sent, length)


@_instead_of(Grant, "mark_held")
def closed_and_held(hold: Whole, self: Grant, granted: Granted) -> Any:
    self.state = State.WAITING
    return hold(self, granted)


@_defect
def first_not_woken(patches: Patches) -> None:
    patches.set(LocalQueue, "wake_first_of", lambda self, keys: None)


@_instead_of(Background, "_have_tried")
def one_by_one_at_exit(have_tried: Whole, self: Background, tasks: Sequence[Task], *how: Any) -> None:
    if self.end == FOREVER:
        have_tried(self, tasks, *how)
        return
    for task in tasks:
        if (left := self.end - self._heartbeat.now()) > 0:
            with contextlib.suppress(LockError):
                task.attempt([task], left)


@_instead_of(Renewals, "renew")
def lost_renewed(
    _: Whole, self: Renewals, grants: Sequence[Grant], limit: float = FOREVER, entered: float = FOREVER
) -> None:
    self._renew(grants, self._limit(grants), is_part=limit < FOREVER)
    for grant in grants:
        grant.lease.renewing = False


@_defect
def all_threads_for_one_key(patches: Patches) -> None:
    patches.set(lanes, "PER_KEY", 1_000)


@_instead_of(Renewals, "_have_renewed")
def stuck_renewed_first(_: Whole, self: Renewals, grants: Sequence[Grant], limit: float = FOREVER) -> None:
    for grant in grants:
        grant.lease.renewing, grant.lease.once_more = True, False
    self.renew(grants, limit)


@_defect
def deadline_from_reply(patches: Patches) -> None:
    answer, judge = Commands.answer, Renewals.judge

    def answer_from_now(self: Commands, grant_id: str, reply: Reply, sent: float, number: int = -1) -> Answer:
        return answer(self, grant_id, reply, self._session.now(), number)

    def judge_from_now(
        self: Renewals, grant: Grant, found: Found | None, number: int, sent: float, length: float
    ) -> None:
        judge(self, grant, found, number, self._session.now(), grant.length)

    patches.set(Commands, "answer", answer_from_now)
    patches.set(Renewals, "judge", judge_from_now)


@_instead_of(Waits, "result")
def deadline_from_news(hear: Whole, self: Waits, grant: Grant) -> Any:
    result = hear(self, grant)
    return result if result.news is None else replace(result, queued_until=self._session.now() + grant.terms.lease)


@_instead_of(Renewals, "judge")
def place_as_lease(
    judge: Whole, self: Renewals, grant: Grant, found: Found | None, number: int, sent: float, length: float
) -> None:
    judge(self, grant, found, number, sent, grant.length if grant.state is State.HELD else length)


@_instead_of(Commands, "answer")
def look_as_renewal(answer: Whole, self: Commands, grant_id: str, reply: Reply, sent: float, number: int = -1) -> Any:
    return answer(self, grant_id, reply, sent, reply.beat if number == -1 else number)


@_defect
def no_deadline(patches: Patches) -> None:
    patches.set(Grant, "held", property(lambda self: self.state is State.HELD))
    patches.set(Grant, "ends_at", property(lambda self: FOREVER))  # otherwise the heartbeat looks for it all the time


@_defect
def no_tombstone(patches: Patches) -> None:
    patches.set(procedures, "TOMBSTONE_TTL", 0)


@_defect
def unknown_outcome_forgotten(patches: Patches) -> None:
    patches.set(Cleanup, "ensure_removed", lambda self, grant, **_: None)


@_instead_of(Ending, "end")
def taken_and_forgotten(end: Whole, self: Ending, grant: Grant, how: EndReason, **options: Any) -> None:
    grant.outcome_unknown &= how is not EndReason.LOST
    end(self, grant, how, **options)


@_defect
def arrival_forgotten(patches: Patches) -> None:
    patches.set(Commands, "with_arrival", lambda self, made, grant, now: made)


@_instead_of(Renewals, "judge")
def renewal_without_grant(
    judge: Whole, self: Renewals, grant: Grant, found: Found | None, number: int, sent: float, length: float
) -> None:
    if found is not None and grant.state is State.HELD:
        found = replace(found, holders={grant.id: Beat(number, token=grant.token)} if found.holders else {})
    judge(self, grant, found, number, sent, length)


@_defect
def next_not_queued(patches: Patches) -> None:
    patches.set(Commands, "_queue_next", lambda self, grant_id, timeout: None)


@_instead_of(LocalQueue, "finish_handover")
def heir_without_doubt(finish: Whole, self: LocalQueue, next_waiter: Grant, answer: Answer | None) -> None:
    before = next_waiter.outcome_unknown
    finish(self, next_waiter, answer)
    next_waiter.outcome_unknown = before


@_instead_of(Renewals, "_renew_due")
def all_in_one(_: Whole, self: Renewals, grants: list[Grant], now: float) -> None:
    if any(grant.lease.renew_at <= now for grant in grants):
        self._have_renewed(sorted(grants, key=lambda grant: grant.key))


@_defect
def without_limit(patches: Patches) -> None:
    patches.set(Commands, "_seconds_for", lambda self, action: 60.0)


@_instead_of(Ending, "end")
def loss_untold(end: Whole, self: Ending, grant: Grant, how: EndReason, **options: Any) -> None:
    self.forget(grant) if how is EndReason.LOST else end(self, grant, how, **options)


@_instead_of(Cleanup, "repeat_releases")
def undone_release_kept(_: Whole, self: Cleanup) -> None:
    self._commands.releases.undone(self._session.store.primary(), self._session.now())


@_instead_of(_Rule, "granted")
def whole_lease_for_all(granted: Whole, self: _Rule, entry: Document, token: int) -> Any:
    return {**granted(self, entry, token), "until": self.after(entry["server_lease"])}


@_instead_of(Cleanup, "ensure_removed")
def left_at_close(ensure_removed: Whole, self: Cleanup, grant: Grant, **options: bool) -> None:
    if grant.in_doubt or not self._commands._closed:
        ensure_removed(self, grant, **options)


@_defect
def longest_place(patches: Patches) -> None:
    with_new, answer, renewed = _Rule.with_new, Commands.answer, Grant.renewed

    def add(self: _Rule, new: Document, queue: Entries, done: set[str], *, resumes: bool) -> Entries:
        if queue:
            new = {**new, "waiter_lease": Int64(min(3 * new["waiter_lease"], new["server_lease"]))}
        return with_new(self, new, queue, done, resumes=resumes)

    def believe(self: Commands, grant_id: str, reply: Reply, sent: float, number: int = -1) -> Answer:
        grant = self._session.registry.grants.get(grant_id)
        if grant is not None and reply.place is not None and reply.waiting > 1 and reply.beat == number:
            length = min(3 * grant.terms.waiter_lease, grant.terms.lease)
            grant.lease.waiter_length = max(grant.lease.waiter_length, length)
        return answer(self, grant_id, reply, sent, number)

    def longest(self: Grant, until: float, now: float, length: float = 0.0) -> None:
        renewed(self, max(until, self.lease.until), now, length)

    patches.set(_Rule, "with_new", add)
    patches.set(Commands, "answer", believe)
    patches.set(Grant, "renewed", longest)


@_defect
def old_bells(patches: Patches) -> None:
    patches.set(procedures, "_newer", lambda result, last_token: (result.news, result.answer))
