"""The protocol of one key, small enough to be searched to its end: every order of events, every fault.

Read it from top to bottom, after `model_document`: it is the shortest complete description of how the library keeps its
promises.

There is one *document* at the server, there are a few *clients*, and *commands* on their way. `World.moves` lists what
can happen next in a state: a client acts; a command arrives (early, late, twice or never), and may be held up once more
after the server has read its clock for it; its answer arrives or does not; a clock ticks, or is set back; another
member with another clock becomes primary, and what the majority does not have is forgotten. No move but the ticks must
ever happen: a process that has died is one that does nothing any more. `search` goes through all states that can be
reached (`verify/faults/search.py`).

What the server does to its document is `engine/rule_in_python.py` itself. What a client does follows
`engine/protocol.py` and `engine/session/session.py`. `BUGS` are defects that can be built in, to see that the search
finds them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Final, NamedTuple

from verify.faults.model_document import (
    FOREVER,
    LONG_AGO,
    MARGIN,
    Command,
    Document,
    Parsed,
    Reply,
    Rules,
    Written,
    execute,
    read,
)

#: How far the clock of the next primary may be ahead of the last one's, and how far back a clock is set.
FAR: Final = 2
SKEWS: Final = (-FAR, 0, FAR)
NAMES: Final = "ABCD"
#: When the last writer was parsed, where nobody asks for that.
LAST: Final = Parsed(0, 0)
#: Commands that ask for the lock, those that are answered by something to believe in, and those that give it back.
ASKS: Final = ("ask", "try", "confirm")
TIMED: Final = (*ASKS, "renewal", "renewal of its place", "extend", "hand over")
RELEASES: Final = ("release", "release for good")

BUGS: Final = {
    "no tombstone": "an id that was given up leaves no tombstone, so a late command brings it back",
    "deadline from the reply": "a holder counts its lease from the answer, not from before the command was sent",
    "no margin": "the server keeps a lease no longer than its holder",
    "no clock stamp": "a new primary judges the times that another one wrote",
    "release by key": "a release removes the present holder of the key",
    "w:1 grants": "a grant is reported before the majority has it",
    "local read": "a waiter believes in a grant that only the primary has",
    "old news": "a waiter does not check how old the news of its grant is",
    "counter token": "a document that was purged starts its tokens at 1 again",
    "no removal": "an unknown outcome is left to itself",
    "taken and forgotten": "a lock that was taken away is left to itself though a command for it is still on its way",
    "an old time cuts": "an end further ahead than a whole lease from when the command was parsed is cut to that",
    "late is not noticed": "a command that was parsed before the last writer is judged by its own time",
    "set back is not noticed": "times that were written before the clock was set back are judged by it",
    "equal cluster times: an earlier time cuts": "where two commands have one cluster time, an earlier time tells that "
    "the clock was set back",
    "equal cluster times: a later time prunes": "where two commands have one cluster time, a later time tells that "
    "this is the later command",
    "a read lengthens": "a waiter believes in the end that a read shows, for as long as a lease",
    "an extension counts at once": "a lease that is to be longer is counted on before the command is answered",
    "a place counts as a lease": "a waiter's renewal that is answered to a holder counts for a whole lease",
    "arrivals are forgotten": "a waiter of a local queue is queued as if it had just arrived",
    "a renewal revives what was released": "a renewal lengthens what is only kept for its minimum hold",
}


# What a client knows


class Client(NamedTuple):
    """One process that wants the lock once.

    phase: idle, asking, waiting, holding, releasing, removing; at the end released, removed or lost.
    left: of what it believes in, by its own clock: its lease, or its place in the queue. sent: the command that it
    awaits the answer of; since: the ticks since then, by its own clock; parsed: when the server has read it, if it is
    held up there; arrived: has it been carried out, or got lost? reply: the answer, while that is on its way.
    asks: how often it may still ask. outcome_unknown: has it asked again, so that the first command may be on its way
    still? slowed: has its clock stood still for a tick? token: of its grant; while it waits, the last one given to
    anybody. more: by how much its lease was made longer. came: for how long it has waited, from 1 on, where the order
    of arrival counts.
    """

    phase: str = "idle"
    left: int = 0
    sent: str = ""
    since: int = 0
    parsed: Parsed | None = None
    arrived: bool = False
    reply: Reply | None = None
    asks: int = 0
    outcome_unknown: bool = False
    slowed: bool = False
    token: int = 0
    more: int = 0
    came: int = 0

    @property
    def believes(self) -> bool:
        """Does its `lock.held` say True?"""
        return self.phase == "holding" and self.left > 0

    @property
    def kind(self) -> str:
        """What it has sent, without to whom."""
        return self.sent.partition(" to ")[0]

    @property
    def under_way(self) -> bool:
        """Is a command of it on its way to the server, or held up there?"""
        return bool(self.sent) and not self.arrived

    @property
    def heard(self) -> Client:
        """The client, when it awaits no answer any more."""
        return self._replace(sent="", since=0, parsed=None, arrived=False, reply=None)


class Answer(NamedTuple):
    """What comes of a command of this kind: for how many ticks it is *worth* believing in it."""

    kind: str
    reply: Reply
    worth: int


OVER: Final = {phase: Client(phase) for phase in ("released", "removed", "lost")}


class Sent(NamedTuple):
    """A command on its way: of which client, and when the server has parsed it, if it is held up there."""

    kind: str
    number: int
    parsed: Parsed | None


class State(NamedTuple):
    """Everything. document: as the primary has it; written: when the command was parsed that wrote it last.
    majority: as a failover would leave it. news: for each client, the token of a grant that the change stream is going
    to tell it of. proud: the largest token that anybody has ever believed in. order: the cluster time. kept: for how
    long a minimum hold must still keep the lock. failovers, purges, thefts, hold_ups, set_backs: how many may still
    come.
    """

    clients: tuple[Client, ...]
    document: Document
    majority: Document
    written: Parsed
    stray: frozenset[Sent]
    news: tuple[int, ...]
    proud: int
    election: int
    order: int
    kept: int
    failovers: int
    purges: int
    thefts: int
    hold_ups: int
    set_backs: int

    def put(self, number: int, client: Client) -> State:
        return self._replace(clients=(*self.clients[:number], client, *self.clients[number + 1 :]))

    def tell(self, number: int, token: int) -> State:
        return self._replace(news=(*self.news[:number], token, *self.news[number + 1 :]))

    def astray(self, number: int) -> State:
        """What the client has sent, it awaits no more; it may arrive all the same."""
        client = self.clients[number]
        if not client.under_way or client.sent == "look":
            return self
        kind = "renewal" if client.sent == "renewal of its place" else client.sent
        return self._replace(stray=self.stray | {Sent(kind, number, client.parsed)})

    def committed(self, asked: str = "") -> State:
        """The majority has the document. The stream tells those of their grants who did not ask for them just now."""
        if self.document == self.majority:
            return self
        known, state = {holder.token for holder in self.majority.holders}, self
        for holder in self.document.holders:
            if holder.token not in known and holder.name != asked:
                state = state.tell(NAMES.index(holder.name), holder.token)
        return state._replace(majority=self.document)

    def held_up(self) -> list[Parsed]:
        """When the commands were parsed that are held up at the server."""
        parsed = [client.parsed for client in self.clients if client.parsed is not None and not client.arrived]
        return parsed + [stray.parsed for stray in self.stray if stray.parsed is not None]

    def with_held_up(self, change: dict[Parsed, Parsed | None]) -> State:
        """The commands that are held up were parsed at another time, or never arrive."""
        if not change:
            return self
        clients = tuple(
            _parsed_at(client, change[client.parsed])
            if client.parsed is not None and not client.arrived and client.parsed in change
            else client
            for client in self.clients
        )
        stray = frozenset(
            stray if stray.parsed is None or stray.parsed not in change else stray._replace(parsed=change[stray.parsed])
            for stray in self.stray
            if stray.parsed is None or change.get(stray.parsed, stray.parsed) is not None
        )
        return self._replace(clients=clients, stray=stray)


def _parsed_at(client: Client, parsed: Parsed | None) -> Client:
    return client._replace(arrived=True, parsed=None) if parsed is None else client._replace(parsed=parsed)


Move = tuple[str, State]


class Violation(AssertionError):
    """A promise is broken, and this one."""


@dataclass(frozen=True)
class World:
    """What there is and what may happen.

    asks: for each client, how often it may ask. failovers, purges, thefts: how often the primary is replaced, the
    document purged, the lock taken away by force. hold_ups: how many commands the server may hold up after it has
    parsed them. set_backs: how often its clock may be set back. slow_clocks: may the clock of each client miss one
    tick? reads: do waiters look? tries: do they try a last time, without queueing? steady: nobody gives up. calm: nor
    renews. lease, waiter_lease, min_hold, more, bug: see `Rules`.
    """

    asks: tuple[int, ...] = (1, 1)
    failovers: int = 0
    purges: int = 0
    thefts: int = 0
    hold_ups: int = 0
    set_backs: int = 0
    slow_clocks: bool = False
    reads: bool = False
    tries: bool = False
    steady: bool = False
    calm: bool = False
    lease: int = 1
    waiter_lease: int = 1
    min_hold: int = 0
    more: int = 0
    bug: str = ""

    @cached_property
    def rules(self) -> Rules:
        return Rules(self.lease, self.waiter_lease, self.min_hold, self.more, bug=self.bug)

    @property
    def longest(self) -> int:
        """No command is held up for longer, once it was parsed, unless others have overtaken it."""
        return self.rules.server_lease + self.more + 1

    @cached_property
    def timeless(self) -> bool:
        """Does it not matter when the document was written?"""
        return not (self.hold_ups or self.set_backs or self.bug == "no clock stamp")

    def first(self) -> State:
        """Nobody wants the lock yet."""
        nobody = tuple(Client(asks=asks) for asks in self.asks)
        return State(
            clients=nobody,
            document=Document(),
            majority=Document(),
            written=LAST,
            stray=frozenset(),
            news=(0,) * len(nobody),
            proud=0,
            election=0,
            order=1,
            kept=0,
            failovers=self.failovers,
            purges=self.purges,
            thefts=self.thefts,
            hold_ups=self.hold_ups,
            set_backs=self.set_backs,
        )

    def moves(self, state: State) -> Iterator[Move]:
        """Everything that can happen next, in words, and what comes of it. May raise Violation."""
        for label, after in self._all_moves(state):
            yield label, self._without_what_makes_no_difference(after)

    def _all_moves(self, state: State) -> Iterator[Move]:
        for number, client in enumerate(state.clients):
            if client.phase == "idle" and not self._may_begin(state, number):
                continue
            if client.phase not in OVER:
                yield from self._acts(state, number, client)
                yield from self._hears(state, number, client)
            if client.under_way:
                yield from self._comes(state, Sent(client.sent, number, client.parsed))
        for stray in state.stray:
            yield from self._comes(state._replace(stray=state.stray - {stray}), stray, given_up=True)
        yield from self._at_the_server(state)
        yield from self._time(state)

    def _may_begin(self, state: State, number: int) -> bool:
        """They are all alike: let them begin in order."""
        return number == 0 or state.clients[number - 1].phase != "idle"

    # What a client does

    def _acts(self, state: State, number: int, client: Client) -> Iterator[Move]:
        """Of its own accord. It waits for an answer as long as it likes, and may give up at any moment: its time is
        over, it was cancelled, a signal handler raised."""
        name, phase = NAMES[number], client.phase
        if phase == "idle":
            yield self._begins(state, number, client)
        if phase == "asking" and client.asks:
            again = client._replace(outcome_unknown=True)
            yield f"{name} has no answer and asks again", self._send(state, number, again, "ask")
        if phase in ("waiting", "holding") and client.sent in ("", "extend") and not self.calm:
            kind = "renewal" if phase == "holding" else "renewal of its place"
            yield f"{name} sends a {kind}", self._send(state, number, client, kind)
        if phase == "waiting" and not client.sent and self.reads:
            yield f"{name} reads the document", self._send(state, number, client, "look")
        if self.tries and ((phase == "asking" and client.sent == "ask") or (phase == "waiting" and not client.sent)):
            outcome_unknown = client.outcome_unknown or phase == "asking"
            trying = client._replace(phase="asking", asks=0, outcome_unknown=outcome_unknown)
            yield f"{name} tries a last time", self._send(state, number, trying, "try")
        if phase == "holding" and not client.sent and client.more < self.more:
            longer = client._replace(more=self.more) if self.bug == "an extension counts at once" else client
            yield f"{name} extends its lease", self._send(state, number, longer, "extend")
        if phase == "holding":
            yield self._gives_back(state, number, client._replace(left=0, more=0))
        if phase in ("asking", "waiting", "releasing") and not (self.steady or self.calm):
            yield f"{name} gives up, with an unknown outcome", self._give_up(state, number)
        if phase == "removing" and not client.sent:
            yield f"{name} removes itself for good", self._send(state, number, client, "ensure removed")

    def _begins(self, state: State, number: int, client: Client) -> Move:
        asking = client._replace(phase="asking")
        return f"{NAMES[number]} asks for the lock", self._send(state, number, asking, "ask")

    def _gives_back(self, state: State, number: int, client: Client) -> Move:
        kind = "release for good" if client.outcome_unknown else "release"
        releasing = client._replace(phase="releasing")
        return f"{NAMES[number]} releases it", self._send(state, number, releasing, kind)

    @staticmethod
    def _send(state: State, number: int, client: Client, kind: str) -> State:
        """Send a command and await its answer; that of an earlier one is not awaited any more."""
        client = client.heard._replace(sent=kind)
        if kind == "ask":
            client = client._replace(asks=client.asks - 1, token=0)
        return state.astray(number).put(number, client)

    def _give_up(self, state: State, number: int) -> State:
        """Nobody knows whether the last command took effect or still will: have it removed for good."""
        after = OVER["removed"] if self.bug == "no removal" else Client("removing")
        return state.astray(number).put(number, after)

    # What a client hears

    def _hears(self, state: State, number: int, client: Client) -> Iterator[Move]:
        name, told = NAMES[number], state.news[number]
        if client.reply is not None:
            yield f"{name} gets the answer to its {client.sent}", self._answered(state, number, client, client.reply)
        if client.phase == "waiting" and told:
            heard = state.tell(number, 0)
            if told <= client.token and self.bug != "old news":
                yield f"{name} gets old news", heard
            elif client.left:
                # It may hold the lock for as long as its place in the queue was good for.
                yield f"{name} learns that it has the lock", self._believe(heard, number, client, told)
            else:
                yield f"{name} learns of a grant, too late to rely on it", self._send(heard, number, client, "confirm")
        if self.bug == "local read" and client.phase == "waiting" and client.left:
            for holder in state.document.holders:
                if holder.name == name:
                    yield f"{name} reads that it has the lock", self._believe(state, number, client, holder.token)

    def _answered(self, state: State, number: int, client: Client, reply: Reply) -> State:
        answer = Answer(client.sent, reply, self._worth(client, reply))
        client = client.heard
        if client.phase == "removing":
            return state.put(number, OVER["removed"])
        if client.phase == "releasing":
            return state.put(number, OVER["released"]) if reply.found else self._lose(state, number, client)
        if client.phase == "holding":
            return self._renewed(state, number, client, answer)
        return self._acquired(state, number, client, answer)

    def _worth(self, client: Client, reply: Reply) -> int:
        """For how long one may believe in an answer: for the length that the command has asked for, from before it was
        sent, if it was this command that gave it. A read gives nothing."""
        since = 0 if self.bug == "deadline from the reply" else client.since
        if client.sent == "look":
            return max(0, reply.left - since) if self.bug == "a read lengthens" else 0
        length = self.lease + (self.more if client.sent == "extend" else client.more)
        if reply.state == "queued" or client.sent == "renewal of its place":
            # However it stands by the time of the answer.
            counts = client.phase == "holding" and self.bug == "a place counts as a lease"
            length = self.lease if counts else self.waiter_lease
        return max(0, length - since) if reply.whole else 0

    def _acquired(self, state: State, number: int, client: Client, answer: Answer) -> State:
        """It asks or waits, and hears whether it has the lock, or where it stands."""
        kind, reply, worth = answer
        if reply.state == "held" and kind in ASKS and worth:
            return self._believe(state, number, client._replace(left=worth), reply.token)
        if reply.state == "held" and kind != "confirm":  # granted by another command, or a read: take it for a lease
            left = max(client.left, worth) if client.phase == "waiting" else client.left
            return self._send(state, number, client._replace(left=left), "confirm")
        if reply.state == "queued":
            last = client.token if kind == "renewal of its place" else reply.last
            left = max(client.left, worth)
            return state.put(number, client._replace(phase="waiting", left=left, token=last))
        if kind == "try" and not client.outcome_unknown:
            return state.put(number, OVER["removed"])
        if kind != "ask" and not reply.state and client.asks:  # its place was over: queue again
            return self._send(state, number, client._replace(phase="asking"), "ask")
        return self._give_up(state, number)  # the answer took longer than the lease, or it is not wanted there

    def _renewed(self, state: State, number: int, client: Client, answer: Answer) -> State:
        """It holds the lock and hears how its renewal, which it may have sent while it waited, found it."""
        kind, reply, worth = answer
        if reply.state:
            more = self.more if kind == "extend" and reply.whole else client.more
            return state.put(number, client._replace(left=max(client.left, worth), more=more))
        # Nothing was found: it is lost, unless that was before it was granted.
        return self._lose(state, number, client) if reply.last >= client.token else state.put(number, client)

    def _lose(self, state: State, number: int, client: Client) -> State:
        """It is told that the lock is not its own any more."""
        removes = client.outcome_unknown and self.bug != "taken and forgotten"
        return self._give_up(state, number) if removes else state.put(number, OVER["lost"])

    def _believe(self, state: State, number: int, client: Client, token: int) -> State:
        """From now on it holds the lock, as far as it knows."""
        if token <= state.proud and not self.thefts:
            raise Violation(f"P2: {NAMES[number]} has token {token}, and somebody had {state.proud} before")
        proud = max(state.proud, token)
        return state._replace(proud=proud).put(number, client._replace(phase="holding", asks=0, token=token, came=0))

    # What happens at the server

    def _comes(self, state: State, command: Sent, *, given_up: bool = False) -> Iterator[Move]:
        """A command comes to the primary, which reads its clock when it parses it, and may hold it up then."""
        kind, number, parsed = command
        name = NAMES[number]
        what = f"{name}'s {'held-up ' if parsed else ''}{kind}" + (", which it had given up," if given_up else "")
        if kind == "look":
            if not given_up:
                answered = self._answer(state, number, read(state.majority, name, self.rules))
                yield f"{what} is answered", answered
        elif parsed is not None:
            yield from self._is_written(state, command, parsed, f"{what} is written", given_up)
        else:
            for order, when in self._cluster_times(state):
                yield from self._is_written(state, command, Parsed(0, order), f"{what} arrives{when}", given_up)
                if state.hold_ups:
                    held_up = state._replace(hold_ups=state.hold_ups - 1, order=order)
                    if given_up:
                        held_up = held_up._replace(stray=held_up.stray | {Sent(kind, number, Parsed(0, order))})
                    else:
                        held_up = held_up.put(number, held_up.clients[number]._replace(parsed=Parsed(0, order)))
                    yield f"{what} is parsed{when}, and held up", held_up

    @staticmethod
    def _cluster_times(state: State) -> Iterator[tuple[int, str]]:
        """What a command may be given that is parsed now. It has that of another one unless something was written
        meanwhile, if only elsewhere."""
        yield state.order, ""
        if any(parsed.order == state.order for parsed in state.held_up()):
            yield state.order + 1, " after a write elsewhere"

    def _is_written(self, state: State, command: Sent, parsed: Parsed, label: str, given_up: bool) -> Iterator[Move]:
        """A command changes the document.

        It is answered when the majority has what it did; a release at once. An answer that is lost is one that its
        sender never gets around to hear.
        """
        kind, number, came = command
        name, before = NAMES[number], state.document
        document, written, reply = self._execute(state, kind, number, parsed)
        state = state._replace(document=document, written=written, order=max(state.order, parsed.order) + reply.found)
        if came is None and reply.found:
            self._see_that_nothing_is_too_long(document, label)
        if document.released is not None and before.released is None:
            state = state._replace(kept=max(0, document.released.left))
        elif kind == "ensure removed" and before.released is not None and before.released.name == name:
            state = state._replace(kept=0)
        if given_up:
            yield label, state
        elif kind in RELEASES:
            yield label, self._answer(state, number, reply)
        else:
            yield f"{label}, and the majority has it", self._answer(state, number, reply).committed(asked=name)
            if state.failovers:
                unanswered = state.put(number, _parsed_at(state.clients[number], None))
                after = self._answer(state, number, reply) if self.bug == "w:1 grants" else unanswered
                yield f"{label}, and is not replicated yet", after

    def _execute(self, state: State, kind: str, number: int, parsed: Parsed) -> Written:
        command = Command(kind, NAMES[number], parsed)
        return execute(state.document, state.written, command, state.election, self.rules)

    @staticmethod
    def _answer(state: State, number: int, reply: Reply) -> State:
        client = state.clients[number]
        if client.phase in ("releasing", "removing"):  # it wants to know no more than that
            reply = Reply(found=reply.found)
        since = client.since if reply.whole or client.sent == "look" else 0
        return state.put(number, client._replace(arrived=True, parsed=None, reply=reply, since=since))

    def _see_that_nothing_is_too_long(self, document: Document, label: str) -> None:
        """After a command that was parsed just now: whatever the clock did, nothing ends later than it should."""
        too_long = [it for it in document.holders if not it.released and it.left > self.rules.server_lease + it.more]
        if too_long or any(it.left > self.waiter_lease + MARGIN for it in document.waiters):
            raise Violation(f"P6: {label}, and leaves an entry that ends later than a lease from then")

    def _at_the_server(self, state: State) -> Iterator[Move]:
        if state.document != state.majority:
            yield "the majority gets what the primary has", state.committed()
        for skew in SKEWS if state.failovers else ():
            yield f"failover, to a clock that is {skew:+d} ahead", self._failed_over(state, skew)
        if state.set_backs:
            yield f"the clock of the primary is set back by {FAR}", self._set_back(state)
        if state.thefts and state.document.holders:
            force = Command("force", "", Parsed(0, state.order))
            document, written, _ = execute(state.document, state.written, force, state.election, self.rules)
            state_ = state._replace(document=document, written=written, order=state.order + 1)
            yield "an operator takes the lock away", state_._replace(thefts=state.thefts - 1).committed()
        quiet = not state.stray and not any(client.sent for client in state.clients)
        if state.purges and quiet and not state.document.names() and state.document == state.majority:
            # A new document starts its tokens at the milliseconds of the clock, above all it gave before.
            blank = Document(token=0 if self.bug == "counter token" else state.document.token, clock=state.election)
            yield "the document is purged", state._replace(document=blank, majority=blank, purges=state.purges - 1)

    def _failed_over(self, state: State, skew: int) -> State:
        """Another member is primary. What the former one holds up never gets written."""
        document, age = state.majority.after(skew, -FOREVER), state.written.age + skew
        state = state.with_held_up(dict.fromkeys(state.held_up()))
        return state._replace(
            document=document,
            majority=document,
            written=Parsed(age, 0),
            failovers=state.failovers - 1,
            election=state.election + 1,
        )

    def _set_back(self, state: State) -> State:
        state = state.with_held_up(self._older(state, -FAR))
        return state._replace(
            document=state.document.after(-FAR, -FOREVER),
            majority=state.majority.after(-FAR, -FOREVER),
            written=state.written._replace(age=state.written.age - FAR),
            set_backs=state.set_backs - 1,
        )

    def _older(self, state: State, ticks: int) -> dict[Parsed, Parsed | None]:
        """The commands that are held up when so many ticks have gone by. Of one that others have overtaken, nobody asks
        how old it is."""
        return {
            parsed: parsed._replace(age=parsed.age + ticks) if parsed.age + ticks <= self.longest else None
            for parsed in state.held_up()
            if not self._is_overtaken(parsed, state)
        }

    def _is_overtaken(self, parsed: Parsed, state: State) -> bool:
        return parsed.order < state.written.order and not self.bug

    # Time

    def _time(self, state: State) -> Iterator[Move]:
        """Time goes by. The clock of each client may stand still once: clocks do not run equally fast."""
        yield "tick", self._ticked(state)
        for number, client in enumerate(state.clients) if self.slow_clocks else ():
            if not client.slowed and (client.left or client.sent in TIMED):
                yield f"tick, which {NAMES[number]}'s clock does not notice", self._ticked(state, number)

    def _ticked(self, state: State, slow: int | None = None) -> State:
        clients = tuple(
            client._replace(slowed=True) if number == slow else _aged(client, self.lease + self.more)
            for number, client in enumerate(state.clients)
        )
        after = state.with_held_up(self._older(state, 1))
        clients = tuple(
            client._replace(parsed=held.parsed, arrived=held.arrived)
            for client, held in zip(clients, after.clients, strict=True)
        )
        floor = 0 if self.timeless else -FOREVER
        after = after._replace(
            clients=clients,
            document=state.document.after(1, floor),
            majority=state.majority.after(1, floor),
            written=LAST if self.timeless else state.written._replace(age=state.written.age + 1),
            kept=max(0, state.kept - 1),
        )
        for number, client in enumerate(clients):
            if client.phase == "holding" and not client.left:  # not renewed in time: told, and taken back
                after = self._give_up(after, number)
        return after

    # Fewer states

    def _without_what_makes_no_difference(self, state: State) -> State:
        """Two states that differ only in what can have no effect any more are one."""
        if not state.failovers:  # what the majority has mattered for a failover only
            state = state.committed()
        for number, client in enumerate(state.clients):
            if state.news[number] and client.phase not in ("asking", "waiting"):
                state = state.tell(number, 0)
        for number in {it.number for it in state.stray if it.parsed is None}:
            if self._is_out(state, number, state.clients[number]):
                state = state._replace(stray=frozenset(it for it in state.stray if it.number != number or it.parsed))
        return self._in_its_time(state)

    def _is_out(self, state: State, number: int, client: Client) -> bool:
        """Is it in no document, and can no command that is on its way bring it back?"""
        name, both = NAMES[number], (state.document, state.majority)
        # Held up, whatever anybody has sent is a threat: it has an old time.
        if state.hold_ups or self.bug == "release by key" or any(name in document.names() for document in both):
            return False
        tombstone = all(name in document.tombstones for document in both)
        asks = any(it.kind == "ask" and it.number == number for it in state.stray)
        return tombstone or not (asks or (client.sent == "ask" and client.under_way))

    def _in_its_time(self, state: State) -> State:
        """Times count only as far back as anybody looks; cluster times, only in which order they are."""
        if state.election and self.bug != "no clock stamp":  # times that another primary wrote are not judged
            document, majority = (
                it if it.clock == state.election else it.after(FOREVER) for it in (state.document, state.majority)
            )
            written = state.written if document.clock == state.election else LAST
            state = state._replace(document=document, majority=majority, written=written)
        if self.timeless:
            return state if (state.written, state.order) == (LAST, 1) else state._replace(written=LAST, order=1)
        far = FAR if state.set_backs else 0
        if not state.held_up():
            return self._as_old_as(state, far, far)._replace(order=1)
        state, held_up = self._in_order(state)
        oldest = max([far, *(parsed.age for parsed in held_up if not self._is_overtaken(parsed, state))])
        is_behind = any(parsed.order <= 0 for parsed in held_up)
        return self._as_old_as(state, oldest, oldest + self.longest if is_behind else oldest)

    @staticmethod
    def _as_old_as(state: State, oldest: int, written: int) -> State:
        return state._replace(
            document=state.document.after(0, -oldest),
            majority=state.majority.after(0, -oldest),
            written=Parsed(min(written, state.written.age), 0),
        )

    def _in_order(self, state: State) -> tuple[State, list[Parsed]]:
        """With cluster times that are as small as can be: 0 for the last writer, fewer for whom it has overtaken."""
        held_up, zero = state.held_up(), state.written.order
        later = sorted({parsed.order for parsed in held_up if parsed.order > zero})
        places = {order: place for place, order in enumerate(later, 1)} | {zero: 0}
        change: dict[Parsed, Parsed | None] = {}
        for parsed in held_up:
            age = 0 if self._is_overtaken(parsed, state) else parsed.age
            change[parsed] = Parsed(age, places.get(parsed.order, -1))
        last = len(later) if later and later[-1] == state.order else len(later) + 1
        state = state.with_held_up(change)._replace(written=state.written._replace(order=0), order=last)
        return state, state.held_up()


@cache
def _aged(client: Client, lease: int) -> Client:
    """A client for whom a tick has gone by."""
    timed = client.kind in TIMED and (not client.arrived or (client.reply is not None and client.reply.whole))
    timed = timed or (client.sent == "look" and client.reply is not None)
    since = min(lease, client.since + 1) if timed else 0
    came = client.came and min(LONG_AGO, client.came + 1)
    return client._replace(left=max(0, client.left - 1), since=since, came=came)
