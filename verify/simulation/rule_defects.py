"""Defects of the rule in Python, each a patch: see `defects`."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from django_mongolock.engine import rule_in_python
from django_mongolock.engine.rule_in_python import Moment, _Rule
from django_mongolock.engine.step import Step
from verify.faults.broken import Patches

Document = dict[str, Any]
Entries = list[Document]


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


def late_unnoticed(patches: Patches) -> None:
    begin = _Rule.__init__

    def init(self: _Rule, step: Step, limits: Any, moment: Moment, document: Document) -> None:
        begin(self, step, limits, moment, document)
        if self.late:
            self.late, self.clock, self.cluster_time = False, moment.clock, moment.cluster_time
            self.other_primary = self.is_other_primary(moment)
            self.now = moment.now if self.other_primary else max(moment.now, document["written_at"])

    patches.set(_Rule, "__init__", init)


def set_back_unnoticed(patches: Patches) -> None:
    patches.set(_Rule, "is_other_primary", lambda self, moment: self.document["clock"] != moment.clock)


def no_clock_stamp(patches: Patches) -> None:
    is_other = _Rule.is_other_primary

    def by_times_alone(self: _Rule, moment: Moment) -> bool:
        return is_other(self, replace(moment, clock=self.document["clock"]))

    patches.set(_Rule, "is_other_primary", by_times_alone)


def other_primary_never(patches: Patches) -> None:
    patches.set(_Rule, "is_other_primary", lambda self, moment: False)


def waiters_never_pruned(patches: Patches) -> None:
    patches.set(_Rule, "live_waiters", lambda self: self.document["waiters"])


def newest_first(patches: Patches) -> None:
    with_new = _Rule.with_new

    def first(self: _Rule, new: Document, queue: Entries, done: set[str], *, resumes: bool) -> Entries:
        made = with_new(self, new, queue, done, resumes=resumes)
        known = {e["grant"] for e in queue}
        return sorted(made, key=lambda e: e["grant"] in known)

    patches.set(_Rule, "with_new", first)


def released_renewed(patches: Patches) -> None:
    def renewed(self: _Rule, entries: Entries, length: str) -> Entries:
        return [self.renew(e, length) if e["grant"] in self.step.renew else e for e in entries]

    patches.set(_Rule, "renewed", renewed)


def minimum_hold_ignored(patches: Patches) -> None:
    def without(self: _Rule, holders: Entries) -> Entries:
        return [e for e in holders if e["grant"] not in self.step.remove]

    patches.set(_Rule, "without_removed", without)


def counter_token(patches: Patches) -> None:
    patches.set(rule_in_python, "_since_1970", lambda moment: 0)


def tombstones_ignored(patches: Patches) -> None:
    with_new = _Rule.with_new

    def add(self: _Rule, new: Document, queue: Entries, done: set[str], *, resumes: bool) -> Entries:
        alive = done - {e["grant"] for e in self.document["tombstones"]}
        return with_new(self, new, queue, alive, resumes=resumes)

    patches.set(_Rule, "with_new", add)
