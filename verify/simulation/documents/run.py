"""What the flows do, and the run of a seed."""

from contextlib import suppress
from functools import partial
from typing import Any

from django_mongolock.documents import steps
from django_mongolock.documents.document_lock import DocumentLock
from django_mongolock.documents.held_document import HeldDocument
from django_mongolock.documents.hold import Batch, Hold, Plan, acquire_many
from django_mongolock.documents.rules import read_snapshot
from django_mongolock.documents.steps import Context
from django_mongolock.documents.updates import Request, read_one
from django_mongolock.exceptions import DocumentLockLost, LockError
from django_mongolock.inspection.kinds import Choice
from django_mongolock.other_collections.courier import Sleep, Steps

from ..expressions import Document
from .world import Process, Strand, World, context_of, patched

#: How long documents may stay pending after their flow is over: all tries in the background, some unanswered.
BOUND = 45.0
OWNERS = ("hourly", "nightly")


class Flow:
    """One flow of a process: it takes documents, works on them, and ends the work in one way or the other."""

    def __init__(self, world: World, lock: DocumentLock[Document], process: Process, number: int) -> None:
        self.world, self.lock, self.number = world, lock, number
        self.context = context_of(world, lock, process)
        self.strand: Strand = world.start(process, self.work())

    def work(self) -> Steps[None]:
        """What it does, once."""
        yield Sleep(self.world.random.uniform(0.01, 3.0))
        with suppress(LockError):
            yield from self.world.random.choice((self.single, self.single, self.single, self.many))()

    def plan(self) -> Plan:
        """What it asks for; which version it has read is noted."""
        asked = self.strand.asked

        class Noted(Plan):
            def request(self, document: Any) -> Request:
                request = super().request(document)
                asked[request.id] = request.version
                return request

        owner = self.world.random.choice((*OWNERS, None))
        source = self.lock._source
        return Noted(source, self.lock.rules, "exporting", owner, "exported", {}, "")

    def single(self) -> Steps[None]:
        dice, plan = self.world.random, self.plan()
        document = yield read_one(self.lock.rules.fields, dice.choice(list(self.world.documents)))
        hold: Hold[Document] = Hold(lambda: self.context, plan, plan.request(document), dice.choice((0.0, 3.0, 10.0)))
        held: HeldDocument[Any] = yield from hold._acquire()
        self.strand.held.append(held)
        yield from self.in_block(held, self.on_one(held))

    def on_one(self, held: HeldDocument[Any]) -> Steps[None]:
        dice = self.world.random
        for _ in range(dice.choice((0, 1, 2, 12))):
            yield Sleep(dice.uniform(0.1, dice.choice((1.0, 25.0))))
            if dice.random() < 0.4:
                yield from held._renew()
            elif dice.random() < 0.5:
                yield from held._update({"price": dice.randint(1, 99)})
        if (how := dice.random()) < 0.2:
            raise KeyError("the work failed")
        if how < 0.5:
            yield from self.finish(held)

    def finish(self, held: HeldDocument[Any]) -> Steps[None]:
        """Finish it; what is said of the outcome is true."""
        self.strand.final.discard(held.id)
        self.strand.held.remove(held)  # its work is over, whatever comes of this
        try:
            yield from held._finish("exported", {"price": 100})
        except DocumentLockLost as error:
            if not error.maybe_written:
                self.world.at(0, lambda: self.check_unwritten(held))
            raise
        if held.id not in self.strand.final:
            self.world.violations.append(f"{self.world.now:.2f} {held.id} was not finished, as was said")

    def check_unwritten(self, held: HeldDocument[Any]) -> None:
        if held.id in self.strand.final:
            self.world.violations.append(f"{self.world.now:.2f} {held.id} was finished, which was denied")

    def many(self) -> Steps[None]:
        batch: Batch[Any] = yield from acquire_many(self.context, self.plan(), list(self.world.documents.values()))
        self.strand.held += batch.held
        yield from self.in_block(batch, self.on_many(batch))

    def on_many(self, batch: Batch[Any]) -> Steps[None]:
        for held in batch:
            yield from self.on_one(held)

    def in_block(self, block: HeldDocument[Any] | Batch[Any], body: Steps[None]) -> Steps[None]:
        """What `with` does."""
        try:
            yield from body
        except GeneratorExit:  # the run is over
            raise
        except BaseException as error:
            self.strand.held.clear()
            yield from block._leave(error)
            if isinstance(error, KeyError):
                return
            raise
        self.strand.held.clear()
        yield from block._leave(None)


def sweeping(context: Context) -> Steps[None]:
    """`clear_stale_locks`, every ten seconds."""
    while True:
        yield Sleep(10.0)
        with suppress(LockError):
            yield from steps.sweep(context, Choice("stale"))


def forcing_one(world: World, context: Context) -> Steps[None]:
    """A person takes a document from its holder."""
    document = yield read_one(context.rules.fields, world.random.choice(list(world.documents)))
    shown = read_snapshot(context.rules, {**document, "mongolock_now": world.server_time()})
    with suppress(LockError):
        yield from steps.force(context, "exports", [shown], "me", "")


def strangers(world: World) -> None:
    """Code without the lock changes a document, and raises its version."""
    document = world.random.choice(list(world.documents.values()))
    document["documentVersion"] += 1


def trouble(world: World, lock: DocumentLock[Document], janitor: Process) -> None:
    """One thing that goes wrong, beside what the network does."""
    dice, happens = world.random, world.random.random()
    victim = dice.choice([each for each in world.processes if each.alive])
    if happens < 0.15:
        world.at(dice.uniform(0, 5), lambda: world.kill(victim))
    elif happens < 0.3:
        victim.stopped_until = world.now + dice.uniform(1, 80)
    elif happens < 0.4:
        world.clock_ahead -= dice.uniform(0, 5)
    elif happens < 0.5:
        world.at(dice.uniform(0, 5), lambda: strangers(world))
    elif happens < 0.55:
        world.start(janitor, forcing_one(world, context_of(world, lock, janitor)), "force")


def simulate(seed: int, minutes: int = 4) -> World:
    """Run a seed: some minutes of troubles, then calm until everything must be in order; return what came of it."""
    world = World(seed)
    dice = world.random
    with patched(world) as lock:
        janitor = Process("janitor")
        world.start(janitor, sweeping(context_of(world, lock, janitor)), "sweep")
        flows: list[Flow] = []
        for _ in range(minutes * 12):
            world.trouble = dice.choice((0.0, 0.05, 0.2))
            while len(living := [each for each in world.processes if each.alive]) < 4:
                world.processes.append(Process(f"p{len(world.processes)}"))
            flows += [Flow(world, lock, process, len(flows)) for process in living]
            trouble(world, lock, janitor)
            for flow in dice.sample(flows, min(2, len(flows))):
                world.at(dice.uniform(0, 5), partial(world.cancel, flow.strand))
            world.run(5.0)
            world.violations += world.left(BOUND)
        world.trouble = 0.0
        world.run(world.stale_after + 3 * BOUND)
        world.violations += world.left(0.0)
        world.close()
    return world
