"""Defects of the connection, put into the simulated one, each a patch: see `defects`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from django_mongolock.backends.memory_filters import is_there, reply_of
from django_mongolock.engine.actions import Apply
from django_mongolock.engine.protocol import Acquisition
from django_mongolock.engine.replies import Beat, Found, Reply
from django_mongolock.engine.step import Step
from verify.faults.broken import Patches
from verify.simulation.client import SimStore, Work
from verify.simulation.server import Document, Member, Parsed


def client_clock(patches: Patches) -> None:
    write = SimStore._write

    def by_our_clock(self: SimStore, key: str, step: Step, given: Any, parsed: Parsed, **how: Any) -> Work:
        now = Member(0, 3.0 * (self._process.pid % 5)).time(self._kernel)
        parsed.moment = replace(parsed.moment, now=now)
        return write(self, key, step, given, parsed, **how)

    patches.set(SimStore, "_write", by_our_clock)


def w1_grants(patches: Patches) -> None:
    write = SimStore._write

    def weakly(self: SimStore, *what: Any, majority: bool = True, reply: bool = False) -> Work:
        return write(self, *what, majority=False, reply=reply)

    patches.set(SimStore, "_write", weakly)


def hand_over_w1(patches: Patches) -> None:
    write = SimStore._write

    def weakly(self: SimStore, key: str, step: Step, *what: Any, majority: bool = True, reply: bool = False) -> Work:
        return write(self, key, step, *what, majority=majority and not step.given, reply=reply)

    patches.set(SimStore, "_write", weakly)


def release_by_key(patches: Patches) -> None:
    write = SimStore._write

    def whoever(self: SimStore, key: str, step: Step, given: Any, *what: Any, **how: Any) -> Work:
        holders = self._servers.documents.get(key, {}).get("holders", [])
        if step.remove and step.add is None and not step.tombstone_ttl and given is not None:
            step, given = Step(remove=tuple(e["grant"] for e in holders), force=True), lambda document: True
        return (yield from write(self, key, step, given, *what, **how))

    patches.set(SimStore, "_write", whoever)


def local_read(patches: Patches) -> None:
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


def no_op_as_proof(patches: Patches) -> None:
    def renew(self: SimStore, keys: Sequence[str], step: Step, timeout: float) -> dict[str, Found]:
        def work(parsed: Parsed) -> Work:
            yield 0.0
            documents = self._servers.documents
            mine = [key for key in keys if key in documents and is_there(documents[key], step.renew)]
            return {key: _all_renewed(documents[key], step.beat) for key in mine}

        found: dict[str, Found] = self._send(work, timeout)
        return found

    patches.set(SimStore, "renew", renew)


def _all_renewed(document: Document, beat: int) -> Found:
    return Found(document["token"], {e["grant"]: Beat(beat, token=e["token"]) for e in document["holders"]}, {})


def bell_before_majority(patches: Patches) -> None:
    write = SimStore._write

    def ring_at_once(self: SimStore, key: str, step: Step, given: Any, parsed: Parsed, **how: Any) -> Work:
        work = write(self, key, step, given, parsed, **how)
        while True:
            try:
                pause = next(work)
            except StopIteration as end:
                return end.value
            if parsed.has_written and not isinstance(pause, float):
                self.ring(reply_of(key, self._servers.documents.get(key), step.ask, parsed.moment.now).granted)
            yield pause

    patches.set(SimStore, "_write", ring_at_once)
