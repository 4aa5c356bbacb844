"""The line within a process, in the model of the protocol: who waits behind whom, and how the lock is handed on.

Threads of one process that want the same key stand in a line, and only the first of them stands in the document. Who
gives the lock back queues the next of its line in the same command, which says how long that one has waited; the rule
puts it where its arrival belongs. Here no time goes by while a command is on its way: then the order of arrival is the
same for everybody, and can be asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from verify.faults.model import NAMES, OVER, RELEASES, Answer, Client, Move, Sent, State, Violation, World
from verify.faults.model_document import Command, Document, Parsed, Reply, Rules, Written, execute

WAITING: Final = ("line", "asking", "waiting", "reserved")
BUSY: Final = (*WAITING, "holding", "handing over", "releasing")


@dataclass(frozen=True)
class Lines(World):
    """A world of threads. processes: which process each of them belongs to."""

    processes: tuple[int, ...] = (0, 0, 1)

    @cached_property
    def rules(self) -> Rules:
        return Rules(self.lease, self.waiter_lease, arrivals=True, bug=self.bug)

    def _may_begin(self, state: State, number: int) -> bool:
        return True

    # Who stands where

    def _mates(self, state: State, number: int, *phases: str) -> list[int]:
        """The others of its process who are in one of these phases, in the order of their arrival."""
        mates = [
            other
            for other, client in enumerate(state.clients)
            if other != number and self.processes[other] == self.processes[number] and client.phase in phases
        ]
        return sorted(mates, key=lambda other: -state.clients[other].came)

    def _is_first(self, state: State, number: int) -> bool:
        """Does nobody wait before it in its line?"""
        came = state.clients[number].came
        before = [other for other in self._mates(state, number, *WAITING) if state.clients[other].phase != "line"]
        return not before and all(
            (state.clients[other].came, -other) < (came, -number) for other in self._mates(state, number, "line")
        )

    # What a thread does

    def _begins(self, state: State, number: int, client: Client) -> Move:
        client = client._replace(came=1)
        if not self._mates(state, number, *BUSY):
            return super()._begins(state, number, client)
        return f"{NAMES[number]} joins the local queue", state.put(number, client._replace(phase="line"))

    def _acts(self, state: State, number: int, client: Client) -> Iterator[Move]:
        if client.phase == "line" and self._is_first(state, number):
            yield super()._begins(state, number, client)
        yield from super()._acts(state, number, client)

    def _gives_back(self, state: State, number: int, client: Client) -> Move:
        line = self._mates(state, number, *WAITING)
        if not line or state.clients[line[0]].phase != "line":
            return super()._gives_back(state, number, client)
        next_waiter = line[0]
        state = state.put(next_waiter, state.clients[next_waiter]._replace(phase="reserved"))
        kind = f"hand over to {NAMES[next_waiter]}"
        handing = client._replace(phase="handing over")
        return f"{NAMES[number]} hands it over to {NAMES[next_waiter]}", self._send(state, number, handing, kind)

    def _answered(self, state: State, number: int, client: Client, reply: Reply) -> State:
        if client.kind != "hand over":
            return super()._answered(state, number, client, reply)
        next_waiter, answer = NAMES.index(client.sent[-1]), Answer("ask", reply, self._worth(client, reply))
        other = state.clients[next_waiter]
        if not reply.found:  # it had lost the lock: the other one asks by itself
            return self._lose(state, number, client.heard).put(next_waiter, other._replace(phase="line"))
        state = state.put(number, OVER["released"])
        return self._acquired(state, next_waiter, other._replace(phase="asking"), answer)

    # What happens at the server

    def _execute(self, state: State, kind: str, number: int, parsed: Parsed) -> Written:
        kind, _, next_waiter = kind.partition(" to ")
        whose = state.clients[NAMES.index(next_waiter) if next_waiter else number]
        waited = whose.came if kind in ("ask", "hand over") else 0
        command = Command(kind, NAMES[number], parsed, next_waiter, waited)
        return execute(state.document, state.written, command, state.election, self.rules)

    def _is_written(self, state: State, command: Sent, parsed: Parsed, label: str, given_up: bool) -> Iterator[Move]:
        for label_, after in super()._is_written(state, command, parsed, label, given_up):
            if command.kind in RELEASES or command.kind.startswith("hand over"):
                self._see_that_the_first_is_served(state, after.document, label_)
            yield label_, after

    def _see_that_the_first_is_served(self, state: State, document: Document, label: str) -> None:
        """Who is granted the lock by somebody's release has waited as long as anybody who can be seen to wait."""
        before = {holder.name for holder in state.document.holders}
        queue = {NAMES.index(waiter.name) for waiter in document.waiters}
        lines = {other for number in queue for other in self._mates(state, number, "line")}
        for holder in document.holders:
            came = state.clients[NAMES.index(holder.name)].came
            for other in queue | lines if holder.name not in before else ():
                if state.clients[other].came > came:
                    raise Violation(f"P5: {label}: {holder.name} is served before {NAMES[other]}, who came before")

    def _time(self, state: State) -> Iterator[Move]:
        if not state.stray and not any(client.under_way for client in state.clients):
            yield from super()._time(state)
