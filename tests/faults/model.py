"""The protocol of one key, small enough to be searched to its end: every order of events, every fault.

Read it from top to bottom: it is the shortest complete description of how the library keeps its promises.

There is one *document* at the server, there are a few *clients*, and *commands* on their way. `World.moves` lists what
can happen next in a state: a client acts; a command arrives (early, late, twice or never); its answer arrives or does
not; a clock ticks; another member with another clock becomes primary, and what the majority does not have is
forgotten. No move but the ticks must ever happen: a process that has died is one that does nothing any more.
`search` goes through all states that can be reached (`tests/faults/search.py`).

What the server does to its document is not written here once more: it is `engine/rule.py`, the rule in Python, which
`tests/engine/test_rule.py` compares with the real pipeline on a real server. What a client does follows
`engine/protocol.py` and `engine/session.py`. `BUGS` are defects that can be built in, to see that the search finds
them.

All times are what is left of them, in ticks. So two states that differ only in the time of day are one state, and
there are only so many.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, Final, NamedTuple

from django_mongolock.engine.document import Terms, entry
from django_mongolock.engine.rule import Moment, apply_rule
from django_mongolock.engine.step import Limits, Step

#: A client believes for a lease: that it holds the lock, or that it still has its place in the queue. The server
#: lets either live a margin longer.
LEASE: Final = 1
MARGIN: Final = 1
TERM: Final = LEASE + MARGIN
#: How far the clock of the next primary may be ahead of the last one's.
SKEWS: Final = (-TERM, 0, TERM)
#: Longer than any command is on its way. This is the one thing about the network that the protocol relies on.
BURIAL: Final = 1_000_000
FOREVER: Final = BURIAL
#: The moment at which each command is carried out. A tick is a second.
NOW: Final = datetime(2030, 1, 1, tzinfo=UTC)
LIMITS: Final = Limits()
BLANK: Final = apply_rule(None, Step(bury=1), LIMITS, Moment(NOW)) or {}
NAMES: Final = "ABC"

BUGS: Final = {
    "no tombstone": "an id that was given up leaves no tombstone, so a late command brings it back",
    "deadline from the reply": "a holder counts its lease from the answer, not from before the command was sent",
    "no margin": "the server lets a lease live no longer than its holder believes",
    "no clock stamp": "a new primary judges the times that another one wrote",
    "release by key": "a release removes whoever holds the key",
    "w:1 grants": "a grant is reported before the majority has it",
    "local read": "a waiter believes in a grant that only the primary has",
    "old news": "a waiter does not ask how old the news of its grant are",
    "counter token": "a document that was purged starts its tokens at 1 again",
    "no settling": "an unknown outcome is left to itself",
    "taken and forgotten": "a lock that was taken away is not settled though a command for it is still on its way",
}


# What the server has


class Holder(NamedTuple):
    """Who holds the lock, how much is left of its lease by the server's clock, and its token."""

    name: str
    left: int
    token: int


class Waiter(NamedTuple):
    """Who waits, and how much is left of its place in the queue."""

    name: str
    left: int


class Document(NamedTuple):
    """The document of the key. token: the last one given. clock: the election under which it was written last."""

    holders: tuple[Holder, ...] = ()
    waiters: tuple[Waiter, ...] = ()
    graves: frozenset[str] = frozenset()
    token: int = 0
    clock: int = 0

    def names(self) -> set[str]:
        return {holder.name for holder in self.holders} | {waiter.name for waiter in self.waiters}

    def after(self, ticks: int) -> Document:
        """When so many ticks have gone by, or by a clock that is so far ahead. What is over stays over."""
        return _elapsed(self, ticks)


@cache
def _elapsed(document: Document, ticks: int) -> Document:
    return document._replace(
        holders=tuple(holder._replace(left=max(0, holder.left - ticks)) for holder in document.holders),
        waiters=tuple(waiter._replace(left=max(0, waiter.left - ticks)) for waiter in document.waiters),
    )


class Reply(NamedTuple):
    """What a command answers about who sent it. left: of its lease, None if it holds nothing. queued: of its place in
    the queue, None if it has none. token: of its grant. last: the last one given to anybody. found: for a release."""

    left: int | None
    queued: int | None
    token: int
    last: int
    found: bool


@cache
def execute(document: Document, election: int, kind: str, name: str, bug: str) -> tuple[Document, Reply]:
    """What the primary of *election* makes of a command, by the rule that the real pipeline is compared with."""
    found = name in {holder.name for holder in document.holders}
    if kind in ("release", "release for good") and not found and bug != "release by key":
        return document, Reply(None, None, 0, document.token, found)  # it is sent with that condition
    judge = document.clock if bug == "no clock stamp" else election
    stored = apply_rule(_stored(document, bug), _step(document, kind, name, bug), LIMITS, Moment(NOW, str(judge)))
    assert stored is not None
    after = _read(stored, election)
    left, token = next(((h.left, h.token) for h in after.holders if h.name == name), (None, 0))
    queued = next((w.left for w in after.waiters if w.name == name), None)
    return after, Reply(left, queued, token, after.token, found)


def _stored(document: Document, bug: str) -> dict[str, Any]:
    """The document as the server stores it, at the time NOW."""
    held = [{**_entry(h.name, bug), "until": _at(h.left), "token": h.token} for h in document.holders]
    return {
        **BLANK,
        "holders": [{**e, "acquired_at": NOW} for e in held],
        "waiters": [{**_entry(w.name, bug), "until": _at(w.left)} for w in document.waiters],
        "graves": [{"grant": name, "until": _at(BURIAL)} for name in sorted(document.graves)],
        "token": document.token,
        "clock": str(document.clock),
    }


def _read(stored: dict[str, Any], election: int) -> Document:
    return Document(
        tuple(Holder(e["grant"], _left(e), int(e["token"])) for e in stored["holders"]),
        tuple(Waiter(e["grant"], _left(e)) for e in stored["waiters"]),
        frozenset(grave["grant"] for grave in stored["graves"]),
        int(stored["token"]),
        election,
    )


def _at(ticks: int) -> datetime:
    return NOW + timedelta(seconds=ticks)


def _left(stored: dict[str, Any]) -> int:
    left: timedelta = stored["until"] - NOW
    return left // timedelta(seconds=1)


def _step(document: Document, kind: str, name: str, bug: str) -> Step:
    """The command as the library sends it."""
    buried = 0 if bug == "no tombstone" else BURIAL
    holders = tuple(holder.name for holder in document.holders)
    match kind:
        case "ask":
            return Step(ask=name, add=_asked(name, bug))
        case "renew":
            return Step(ask=name, renew=(name,))
        case "release":
            return Step(remove=holders if bug == "release by key" else (name,), force=True)
        case "release for good":  # another command that asks for it may still be on its way
            return Step(remove=(name,), force=True, bury=buried)
        case "settle":
            return Step(ask=name, remove=(name,), force=True, bury=buried)
        case _:
            return Step(remove=holders, force=True)


def _asked(name: str, bug: str) -> dict[str, Any]:
    margin = 0 if bug == "no margin" else MARGIN
    return entry(name, "", Terms(lease=LEASE, margin=margin, patience=LEASE), {})


@cache
def _entry(name: str, bug: str) -> dict[str, Any]:
    return {**_asked(name, bug), "since": NOW}


# What a client knows


class Client(NamedTuple):
    """One process that wants the lock once.

    phase: idle, asking, waiting, holding, releasing, settling; at the end released, settled or lost.
    left: of what it believes in, by its own clock: its lease, or its place in the queue. sent: the command that it
    awaits the answer of; since: the ticks since then; arrived: has the server had it? reply: the answer, while that is
    on its way; its times are what they will be worth to the client, counted from before the command was sent.
    asks: how often it may still ask. doubtful: has it asked again, so that the first command may be on its way still?
    late: has its clock stood still for a tick? token: of its grant; while it waits, the last one given to anybody.
    """

    phase: str = "idle"
    left: int = 0
    sent: str = ""
    since: int = 0
    arrived: bool = False
    reply: Reply | None = None
    asks: int = 0
    doubtful: bool = False
    late: bool = False
    token: int = 0

    @property
    def believes(self) -> bool:
        """Does its `lock.held` say True?"""
        return self.phase == "holding" and self.left > 0

    @property
    def under_way(self) -> bool:
        """Is a command of it on its way to the server?"""
        return bool(self.sent) and not self.arrived

    @property
    def heard(self) -> Client:
        """The client, when it awaits no answer any more."""
        return self._replace(sent="", since=0, arrived=False, reply=None)


OVER: Final = {phase: Client(phase) for phase in ("released", "settled", "lost")}


class State(NamedTuple):
    """Everything. document: as the primary has it; majority: as a failover would leave it. stray: commands on their
    way whose sender does not await the answer any more. news: for each client, the token of a grant that the change
    stream is going to tell it of. proud: the largest token that anybody has ever believed in. failovers, purges,
    thefts: how many may still come.
    """

    clients: tuple[Client, ...]
    document: Document
    majority: Document
    stray: frozenset[tuple[str, int]]
    news: tuple[int, ...]
    proud: int
    election: int
    failovers: int
    purges: int
    thefts: int

    def put(self, number: int, client: Client) -> State:
        return self._replace(clients=(*self.clients[:number], client, *self.clients[number + 1 :]))

    def tell(self, number: int, token: int) -> State:
        return self._replace(news=(*self.news[:number], token, *self.news[number + 1 :]))

    def astray(self, number: int) -> State:
        """What the client has sent, it awaits no more; it may arrive all the same."""
        client = self.clients[number]
        return self._replace(stray=self.stray | {(client.sent, number)}) if client.under_way else self

    def committed(self, asked: str = "") -> State:
        """The majority has the document. The stream tells those of their grants who did not ask for them just now."""
        if self.document == self.majority:
            return self
        known, state = {holder.token for holder in self.majority.holders}, self
        for holder in self.document.holders:
            if holder.token not in known and holder.name != asked:
                state = state.tell(NAMES.index(holder.name), holder.token)
        return state._replace(majority=self.document)


Move = tuple[str, State]


class Violation(AssertionError):
    """A promise is broken, and this one."""


@dataclass(frozen=True)
class World:
    """What there is and what may happen.

    asks: for each client, how often it may ask. failovers, purges, thefts: how often the primary is replaced, the
    document purged, the lock taken away by force. slow_clocks: may the clock of each client miss one tick? calm:
    nobody renews or gives up. bug: the defect that is built in.
    """

    asks: tuple[int, ...] = (1, 1)
    failovers: int = 0
    purges: int = 0
    thefts: int = 0
    slow_clocks: bool = False
    calm: bool = False
    bug: str = ""

    def first(self) -> State:
        """Nobody wants the lock yet."""
        nobody = tuple(Client(asks=asks) for asks in self.asks)
        blank, silence = Document(), (0,) * len(nobody)
        return State(nobody, blank, blank, frozenset(), silence, 0, 0, self.failovers, self.purges, self.thefts)

    def moves(self, state: State) -> Iterator[Move]:
        """Everything that can happen next, in words, and what comes of it. May raise Violation."""
        for label, after in self._all_moves(state):
            yield label, self._without_what_makes_no_difference(after)

    def _all_moves(self, state: State) -> Iterator[Move]:
        for number, client in enumerate(state.clients):
            # They are all alike: let them begin in order.
            if client.phase == "idle" and number and state.clients[number - 1].phase == "idle":
                break
            if client.phase not in OVER:
                yield from self._acts(state, number, client)
                yield from self._hears(state, number, client)
            if client.under_way:
                yield from self._arrives(state, client.sent, number)
        for kind, number in state.stray:
            yield from self._strays_in(state, kind, number)
        yield from self._at_the_server(state)
        yield from self._ticks(state)

    # What a client does

    def _acts(self, state: State, number: int, client: Client) -> Iterator[Move]:
        """Of its own accord. It waits for an answer as long as it likes, and may give up at any moment: its time is
        over, it was cancelled, a signal handler raised."""
        name, phase = NAMES[number], client.phase
        if phase == "idle":
            yield f"{name} asks for the lock", self._send(state, number, client._replace(phase="asking"), "ask")
        if phase == "asking" and client.asks:
            again = client._replace(doubtful=True)
            yield f"{name} has no answer and asks again", self._send(state, number, again, "ask")
        if phase in ("waiting", "holding") and not client.sent and not self.calm:
            yield f"{name} renews", self._send(state, number, client, "renew")
        if phase == "holding":
            kind = "release for good" if client.doubtful else "release"
            yield f"{name} gives it back", self._send(state, number, client._replace(phase="releasing"), kind)
        if phase in ("asking", "waiting", "releasing") and not self.calm:
            yield f"{name} gives up, and does not know how it stands", self._give_up(state, number)
        if phase == "settling" and not client.sent:
            yield f"{name} settles: takes itself out for good", self._send(state, number, client, "settle")

    @staticmethod
    def _send(state: State, number: int, client: Client, kind: str) -> State:
        """Send a command and await its answer; that of an earlier one is not awaited any more."""
        left = client.left if client.phase in ("waiting", "holding") else 0
        client = client.heard._replace(left=left, sent=kind, asks=client.asks - (kind == "ask"))
        return state.astray(number).put(number, client)

    def _give_up(self, state: State, number: int) -> State:
        """Nobody knows whether the last command took effect or still will: have it settled."""
        after = OVER["settled"] if self.bug == "no settling" else Client("settling")
        return state.astray(number).put(number, after)

    # What a client hears

    def _hears(self, state: State, number: int, client: Client) -> Iterator[Move]:
        name, told = NAMES[number], state.news[number]
        if client.reply is not None:
            yield f"{name} has the answer to its {client.sent}", self._answered(state, number, client, client.reply)
        if client.phase == "waiting" and told:
            read = state.tell(number, 0)
            if told <= client.token and self.bug != "old news":
                yield f"{name} hears old news", read
            elif client.left:
                # It may hold the lock for as long as its place in the queue was good for.
                yield f"{name} hears that it has the lock", self._believe(read, number, client, told)
            else:
                yield f"{name} hears of a grant, too late to rely on it", self._send(read, number, client, "renew")
        if self.bug == "local read" and client.phase == "waiting" and client.left:
            for holder in state.document.holders:
                if holder.name == name:
                    yield f"{name} reads that it has the lock", self._believe(state, number, client, holder.token)

    def _answered(self, state: State, number: int, client: Client, reply: Reply) -> State:
        kind, client = client.sent, client.heard
        if client.phase == "settling":
            return state.put(number, OVER["settled"])
        if client.phase == "releasing":
            return state.put(number, OVER["released"]) if reply.found else self._lose(state, number, client)
        if client.phase == "holding":
            return self._renewed(state, number, client, reply)
        return self._acquired(state, number, client, kind, reply)

    def _acquired(self, state: State, number: int, client: Client, kind: str, reply: Reply) -> State:
        """It asks or waits, and hears whether it has the lock, or where it stands."""
        if reply.left:
            return self._believe(state, number, client._replace(left=reply.left), reply.token)
        if reply.queued is not None:
            left = max(client.left, reply.queued)
            return state.put(number, client._replace(phase="waiting", left=left, token=reply.last))
        if kind == "renew" and reply.left is None and client.asks:  # its place was over: queue again
            return self._send(state, number, client._replace(phase="asking"), "ask")
        return self._give_up(state, number)  # the answer took longer than the lease, or it is not wanted there

    def _renewed(self, state: State, number: int, client: Client, reply: Reply) -> State:
        """It holds the lock and hears how its renewal, which it may have sent while it waited, found it."""
        worth = reply.queued if reply.left is None else reply.left
        if worth is not None:
            return state.put(number, client._replace(left=max(client.left, worth)))
        # Nothing was found: it is lost, unless that was before it was granted.
        return self._lose(state, number, client) if reply.last >= client.token else state.put(number, client)

    def _lose(self, state: State, number: int, client: Client) -> State:
        """It is told that the lock is not its own any more."""
        settles = client.doubtful and self.bug != "taken and forgotten"
        return self._give_up(state, number) if settles else state.put(number, OVER["lost"])

    def _believe(self, state: State, number: int, client: Client, token: int) -> State:
        """From now on it holds the lock, as far as it knows."""
        if token <= state.proud and not self.thefts:
            raise Violation(f"P2: {NAMES[number]} has token {token}, and somebody had {state.proud} before")
        proud = max(state.proud, token)
        return state._replace(proud=proud).put(number, client._replace(phase="holding", asks=0, token=token))

    # What happens at the server

    def _arrives(self, state: State, kind: str, number: int) -> Iterator[Move]:
        """A command whose answer is awaited. It is answered when the majority has what it did; a release at once.

        An answer that is lost is one that its sender never gets around to hear.
        """
        name, client = NAMES[number], state.clients[number]
        document, reply = execute(state.document, state.election, kind, name, self.bug)
        arrived = client._replace(arrived=True, since=0)
        answered = state._replace(document=document).put(number, arrived._replace(reply=self._worth(reply, client)))
        if kind.startswith("release"):
            yield f"{name}'s {kind} arrives at the primary", answered
            return
        yield f"{name}'s {kind} arrives, and the majority has it", answered.committed(asked=name)
        if state.failovers:
            unanswered = answered if self.bug == "w:1 grants" else answered.put(number, arrived)
            yield f"{name}'s {kind} arrives at the primary, and no farther yet", unanswered

    def _worth(self, reply: Reply, client: Client) -> Reply:
        """The times in an answer as its receiver may count them: from before it sent the command, less the margin."""
        margin = 0 if self.bug == "no margin" else MARGIN
        since = 0 if self.bug == "deadline from the reply" else client.since
        left, queued = (None if it is None else max(0, min(LEASE, it - margin) - since) for it in reply[:2])
        return reply._replace(left=left, queued=queued)

    def _strays_in(self, state: State, kind: str, number: int) -> Iterator[Move]:
        """A command whose sender has given it up."""
        name = NAMES[number]
        document, _ = execute(state.document, state.election, kind, name, self.bug)
        state = state._replace(document=document, stray=state.stray - {(kind, number)})
        yield f"{name}'s {kind} arrives, which {name} had given up", state

    def _at_the_server(self, state: State) -> Iterator[Move]:
        if state.document != state.majority:
            yield "the majority gets what the primary has", state.committed()
        for skew in SKEWS if state.failovers else ():
            document = state.majority.after(skew)
            after = state._replace(document=document, majority=document, failovers=state.failovers - 1)
            yield f"failover, to a clock that is {skew:+d} ahead", after._replace(election=state.election + 1)
        if state.thefts and state.document.holders:
            document, _ = execute(state.document, state.election, "force", "", self.bug)
            yield "somebody takes the lock away", state._replace(document=document, thefts=state.thefts - 1).committed()
        quiet = not state.stray and not any(client.sent for client in state.clients)
        if state.purges and quiet and not state.document.names() and state.document == state.majority:
            # A new document starts its tokens at the milliseconds of the clock, above all it gave before.
            blank = Document(token=0 if self.bug == "counter token" else state.document.token, clock=state.election)
            yield "the document is purged", state._replace(document=blank, majority=blank, purges=state.purges - 1)

    # Time

    def _ticks(self, state: State) -> Iterator[Move]:
        """Time goes by. The clock of each client may stand still once: clocks do not run equally fast."""
        yield "tick", self._ticked(state)
        for number, client in enumerate(state.clients) if self.slow_clocks else ():
            if not client.late and (client.left or client.sent in ("ask", "renew")):
                yield f"tick, which {NAMES[number]}'s clock does not notice", self._ticked(state, number)

    def _ticked(self, state: State, slow: int | None = None) -> State:
        clients = tuple(
            client._replace(late=True) if number == slow else _aged(client, self.bug)
            for number, client in enumerate(state.clients)
        )
        after = state._replace(clients=clients, document=state.document.after(1), majority=state.majority.after(1))
        for number, client in enumerate(clients):
            if client.phase == "holding" and not client.left:  # not renewed in time: told, and taken back
                after = self._give_up(after, number)
        return after

    # Fewer states

    def _without_what_makes_no_difference(self, state: State) -> State:
        """Two states that differ only in what can have no effect any more are one."""
        if not state.failovers:  # what the majority has mattered for a failover only
            state = state.committed()
        if state.election and self.bug != "no clock stamp":  # times that another primary wrote are not judged
            document, majority = (
                it if it.clock == state.election else it.after(FOREVER) for it in (state.document, state.majority)
            )
            state = state._replace(document=document, majority=majority)
        for number, client in enumerate(state.clients):
            if state.news[number] and client.phase not in ("asking", "waiting"):
                state = state.tell(number, 0)
            if client.phase != "idle" and self._is_out(state, number, client):
                state = state._replace(stray=frozenset(it for it in state.stray if it[1] != number))
        return state

    def _is_out(self, state: State, number: int, client: Client) -> bool:
        """Is it in no document, and can no command that is on its way bring it back?"""
        name, both = NAMES[number], (state.document, state.majority)
        if any(name in document.names() for document in both) or self.bug == "release by key":
            return False
        buried = all(name in document.graves for document in both)
        return buried or not (("ask", number) in state.stray or (client.sent == "ask" and client.under_way))


@cache
def _aged(client: Client, bug: str) -> Client:
    """A client for whom a tick has gone by."""
    reply = client.reply
    if reply is not None and bug != "deadline from the reply":
        left, queued = (None if it is None else max(0, it - 1) for it in reply[:2])
        reply = reply._replace(left=left, queued=queued)
    timed = client.sent in ("ask", "renew") and client.under_way
    since = min(LEASE, client.since + 1) if timed else 0
    return client._replace(left=max(0, client.left - 1), since=since, reply=reply)
