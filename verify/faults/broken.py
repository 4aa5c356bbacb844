"""The lock with one defect each: old bugs that a scenario on real servers, or the simulation, must find.

A new defence comes with the patch that takes it out, and with a row in docs/evidence/mutants.md. A patch changes the
real engine in this process: `broken` for the length of a block, `breaking` for good, `from_environment` as
MONGOLOCK_BROKEN says. A patch that finds nothing to patch raises NothingToBreak.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pymongo
from pymongo import WriteConcern
from pymongo.read_concern import ReadConcern

from django_mongolock.engine import mongo_store, protocol
from django_mongolock.engine.actions import Answer, Apply, WaitResult
from django_mongolock.engine.election import ClockEncoder
from django_mongolock.engine.grant import Grant, State
from django_mongolock.engine.mongo_store import MongoStore
from django_mongolock.engine.protocol import Acquisition
from django_mongolock.engine.replies import REPLY, Beat, Found, Reply, read_reply
from django_mongolock.engine.session.commands import Commands
from django_mongolock.engine.session.renewals import Renewals
from django_mongolock.engine.session.session import Session
from django_mongolock.engine.session.waits import Waits
from django_mongolock.engine.step import Step

#: The variable that says which variant a process is.
VARIABLE: Final = "MONGOLOCK_BROKEN"

Document = dict[str, Any]


class NothingToBreak(AssertionError):
    """What a variant patches is not there any more."""


class Patches:
    """Changes to the engine of this process, which can be undone."""

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of a module or class."""
        if name not in vars(owner):
            raise NothingToBreak(f"{owner.__name__} has no {name}")
        self._undo.callback(setattr, owner, name, vars(owner)[name])
        setattr(owner, name, value)

    def undo(self) -> None:
        """Make the engine whole again."""
        self._undo.close()


# The variants


def _w1_grants(patches: Patches) -> None:
    patches.set(mongo_store, "MAJORITY", WriteConcern(w=1))


def _hand_over_w1(patches: Patches) -> None:
    handing_over = threading.local()

    class Weaker(WriteConcern):
        @property
        def document(self) -> Document:
            return {"w": 1} if getattr(handing_over, "now", False) else super().document

    apply = MongoStore.apply

    def weakly(self: MongoStore, key: str, made: Step, timeout: float) -> Reply:
        handing_over.now = bool(made.given)
        try:
            return apply(self, key, made, timeout)
        finally:
            handing_over.now = False

    patches.set(mongo_store, "MAJORITY", Weaker(w="majority"))
    patches.set(MongoStore, "apply", weakly)


def _deadline_from_reply(patches: Patches) -> None:
    answer, judge = Commands.answer, Renewals.judge

    def answer_from_now(self: Commands, grant_id: str, reply: Reply, sent: float, number: int = -1) -> Answer:
        return answer(self, grant_id, reply, self._session.now(), number)

    def judge_from_now(self: Renewals, grant: Grant, found: Found | None, number: int, *times: float) -> None:
        judge(self, grant, found, number, self._session.now(), grant.length)

    patches.set(Commands, "answer", answer_from_now)
    patches.set(Renewals, "judge", judge_from_now)


def _deadline_from_news(patches: Patches) -> None:
    hear = Waits.result

    def hear_a_whole_lease(self: Waits, grant: Grant) -> WaitResult:
        result = hear(self, grant)
        return result if result.news is None else replace(result, queued_until=self._session.now() + grant.terms.lease)

    patches.set(Waits, "result", hear_a_whole_lease)


def _place_as_lease(patches: Patches) -> None:
    judge = Renewals.judge

    def judge_as_held(self: Renewals, grant: Grant, found: Found | None, number: int, *times: float) -> None:
        sent, length = times
        judge(self, grant, found, number, sent, grant.length if grant.state is State.HELD else length)

    patches.set(Renewals, "judge", judge_as_held)


def _look_as_renewal(patches: Patches) -> None:
    answer = Commands.answer

    def believe_a_look(self: Commands, grant_id: str, reply: Reply, sent: float, number: int = -1) -> Answer:
        return answer(self, grant_id, reply, sent, reply.beat if number == -1 else number)

    patches.set(Commands, "answer", believe_a_look)


def _no_deadline(patches: Patches) -> None:
    patches.set(Grant, "held", property(lambda self: self.state is State.HELD))


def _release_by_key(patches: Patches) -> None:
    apply = MongoStore.apply

    def release(self: MongoStore, keys: Sequence[str], _: object, timeout: float) -> set[str]:
        with pymongo.timeout(timeout):
            nobody: Document = {"$set": {"holders": [], "expires_at": None}}
            found = self.collection.update_many({"_id": {"$in": list(keys)}}, nobody).matched_count
            return set() if found else set(keys)

    def release_or_apply(self: MongoStore, key: str, step: Step, timeout: float) -> Reply:
        if step.given and step.add is None:
            return Reply(found=not release(self, [key], "", timeout))
        return apply(self, key, step, timeout)

    patches.set(MongoStore, "apply", release_or_apply)
    patches.set(MongoStore, "release_uncontended", release)


def _no_tombstone(patches: Patches) -> None:
    patches.set(protocol, "TOMBSTONE_TTL", 0)


def _unknown_outcome_forgotten(patches: Patches) -> None:
    def forget(self: Session, grant: Grant) -> None:
        grant.release()
        self.forget(grant)
        grant.owner_ref = None

    patches.set(Session, "abandon", forget)


def _taken_and_forgotten(patches: Patches) -> None:
    lost = Session.lost

    def lost_without_doubt(self: Session, grant: Grant) -> None:
        grant.outcome_unknown = False
        lost(self, grant)

    patches.set(Session, "lost", lost_without_doubt)


def _local_read(patches: Patches) -> None:
    apply = MongoStore.apply

    def read(self: Acquisition) -> Apply:
        return Apply(self.key, Step(ask=self.grant))

    def apply_or_look(self: MongoStore, key: str, made: Step, timeout: float) -> Reply:
        if made != Step(ask=made.ask, beat=made.beat):
            return apply(self, key, made, timeout)
        local = self.collection.with_options(read_concern=ReadConcern("local"))
        let = {"c": {"$literal": {"ask": made.ask}}}
        reply = read_reply(key, local.find_one({"_id": {"$eq": key}}, REPLY, let=let))
        return replace(reply, beat=made.beat) if reply.held else reply

    patches.set(Acquisition, "read", read)
    patches.set(MongoStore, "apply", apply_or_look)


def _no_op_as_proof(patches: Patches) -> None:
    def renew(self: MongoStore, keys: Sequence[str], made: Step, timeout: float) -> dict[str, Found]:
        mine = {"_id": {"$in": list(keys)}, "holders.grant": {"$in": made.renew}}
        with pymongo.timeout(timeout):
            self.collection.update_many(mine, {"$set": {"v": 1}})
            local = self.collection.with_options(read_concern=ReadConcern("local"))
            documents = list(local.find(mine))
        return {
            document["_id"]: Found(
                document["token"],
                {item["grant"]: Beat(made.beat, token=item["token"]) for item in document["holders"]},
                {},
            )
            for document in documents
        }

    patches.set(MongoStore, "renew", renew)


def _no_clock_stamp(patches: Patches) -> None:
    patches.set(ClockEncoder, "transform_python", lambda self, value: "")


def _arrival_forgotten(patches: Patches) -> None:
    patches.set(Commands, "with_arrival", lambda self, made, entry, grant, now: made)


PATCHES: Final[dict[str, Callable[[Patches], None]]] = {
    "w1-grants": _w1_grants,
    "hand-over-w1": _hand_over_w1,
    "deadline-from-reply": _deadline_from_reply,
    "deadline-from-news": _deadline_from_news,
    "place-as-lease": _place_as_lease,
    "look-as-renewal": _look_as_renewal,
    "no-deadline": _no_deadline,
    "release-by-key": _release_by_key,
    "no-tombstone": _no_tombstone,
    "taken-and-forgotten": _taken_and_forgotten,
    "unknown-outcome-forgotten": _unknown_outcome_forgotten,
    "local-read-grant": _local_read,
    "no-op-as-proof": _no_op_as_proof,
    "no-clock-stamp": _no_clock_stamp,
    "arrival-forgotten": _arrival_forgotten,
}


@dataclass(frozen=True)
class Defect:
    """A row of the table in docs/evidence/mutants.md. breaks: promises, and rows of the failure table. finder: what
    finds it: a scenario of `scenarios`, or the simulation."""

    name: str
    text: str
    harm: str
    breaks: str
    finder: str


def _rows() -> Iterator[Defect]:
    page = Path(__file__).parents[2] / "docs/evidence/mutants.md"
    for row in re.findall(r"(?m)^\| `([\w-]+)` \| (.*) \| (.*) \| (.*) \| (.*) \|$", page.read_text()):
        yield Defect(*row)


#: Every defect that the page names, also those of `verify.simulation.defects`.
DEFECTS: Final = {defect.name: defect for defect in _rows()}


def breaking(name: str) -> Patches:
    """Break the engine of this process; for good, unless the patches are undone. Raises NothingToBreak, KeyError."""
    patches = Patches()
    try:
        PATCHES[name](patches)
    except BaseException:
        patches.undo()
        raise
    return patches


@contextlib.contextmanager
def broken(name: str) -> Iterator[None]:
    """Break the engine of this process for a block. Sessions that live on behave as patched, so make new ones in it."""
    patches = breaking(name)
    try:
        yield
    finally:
        patches.undo()


def from_environment() -> str:
    """Break the engine of this process as MONGOLOCK_BROKEN says; return the variant's name, or "" for none."""
    name = os.environ.get(VARIABLE, "")
    if name:
        breaking(name)
    return name
