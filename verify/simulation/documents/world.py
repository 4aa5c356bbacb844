"""One run: flows that work on a few documents, a network and processes that fail, and what was seen of it."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from unittest import mock

from django_mongolock.documents import held_document, steps, updates
from django_mongolock.documents.document_lock import DocumentLock, undeclare
from django_mongolock.documents.held_document import HeldDocument
from django_mongolock.documents.steps import Context
from django_mongolock.engine import clock
from django_mongolock.engine.session.errands import MOST_TRIES
from django_mongolock.exceptions import LockBackendFailed, LockError
from django_mongolock.other_collections.courier import PAUSES, Command, Sleep, Steps

from ..expressions import Document
from .collection import SimCollection

EPOCH: Final = datetime(2026, 1, 1, tzinfo=UTC)
#: How long a command may take, and how long one that was held up takes at most to arrive or to write, in seconds.
TIMEOUT, HELD_UP = 1.0, 4.0
#: Where a document says who wrote last.
TOKEN: Final = "lockedByToken"
#: When a document is stale, in seconds: soon, or only long after everything was to be put back.
STALE_AFTER: Final = 60.0, 600.0


@dataclass(eq=False)
class Process:
    """One process: it lives, or was killed; it runs, or is stopped until a time."""

    name: str
    alive: bool = True
    stopped_until: float = 0.0


@dataclass(eq=False)
class Strand:
    """What runs in a process: steps that wait for the outcome of the last one.

    held: what it believes to hold. final: the documents that it finished. asked: the versions that it has read.
    waiting: for which outcome it waits. kind: "flow", "sweep" or "force".
    """

    process: Process
    steps: Steps[Any]
    held: list[HeldDocument[Any]] = field(default_factory=list)
    final: set[Any] = field(default_factory=set)
    asked: dict[Any, int] = field(default_factory=dict)
    over_at: float | None = None
    waiting: int = 0
    kind: str = "flow"

    @property
    def over(self) -> bool:
        """Whether it has ended, or its process has."""
        return self.over_at is not None


@dataclass(frozen=True)
class Grant:
    """Which strand a document was granted to, and when."""

    strand: Strand
    at: float


class SimCourier:
    """Stands in for `other_collections.courier.Courier`: each process has one."""

    forked = False

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process

    def send_in_background(self, command: Command) -> None:
        """Send it after each of the pauses until it returns True, and then for as long as there is no answer."""
        self._world.start(self._process, self._tries(command))

    def _tries(self, command: Command) -> Steps[None]:
        for pause in itertools.chain(PAUSES, itertools.repeat(PAUSES[-1], MOST_TRIES)):
            yield Sleep(pause)
            try:
                if (yield command):
                    return
            except LockBackendFailed:
                continue


class World:
    """Virtual time, the documents, the network, and the processes. A seed decides everything."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        documents = self.random.choice((1, 3))
        self.stale_after = self.random.choice(STALE_AFTER)
        self.now = 0.0
        self.clock_ahead = 0.0  # of the primary
        self.trouble = 0.0  # how likely each trouble of a command is
        self.documents: dict[Any, Document] = {
            number: {"_id": number, "documentVersion": 1, "exportStatus": "exported"} for number in range(documents)
        }
        self.processes: list[Process] = []
        self.strands: list[Strand] = []
        self.grants: dict[Any, Grant | None] = dict.fromkeys(self.documents)
        self.by_writer: dict[str, Strand] = {}
        self.forced: set[tuple[Any, Strand]] = set()
        self.violations: list[str] = []
        self.counts = {"grants": 0, "lost": 0, "late": 0, "cancelled": 0, "killed": 0, "swept": 0}
        self.current: Strand | None = None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count(1)

    # Time

    def at(self, seconds: float, what: Callable[[], None]) -> None:
        """Do something after so many seconds."""
        heapq.heappush(self._events, (self.now + seconds, next(self._number), what))

    def run(self, seconds: float) -> None:
        """Let so many seconds go by."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, _, what = heapq.heappop(self._events)
            what()
            self._look()
        self.now = end

    def server_time(self) -> datetime:
        """What the primary's clock shows."""
        return EPOCH + timedelta(milliseconds=round((self.now + self.clock_ahead) * 1000))

    # Processes

    def start(self, process: Process, steps: Steps[Any], kind: str = "flow") -> Strand:
        """Have a process run steps."""
        strand = Strand(process, steps, kind=kind)
        self.strands.append(strand)
        self.at(0, lambda: self._resume(strand, strand.waiting, None, None))
        return strand

    def kill(self, process: Process) -> None:
        """SIGKILL."""
        process.alive = False
        self.counts["killed"] += 1
        for strand in self.strands:
            if strand.process is process and not strand.over:
                strand.over_at = self.now

    def cancel(self, strand: Strand) -> None:
        """Cancel the strand where it waits, or have a signal raise there."""
        if not strand.over and strand.process.alive:
            self.counts["cancelled"] += 1
            self._resume(strand, strand.waiting, None, KeyboardInterrupt())

    def _resume(self, strand: Strand, waiting: int, value: Any, error: BaseException | None) -> None:
        if strand.over or strand.waiting != waiting:
            return
        if strand.process.stopped_until > self.now:
            self.at(strand.process.stopped_until - self.now, lambda: self._resume(strand, waiting, value, error))
            return
        strand.waiting += 1
        self.current = strand
        try:
            step = strand.steps.send(value) if error is None else strand.steps.throw(error)
        except (StopIteration, KeyboardInterrupt, LockError):
            strand.over_at = self.now
            return
        finally:
            self.current = None
        waiting = strand.waiting
        if isinstance(step, Sleep):
            self.at(step.seconds, lambda: self._resume(strand, waiting, None, None))
        else:
            self._send(strand, waiting, step)

    def close(self) -> None:
        """End all that still runs."""
        for strand in self.strands:
            self.current, strand.over_at = strand, self.now
            for _ in range(9):  # what is struck once more while it cleans up goes on cleaning up
                with suppress(RuntimeError, KeyboardInterrupt, LockError):
                    strand.steps.close()
                    break
        self.current = None

    # The network

    def _send(self, strand: Strand, waiting: int, command: Command) -> None:
        """The command arrives and is answered; or one of the two is lost, or comes late, or it is parsed long before it
        writes."""
        delay = self.random.uniform(0.001, 0.02)
        lost_on_its_way, late, unanswered, held_up = (self.random.random() < self.trouble for _ in range(4))
        if lost_on_its_way or late or unanswered:
            failed = LockBackendFailed("MongoDB did not answer")
            self.at(TIMEOUT, lambda: self._resume(strand, waiting, None, failed))
            self.counts["lost"] += 1
        if lost_on_its_way and not late:
            return
        if late:
            delay += self.random.uniform(0, HELD_UP)
            self.counts["late"] += 1

        def parse() -> None:
            parsed = self.server_time()
            self.at(self.random.uniform(0, HELD_UP) if held_up else 0.0, lambda: write(parsed))

        def write(parsed: datetime) -> None:
            collection: Any = SimCollection(self.documents, parsed, self._noted)
            answer = command(collection)
            if not (late or unanswered):
                self.at(delay, lambda: self._resume(strand, waiting, answer, None))

        self.at(delay, parse)
        if held_up:
            slow = LockBackendFailed("MongoDB did not answer")
            self.at(TIMEOUT, lambda: self._resume(strand, waiting, None, slow))

    # What is judged

    def _noted(self, before: Document, after: Document, update: Document) -> None:
        """An update was made."""
        id_, token = after["_id"], after.get(TOKEN)
        if after["documentVersion"] < before["documentVersion"]:
            self.violations.append(f"{self.now:.2f} the version of {id_} went back")
        if token == before.get(TOKEN):
            return
        strand = self.by_writer[str(token).partition(":")[2]]
        if update["$set"].get("lockedBy"):
            self._granted(before, after, strand)
            return
        grant, releases = self.grants[id_], not after.get("lockedBy")
        if strand.kind == "force" and grant is not None:
            self.forced.add((id_, grant.strand))
        self.counts["swept"] += strand.kind == "sweep"
        if strand.kind == "flow" and (grant is None or grant.strand is not strand):
            self.violations.append(f"{self.now:.2f} {id_} was written by a flow that does not hold it")
        if after["exportStatus"] == "exported" and releases:
            strand.final.add(id_)
        if releases:
            self.grants[id_] = None

    def _granted(self, before: Document, after: Document, strand: Strand) -> None:
        id_ = after["_id"]
        self.counts["grants"] += 1
        self.grants[id_] = Grant(strand, self.now)
        if after["documentVersion"] != before["documentVersion"] + 1:
            self.violations.append(f"{self.now:.2f} {id_} was granted without a new version")
        if before["documentVersion"] != strand.asked[id_]:
            self.violations.append(f"{self.now:.2f} {id_} was granted in a version that was not read")

    def _look(self) -> None:
        """Nobody believes to hold what another believes to hold; and what nobody works on does not stay."""
        believed: dict[Any, int] = {}
        for strand in self.strands:
            if not strand.over and strand.process.stopped_until <= self.now:
                for held in strand.held:
                    if held.remaining > 0 and (held.id, strand) not in self.forced:
                        believed[held.id] = believed.get(held.id, 0) + 1
        self.violations += [f"{self.now:.2f} {id_} is held twice" for id_, count in believed.items() if count > 1]

    def left(self, bound: float) -> list[str]:
        """The documents that stay pending for longer than *bound* after the flow that they were granted to is over; or
        beyond staleness and a sweep, if its process was killed."""
        found = []
        for id_, document in self.documents.items():
            if document["exportStatus"] != "exporting" or (grant := self.grants[id_]) is None:
                continue
            strand, process = grant.strand, grant.strand.process
            if strand.over_at is not None:
                begin = max(strand.over_at, process.stopped_until, grant.at)
                if self.now - begin > bound + (0 if process.alive else self.stale_after):
                    found.append(f"{self.now:.2f} {id_} stays pending since {begin:.2f}")
        return found


@contextmanager
def patched(world: World) -> Iterator[DocumentLock[Document]]:
    """A lock whose time is the world's, and whose processes are those of the world."""
    numbers = itertools.count(1)

    def new_writer() -> str:
        assert world.current is not None
        writer = f"{next(numbers)} {world.current.process.name}"
        world.by_writer[writer] = world.current
        return writer

    def fate(name: str) -> str:
        found = [each for each in world.processes if each.name == name]
        return "unknown" if not found else "alive" if found[0].alive else "gone"

    with ExitStack() as stack:
        for target, name, value in (
            (clock, "now", lambda: world.now),
            (updates, "new_writer", new_writer),
            (held_document, "forgotten", lambda *_: None),
            (steps, "fate", fate),
            (random, "uniform", world.random.uniform),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        lock = DocumentLock[Document](
            lambda: None,  # type: ignore[arg-type,return-value] # no command reaches it
            name=f"simulated-{id(world)}",
            state="exportStatus",
            pending={"exporting": "failed"},
            final=("exported",),
            stale_after=world.stale_after,
        )
        stack.callback(undeclare, lock)
        yield lock


def context_of(world: World, lock: DocumentLock[Document], process: Process) -> Context:
    """What the steps of a lock need, in a process."""
    made: Any = SimCourier(world, process)
    return Context(lock._source, lock.rules, made)
