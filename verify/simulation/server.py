"""A replica set in virtual time: three members with clocks of their own, one primary, an oplog, and elections.

`rule_in_python` writes the engine's documents. The primary has a write at once, the majority a little later. An
election may roll back the writes that the majority does not have yet.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from queue import Empty
from typing import Final

from bson.timestamp import Timestamp

from django_mongolock.engine.rule.document import Limits, Step
from django_mongolock.engine.rule.in_python import NOTHING, Moment, apply_rule
from django_mongolock.engine.rule.pipeline import pipeline
from django_mongolock.engine.rule.replies import Bell
from verify.faults.checker import Violation
from verify.simulation.expressions import Document, Pipeline, bound, run, with_constants
from verify.simulation.invariants import broken_by
from verify.simulation.kernel import Kernel
from verify.simulation.shell import SimQueue

#: The time of day at the beginning.
ORIGIN: Final = datetime(2026, 1, 1, tzinfo=UTC)
#: The least and the most seconds until the majority has a write.
REPLICATION: Final = (0.001, 0.006)
#: The probability that the rule in Python is compared with the sent pipeline.
CHECKED: Final = 0.02
#: The probability that a bell comes to the wrong session.
FOR_ANOTHER: Final = 0.01
#: The number of bells kept.
BELLS: Final = 40
#: The most seconds of a command on its way in each direction. Each run has one of these.
DISTANCES: Final = (0.001, 0.001, 0.02)


@dataclass(eq=False)
class Member:
    """One server.

    - rate: seconds that its clock counts in one second.
    - offset: time that its clock showed at the beginning.
    """

    number: int
    rate: float = 1.0
    offset: float = 0.0

    def time(self, kernel: Kernel) -> datetime:
        """Return the time of its clock in whole milliseconds."""
        return ORIGIN + timedelta(milliseconds=int((kernel.time * self.rate + self.offset) * 1000))

    def ahead(self, kernel: Kernel) -> float:
        """Return the seconds by which its clock is ahead of virtual time."""
        return kernel.time * (self.rate - 1.0) + self.offset

    def set(self, kernel: Kernel, ahead: float) -> None:
        """Set its clock to be ahead by so many seconds."""
        self.offset += ahead - self.ahead(kernel)


@dataclass(slots=True, eq=False)
class Write:
    """One entry of the oplog.

    - confirmed: callbacks, called with whether the majority has the write.
    """

    key: str
    after: Document | None
    confirmed: list[Callable[[bool], None]] = field(default_factory=list)


class Parsed:
    """A command as a member has parsed it. `$$NOW` and `$$CLUSTER_TIME` are read once for it."""

    def __init__(self, servers: Servers, named: str) -> None:
        self.member = servers.primary
        self.moment = Moment(self.member.time(servers.kernel), named, servers.cluster_time)
        self.has_written = False


def _sent(update: Pipeline, key: str, document: Document | None, arguments: Document, now: datetime) -> Document:
    """Return the document after a pipeline."""
    after = run(update, {"_id": key, **(document or {})}, bound(arguments), now)
    del after["_id"]
    return after


class Servers:
    """The replica set.

    - named: name of the present election.
    - documents: documents of the primary.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.distance = kernel.chance.choice(DISTANCES)
        self.members = [Member(number, kernel.rate()) for number in range(3)]
        #: The least and the most seconds until the majority has a write.
        self.replication = REPLICATION
        self.primary = self.members[0]
        self.term = 1
        self.documents: dict[str, Document] = {}
        self.committed: dict[str, Document] = {}
        self.cluster_time = Timestamp(int(ORIGIN.timestamp()), 1)
        self.has_majority = True
        #: The time until which no member answers, because an election goes on or all are down.
        self.away_until = 0.0
        #: Keys whose documents a stalled transaction has written. Nobody else can write them.
        self.stuck: list[str] = []
        #: The virtual time of each document's last write.
        self.written: dict[str, float] = {}
        self.counts: Counter[str] = Counter()
        #: The violations found in writes.
        self.violations: list[Violation] = []
        #: The constants in the pipelines, and their replacements.
        self.constants: tuple[tuple[int, int], ...] = ()
        self._pending: list[Write] = []
        self._bells: deque[Bell] = deque(maxlen=BELLS)
        self._listening: list[Listening] = []

    @property
    def named(self) -> str:
        """The name of the election that made the present primary."""
        return f"term-{self.term}"

    @property
    def answers(self) -> bool:
        """Whether there is a primary that answers."""
        return self.kernel.time >= self.away_until

    # Writing

    def parse(self, named: str) -> Parsed:
        """Parse a command that names this election."""
        return Parsed(self, named)

    def apply(
        self,
        parsed: Parsed,
        key: str,
        step: Step,
        limits: Limits,
        given: Callable[[Document], bool] | None = None,
        *,
        short: Pipeline | None = None,
    ) -> tuple[Document | None, Write | None]:
        """Apply *step* at the moment of its parsing, if the document is as *given*.

        - short: short form of the update.
        """
        before, moment = self.documents.get(key), parsed.moment
        arguments = partial(step.arguments, limits, moment.clock, moment.cluster_time)
        if given is not None and not given(before or NOTHING):
            return None, None
        if short is not None:
            made = _sent(self._lowered(short), key, before, arguments(), moment.now)
            return (made, None) if made == before else (made, self.write(key, made))
        after = apply_rule(before, step, limits, moment)
        if after is None:
            return None, None
        if self.kernel.chance.random() < CHECKED and after != _sent(
            self._lowered(pipeline(step)), key, before, arguments(), moment.now
        ):
            raise AssertionError(f"the rule in Python is not the pipeline: {before} {step} {moment}")
        if before is not None:
            self.violations += broken_by(before, after, step, self.kernel.time)
        return after, self.write(key, after)

    def _lowered(self, update: Pipeline) -> Pipeline:
        """Return the pipeline with the constants of this run."""
        return with_constants(tuple(stage.raw for stage in update), self.constants)

    def write(self, key: str, after: Document | None) -> Write:
        """Write a document, or remove it."""
        self._tick()
        self.written[key] = self.kernel.time
        if after is None:
            self.documents.pop(key, None)
        else:
            self.documents[key] = after
        write = Write(key, after)
        self._pending.append(write)
        if self.has_majority:
            self.kernel.at(self.kernel.chance.uniform(*self.replication), lambda: self._confirm(write))
        return write

    def newest(self) -> Write | None:
        """Return the last write that the majority does not have yet."""
        return self._pending[-1] if self._pending else None

    def _tick(self) -> None:
        """Advance the cluster time. The cluster time advances with every write, and never goes back."""
        seconds = int(self.primary.time(self.kernel).timestamp())
        last = self.cluster_time
        self.cluster_time = Timestamp(seconds, 1) if seconds > last.time else Timestamp(last.time, last.inc + 1)

    def _confirm(self, write: Write) -> None:
        """Confirm this write and all before it."""
        if not self.has_majority or write not in self._pending:
            return
        place = self._pending.index(write) + 1
        done, self._pending = self._pending[:place], self._pending[place:]
        for each in done:
            self._commit(each)

    def _commit(self, write: Write) -> None:
        if write.after is None:
            self.committed.pop(write.key, None)
        else:
            self.committed[write.key] = write.after
        for call in write.confirmed:
            call(True)

    # Faults

    def lose_majority(self) -> None:
        """Let the primary write alone from now on."""
        self.has_majority = False

    def regain_majority(self) -> None:
        """Let the others catch up."""
        self.has_majority = True
        if self._pending:
            self._confirm(self._pending[-1])

    def elect(self, member: Member, kept: int, seconds: float) -> None:
        """Make *member* the primary. The first *kept* writes that the majority lacks are kept, and the rest is
        undone."""
        lost = self._pending[kept:]
        for write in self._pending[:kept]:
            self._commit(write)
        self._pending = []
        self.documents = dict(self.committed)
        self.primary = member
        self.term += 1
        self.has_majority = True
        self.away_until = self.kernel.time + seconds
        self._tick()  # every election writes
        for write in lost:
            for call in write.confirmed:
                call(False)

    # Bells

    def listen(self, session: str) -> Generator[Bell | None, None, None]:
        """See Store.listen(). A bell from before is heard too, unless it was overwritten."""
        listening = Listening(self.kernel, session)
        self._listening.append(listening)
        for bell in self._bells:
            listening.hear(bell)
        try:
            yield None
            yield from listening
        finally:
            self._listening.remove(listening)

    def ring(self, bell: Bell) -> None:
        """Let a bell arrive."""
        if self.answers:
            self._bells.append(bell)
            for listening in self._listening:
                listening.hear(bell)

    def drop_bells(self) -> None:
        """Drop the collections of the bells."""
        self._bells.clear()
        for listening in self._listening:
            listening.alive = False


class Listening:
    """The bells heard by one session."""

    def __init__(self, kernel: Kernel, session: str) -> None:
        self.alive = True
        self._kernel = kernel
        self._session = session
        self._heard: SimQueue[Bell] = SimQueue(kernel)
        #: The seconds that a bell takes to this client.
        self._delay = kernel.chance.uniform(0.000_5, 0.005)

    def hear(self, bell: Bell) -> None:
        """Send a bell to this session. Some bells for other sessions come all the same."""
        if bell.session == self._session or self._kernel.chance.random() < FOR_ANOTHER:
            self._kernel.at(self._delay, lambda: self._heard.put(bell))

    def __iter__(self) -> Iterator[Bell | None]:
        while self.alive:
            try:
                yield self._heard.get(timeout=1.0)
            except Empty:
                yield None
