"""A process's connection to the simulated servers. The commands travel, wait, get lost, or arrive late."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from typing import Any, Final

from django_mongolock.engine.rule.deadlock import Cycle, cycle_of
from django_mongolock.engine.rule.document import Limits, Step
from django_mongolock.engine.rule.in_python import NOTHING, is_free, is_held, is_there, is_uncontended, reply_of
from django_mongolock.engine.rule.replies import Bell, Found, Reply, read_found
from django_mongolock.engine.rule.short_forms import RELEASE_UNCONTENDED, TAKE_FREE
from django_mongolock.engine.session.grant import Grant
from django_mongolock.engine.store.base import is_heard_here
from django_mongolock.exceptions import LockBackendFailed
from verify.simulation.expressions import Document, Pipeline
from verify.simulation.invariants import useless_renewals
from verify.simulation.kernel import JITTER, Kernel, Process
from verify.simulation.link import Exchange, Link
from verify.simulation.server import ORIGIN, Parsed, Servers, Write

#: The seconds for which the document of a free lock is kept. A held lock is renewed within that time.
RETENTION: Final = 10.0


#: The probability that a bell comes again, and the most seconds until it does.
RUNG_AGAIN: Final = 0.4
RUNG_AGAIN_BY: Final = (1.0, 5.0, 20.0)


#: The work of the server for a command. It yields the seconds to wait, or the write that has to reach the majority. The
#: return value is the answer.
Work = Generator[float | Write, None, Any]
#: The seconds between two attempts of a command that finds its document stuck.
STUCK: Final = 0.05


class SimStore:
    """A store in virtual time. See `store.Store` for the methods.

    - link: network of its process, with all present faults.
    """

    def __init__(self, kernel: Kernel, servers: Servers, process: Process) -> None:
        self.limits = Limits(retention=round(RETENTION * 1_000))
        self.link = Link()
        self._troubles: list[Link] = []
        self._kernel = kernel
        self._servers = servers
        self._process = process
        self._known = servers.named
        self.hearers: dict[str, Callable[[Bell], object]] = {}
        #: The grants of its session, by id.
        self.grants: dict[str, Grant] = {}
        #: The number of commands that have removed grants, except releases of contended locks.
        self.removals = 0
        #: The number of commands without an answer.
        self.failures = 0
        self._closed = False

    # The network

    def begin(self, trouble: Link) -> None:
        """Begin a further fault of this network."""
        self._troubles.append(trouble)
        self._make_link()

    def end(self, trouble: Link) -> None:
        """End a fault. The other faults stay."""
        self._troubles.remove(trouble)
        self._make_link()

    def _make_link(self) -> None:
        worst = map(max, zip(*map(astuple, (Link(), *self._troubles)), strict=True))
        self.link = Link(*worst)

    # Commands

    @property
    def connections(self) -> int:
        return 0

    def apply(self, key: str, step: Step, timeout: float) -> Reply:
        self.removals += step.tombstone_ttl > 0 and step.add is None
        given = partial(is_held, grants=(step.given,)) if step.given else None
        work = partial(self._write, key, step, given, reply=True)
        # A command that hands a lock over is sent once. After the first copy, the answer to the second would report a
        # loss.
        reply: Reply = self._send(work, timeout, key, once=bool(step.given))
        self.ring(reply.bells)
        return reply

    def take_free(self, key: str, step: Step, timeout: float) -> Reply | None:
        given = partial(is_free, grant=step.ask)
        work = partial(self._write, key, step, given, reply=True, short=TAKE_FREE)
        reply: Reply = self._send(work, timeout, key)
        return reply if reply.held else None

    def release_uncontended(self, keys: Sequence[str], grants: Sequence[str], timeout: float) -> set[str]:
        self.removals += 1

        def work(parsed: Parsed) -> Work:
            left = set()
            for key, grant in zip(keys, grants, strict=True):
                given = partial(is_uncontended, grant=grant)
                step = Step(remove=(grant,))
                how: dict[str, Any] = {"majority": False, "short": RELEASE_UNCONTENDED}
                if not (yield from self._write(key, step, given, parsed, **how)):
                    left.add(key)
            # for several keys, those that an earlier copy has released are not left
            documents = self._servers.documents
            return left if len(keys) == 1 else {key for key in left if is_held(documents.get(key, NOTHING), grants)}

        left: set[str] = self._send(work, timeout, once=True)
        return left

    def read(self, key: str, grant: str, timeout: float, owner: str | None = None) -> Reply:
        def work(parsed: Parsed) -> Work:
            yield 0.0
            now = parsed.member.time(self._kernel)
            return reply_of(key, self._servers.committed.get(key), grant, now, owner)

        reply: Reply = self._send(work, timeout, key)
        return reply

    def renew(self, keys: Sequence[str], step: Step, timeout: float) -> dict[str, Found]:
        self.removals += bool(step.remove)
        self._servers.violations += useless_renewals(step, self.grants, self._kernel.time)

        def work(parsed: Parsed) -> Work:
            for key in keys:
                yield from self._write(
                    key, step, partial(is_there, grants=step.renew or step.remove), parsed, majority=False
                )
            if (newest := self._servers.newest()) is not None:
                yield newest
            committed = self._servers.committed
            return {key: committed[key] for key in keys if key in committed}

        found: dict[str, Document] = self._send(work, timeout)
        self.ring_for(found)
        return {key: read_found(document) for key, document in found.items()}

    def deadlock(self, key: str, grant: str, timeout: float) -> Cycle | None:
        def work(parsed: Parsed) -> Work:
            yield 0.0
            documents = [{**document, "_id": each} for each, document in self._servers.committed.items()]
            return cycle_of(documents, grant, parsed.member.time(self._kernel))

        cycle: Cycle | None = self._send(work, timeout, key)
        again = cycle and self._send(work, timeout, key)
        return again if cycle and again and cycle.grants == again.grants else None

    def force(self, key: str, grant: str, timeout: float) -> None:
        """Take the key from one of its holders, as `operations.force_release` does."""
        step = Step(remove=(grant,), force=True)
        self._send(partial(self._write, key, step, partial(is_held, grants=step.remove)), timeout, key)
        self._ring_for_committed([key])

    def request(self, key: str, grant: str, timeout: float) -> None:
        """Ask a holder to release the key, as `operations.request_release` does."""
        step = Step(request_release_of=(grant,), requested_by="an operator")
        self._send(partial(self._write, key, step, partial(is_held, grants=(grant,))), timeout, key)
        self._ring_for_committed([key])

    def clear(self, keys: Sequence[str], timeout: float) -> None:
        """Apply the rule to stale locks, as `operations.clear_stale` does."""

        def work(parsed: Parsed) -> Work:
            for key in keys:
                yield from self._write(key, Step(), lambda document: bool(document["holders"]), parsed)

        self._send(work, timeout)
        self._ring_for_committed(keys)

    def ring_for(self, documents: Mapping[str, Document]) -> None:
        """Ring for the waiters that the last write of their document has granted."""
        for key, document in documents.items():
            if any(e["acquired_at"] >= document["written_at"] for e in document["holders"]):
                self.ring(reply_of(key, document, "", ORIGIN).bells)

    def _ring_for_committed(self, keys: Sequence[str]) -> None:
        committed = self._servers.committed
        self.ring_for({key: committed[key] for key in keys if key in committed})

    def ring(self, bells: Iterable[Bell]) -> None:
        """See Store.ring()."""
        for bell in bells:
            if not is_heard_here(self, bell):
                self._have_rung(bell)

    def _have_rung(self, bell: Bell) -> None:
        """Let a bell arrive once, twice, late or never."""
        kernel, chance = self._kernel, self._kernel.chance
        if chance.random() >= self.link.lost:
            kernel.at(self._delay(), partial(self._ring, bell))
        if chance.random() < RUNG_AGAIN:
            kernel.at(self._delay() + chance.uniform(0.0, chance.choice(RUNG_AGAIN_BY)), partial(self._ring, bell))

    def _ring(self, bell: Bell) -> None:
        if not self.link.cut:
            self._servers.ring(bell)

    def listen(self, session: str) -> Generator[Bell | None, None, None]:

        def work(parsed: Parsed) -> Work:
            yield 0.0

        self._send(work, 5.0)
        yield from self._servers.listen(session)

    def sent_to(self) -> str:
        return self._known

    def primary(self) -> str:
        return self._servers.named if self._servers.answers else ""

    def close(self) -> None:
        self._closed = True

    # Commands on the way

    def _send(
        self, work: Callable[[Parsed], Work], timeout: float, key: str | None = None, *, once: bool = False
    ) -> Any:
        """Have the server do the work, and wait for its answer, at most *timeout* seconds.

        - once: whether no copy of it arrives.
        """
        kernel, sender = self._kernel, self._kernel.current
        if self._closed:
            raise LockBackendFailed("the session was closed", key, passing=False)
        assert sender is not None
        end = kernel.now() + timeout
        exchange = Exchange(sender)
        delay = self._delay()
        kernel.at(delay, partial(self._arrive, work, exchange, self._known))
        if not once and kernel.chance.random() < self.link.twice:
            kernel.at(
                delay + JITTER + self._delay(), partial(self._arrive, work, Exchange(None, exchange), self._known)
            )
        try:
            while not exchange.answers:
                if kernel.now() >= end:
                    self.failures += 1
                    raise LockBackendFailed("MongoDB did not answer in time", key)
                kernel.park(end - kernel.now())
        finally:
            exchange.sender = None
        answer = exchange.answers[0]
        if isinstance(answer, _NotPrimary):
            # Like the driver, look for the primary, and report the failure.
            self._known = self._servers.named
            self.failures += 1
            kernel.sleep(min(max(0.0, end - kernel.now()), kernel.chance.uniform(0.0, 0.1)))
            raise LockBackendFailed("MongoDB has no primary that answers", key)
        return answer

    def _delay(self) -> float:
        chance, link = self._kernel.chance, self.link
        delay = chance.uniform(0.000_1, self._servers.distance) + chance.uniform(0.0, link.slow)
        return delay + (chance.uniform(0.0, link.late_by) if chance.random() < link.late else 0.0)

    def _arrive(self, work: Callable[[Parsed], Work], exchange: Exchange, named: str) -> None:
        """Handle a command at the server. The server parses it, and the primary alone carries it out."""
        if self.link.cut:
            return
        servers = self._servers
        if not servers.answers or named != servers.named:
            self._reply(exchange, _NotPrimary())
            return
        parsed = servers.parse(named)
        self._go_on(work(parsed), parsed, exchange)

    def _go_on(self, work: Work, parsed: Parsed, exchange: Exchange) -> None:
        """Do the next part of the work. Another primary does nothing for it."""
        servers = self._servers
        if exchange.is_void:
            return
        if not servers.answers or servers.primary is not parsed.member:
            self._reply(exchange, _NotPrimary())
            return
        try:
            pause = next(work)
        except StopIteration as end:
            exchange.has_written = parsed.has_written
            servers.counts["commands twice"] += exchange.has_written and exchange.is_copy
            self._reply(exchange, end.value)
            return
        go_on = partial(self._go_on, work, parsed, exchange)
        if isinstance(pause, Write):
            pause.confirmed.append(lambda has: go_on() if has else self._reply(exchange, _NotPrimary()))
        else:
            self._kernel.at(pause, go_on)

    def _reply(self, exchange: Exchange, answer: Any) -> None:
        if not self.link.cut and self._kernel.chance.random() >= self.link.lost:
            self._kernel.at(self._delay(), partial(exchange.answer, self._kernel, answer))
        else:
            self._servers.counts["answers lost"] += exchange.has_written

    # At the server

    def _write(
        self,
        key: str,
        step: Step,
        given: Callable[[Document], bool] | None,
        parsed: Parsed,
        *,
        majority: bool = True,
        reply: bool = False,
        short: Pipeline | None = None,
    ) -> Work:
        """Write one document, and return its `Reply`, or whether it was written.

        - short: see `Servers.apply`.
        """
        servers, chance = self._servers, self._kernel.chance
        if chance.random() < self.link.held_up:
            yield chance.uniform(0.0, self.link.held_up_by)
        while key in servers.stuck:
            yield STUCK
        document, write = servers.apply(parsed, key, step, self.limits, given, short=short)
        parsed.has_written |= write is not None
        if majority and (newest := servers.newest()) is not None:
            yield newest  # also without a write, because the server waits for all that it has
        if not reply:
            return write is not None
        return reply_of(key, document, step.ask, parsed.moment.now, step.owner)


class _NotPrimary:
    """The answer of a member that is not the primary, or not the intended one."""
