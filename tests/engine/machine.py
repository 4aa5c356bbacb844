"""A state machine over the public face of locks: several processes, threads and tasks do anything, in any order.

Hypothesis chooses what is done; threads and a real server choose how it interleaves, so the same choices do not make
the same run. What was seen is therefore not raised to Hypothesis, which would ask for it again, but kept in the world,
whose machines do nothing more from then on.
"""

from __future__ import annotations

import contextlib
import functools
import time
from asyncio import CancelledError
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from django_mongolock.engine import clock
from django_mongolock.engine.document import UNLIMITED, Terms
from django_mongolock.engine.lock import MongoLock
from django_mongolock.engine.options import Options
from django_mongolock.exceptions import LockBackendFailed, LockLost, LockMisused, LockNotAcquired
from django_mongolock.inspection.operations import Which, clear_stale, find_grants, force_release
from tests.engine.actors import Actor
from tests.engine.watching import NEVER, Grant, Kind, Watched
from tests.engine.world import OneOfMany, World

#: A call that is not back by then goes on by itself, in seconds.
PATIENCE = 0.5
#: Between two actions others come to theirs, in seconds.
PAUSE = 0.01
#: What asking for a lock may come to, at any time.
REFUSALS = (LockNotAcquired, LockBackendFailed, CancelledError)
NUMBERS = st.integers(0, 63)

#: What can be done: how often, and with what. Never with anything that depends on what was before, so that Hypothesis
#: is not confused by chance.
ACTIONS: dict[str, tuple[int, dict[str, st.SearchStrategy[Any]]]] = {
    "acquire": (
        9,
        {
            "who": NUMBERS,
            "where": NUMBERS,
            "mode": st.sampled_from(["exclusive", "exclusive", "shared", "semaphore"]),
            "wait": NUMBERS,
            "lease": NUMBERS,
            "join": st.sampled_from([False, False, False, True]),
            "renew": st.booleans(),
            "reentrant": st.booleans(),
            "min_hold": st.sampled_from([0.0, 0.0, 0.0, 0.3]),
            "longest": st.sampled_from([None, None, None, None, 0.4]),
            "owner": st.sampled_from([None, None, None, "o"]),
        },
    ),
    "release": (9, {"which": NUMBERS, "early": st.booleans(), "elsewhere": st.booleans(), "join": st.booleans()}),
    "extend": (3, {"which": NUMBERS, "times": st.sampled_from([None, 0.3, 1.0, 2.0]), "join": st.booleans()}),
    "sleep": (
        3,
        {
            "which": NUMBERS,
            "to": st.sampled_from(["holder", "server"]),
            "beyond": st.sampled_from([-0.05, -0.01, -0.002, 0.0, 0.002, 0.01, 0.05]),
        },
    ),
    "advance": (3, {"seconds": st.sampled_from([0.01, 0.03, 0.1, 0.2])}),
    "drop": (1, {"which": NUMBERS}),
    "cancel": (1, {"which": NUMBERS}),
    "kill": (1, {"which": NUMBERS, "chance": st.integers(0, 3)}),
    "force": (1, {"which": NUMBERS, "more": st.booleans()}),
    "purge": (1, {"where": NUMBERS}),
    "clear": (1, {}),
    "storm": (
        2,
        {
            "which": NUMBERS,
            "way": st.sampled_from(["late", "answered late", "no answer", "held up"]),
            "seconds": NUMBERS,
            "count": st.integers(1, 3),
        },
    ),
    "cut_off": (2, {"which": NUMBERS, "seconds": st.sampled_from([0.3, 1.0, 2.0])}),
    "hold_up": (3, {"seconds": NUMBERS, "which": NUMBERS, "then": st.booleans()}),
}


def _choose(name: str) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    return st.tuples(st.just(name), st.fixed_dictionaries(ACTIONS[name][1]))


CHOICES = st.sampled_from([name for name, (weight, _) in ACTIONS.items() for _ in range(weight)]).flatmap(_choose)


class Machine(RuleBasedStateMachine):
    """One example. (There is one rule, since Hypothesis would often leave out the rule by which locks are acquired.)"""

    world: ClassVar[World]

    def __init__(self) -> None:
        super().__init__()
        self.world.counts["examples"] += not self.world.over
        number = self.world.counts["examples"]
        self.keys = [f"{number}.{place}" for place in range(len(self.world.plan.permits))]

    @initialize(rare=st.sets(st.sampled_from(sorted({*ACTIONS} - {"acquire", "release"})), max_size=5))
    def choose(self, rare: set[str]) -> None:
        """Do without some actions: others have more effect then."""
        self.rare = rare

    @rule(choice=CHOICES)
    def act(self, choice: tuple[str, dict[str, Any]]) -> None:
        """Do anything."""
        name, arguments = choice
        if not self.world.over and name not in self.rare:
            time.sleep(PAUSE)
            getattr(self, name)(**arguments)

    # What can be done

    def acquire(self, *, who: int, where: int, mode: Any, wait: int, lease: int, join: bool, **how: Any) -> None:
        """Somebody asks."""
        plan, place = self.world.plan, where % len(self.keys)
        holding = {w.owner: w.grant.kind for w in self.world.watch.open() if w.grant.key == self.keys[place]}
        idle = [(process, actor) for process, actor in self.world.actors if not actor.busy]
        # To ask again for what one has is refused, if one may not; that need not be tried often.
        fresh = [(process, actor) for process, actor in idle if how["reentrant"] or actor not in holding]
        if not (idle := fresh or idle):
            return
        process, actor = self._of(idle, who)
        kind = holding.get(actor) or Kind(mode, plan.permits[place] if mode == "semaphore" else 0)
        asking = Asking(self.world, process.session, actor, self.keys[place], kind, **how)
        seconds = self._of(plan.waits, wait)
        lock = asking.lock(self._of(plan.leases, lease), seconds)
        self._count(f"acquire {asking} wait {seconds}")
        actor.do(lock, "acquire", then=functools.partial(asking.over, lock), join=PATIENCE if join else 0)

    def release(self, *, which: int, early: bool, elsewhere: bool, join: bool) -> None:
        """A lock is given back, by whoever holds it or by another thread."""
        if (watched := self._open(which)) is None:
            return
        actor: Actor = watched.owner
        if elsewhere or actor.busy:
            actor = next((other for _, other in self.world.actors if not other.busy), actor)
        if actor.busy:
            return
        lock, grant, watch = watched.lock, watched.grant, self.world.watch
        assert lock is not None
        keeps = 0.0 if early else lock.options.terms.min_hold
        watch.releases(watched)
        self._count(f"release {grant} by {actor}")

        def over(result: Any, error: BaseException | None) -> None:
            # What was given back in the background is given back with force.
            watch.released(watched, keeps=keeps if result and not self.world.plan.weather else 0.0)
            self.world.tell(f"released {grant}: {result} {error!r}")
            if error is not None and not isinstance(error, (LockBackendFailed, CancelledError)):
                self.world.fail(f"release: {error!r}")

        actor.do(lock, "release", early=early, then=over, join=PATIENCE if join else 0)

    def extend(self, which: int, times: float | None, join: bool) -> None:
        """A lease is pushed to its length from now, or to another one."""
        watched = self._open(which)
        if watched is None or watched.owner.busy or watched.lock is None:
            return
        grant, length = watched.grant, watched.lock.options.terms.lease
        lease = None if times is None else length * times
        actor: Actor = watched.owner
        self._count(f"extend {grant} {lease}")
        began = clock.now()

        def over(_: Any, error: BaseException | None) -> None:
            self.world.tell(f"extended {grant}: {error!r}")
            if error is None:
                grant.good = max(grant.good, min(began + (lease or 0.0), grant.last - grant.had + grant.asked))
            elif not isinstance(error, (LockLost, LockBackendFailed, LockMisused, CancelledError)):
                self.world.fail(f"extend: {error!r}")

        actor.do(watched.lock, "extend", lease, then=over, join=PATIENCE if join else 0)

    def drop(self, which: int) -> None:
        """A lock object is forgotten."""
        if (watched := self._open(which)) is not None:
            self._count(f"drop {watched.grant}")
            self.world.watch.drop(watched)

    def kill(self, which: int, chance: int) -> None:
        """A process ends without a word; now and then only, for a new one takes its time."""
        if chance == 0:
            process = self._of(self.world.processes, which)
            self._count(f"kill {process.session.id}")
            self.world.kill(process)

    def cancel(self, which: int) -> None:
        """Somebody who waits is told to stop."""
        busy = [actor for _, actor in self.world.actors if actor.busy]
        if busy:
            self._count(f"cancel {(actor := self._of(busy, which))}")
            actor.cancel()

    def force(self, which: int, more: bool) -> None:
        """A lock is taken from its holders, or from one of them."""
        watched = self._open(which)
        if watched is None:
            return
        grants = (
            {w.grant for w in self.world.watch.watched if w.grant.key == watched.grant.key} if more else {watched.grant}
        )
        for grant in grants:
            self.world.watch.cut(grant)
        self._count(f"force {[grant.token for grant in grants]} of {watched.grant.key}")
        key = watched.grant.key
        with contextlib.suppress(LockBackendFailed):
            found = find_grants(self.world.outside, {key: [grant.token for grant in grants]}).get(key, [])
            force_release(self.world.outside, key, found)

    def purge(self, where: int) -> None:
        """The document of a key that nobody uses is removed, as it is when nobody has used it for a week."""
        self._count("purge")
        free = {"_id": self._of(self.keys, where), "holders": [], "waiters": [], "tombstones": []}
        if self.world.documents.delete_one(free).deleted_count:
            self.world.counts["purged"] += 1

    def clear(self) -> None:
        """Somebody clears what is stale."""
        self._count("clear")
        with contextlib.suppress(LockBackendFailed):
            clear_stale(self.world.outside, self.keys, Which())

    def advance(self, seconds: float) -> None:
        """Time goes by."""
        self._count(f"advance {seconds}")
        time.sleep(seconds)

    def sleep(self, which: int, to: str, beyond: float) -> None:
        """Until a lease ends that nobody renews: for its holder, or for the server."""
        locks = [w.lock for w in self.world.watch.open() if w.lock is not None and not w.lock.options.auto_renew]
        ends = sorted(lock.remaining for lock in locks)[:3]
        if ends:
            left = self._of(ends, which) + (self.world.plan.margin if to == "server" else 0)
            self._count(f"sleep {left + beyond:.3f}")
            time.sleep(max(0.0, min(left + beyond, 1.2)))

    def storm(self, which: int, way: str, seconds: int, count: int) -> None:
        """The next commands of a process are late or get lost."""
        if self.world.plan.weather:
            process, delay = self._of(self.world.processes, which), self._of(self.world.plan.delays, seconds)
            self._count(f"storm {process.session.id} {way} {delay} {count}")
            process.store.weather.turns(way, delay, count)

    def cut_off(self, which: int, seconds: float) -> None:
        """Nothing of a process gets through for a while."""
        if self.world.plan.weather:
            process = self._of(self.world.processes, which)
            self._count(f"cut_off {process.session.id} {seconds}")
            process.store.weather.cut_off(seconds)

    def hold_up(self, seconds: int, which: int, then: bool) -> None:
        """The server holds up updates that it has read already. A process may be cut off when that is over."""
        if self.world.plan.held_up:
            delay, process = self._of(self.world.plan.delays, seconds), self._of(self.world.processes, which)
            then = then and self.world.plan.weather
            self._count(f"hold_up {delay}{f' then cut off {process.session.id}' if then else ''}")
            self.world.hold_up(delay, process.store.weather if then else None)

    # What must be true

    @invariant()
    def nothing_is_wrong(self) -> None:
        """No two are held that exclude each other, tokens grow, and what is not held is not held again."""
        self.world.watch.look_at_all()
        self.world.check()

    def teardown(self) -> None:
        """Come to an end, and look once more."""
        world = self.world
        world.calm()
        if world.plan.leaks and not world.over and world.counts["examples"] % world.plan.leaks == 0:
            world.are_free(self.keys)
        self.nothing_is_wrong()
        world.forget()

    def _of(self, items: Any, number: int) -> Any:
        return items[number % len(items)]

    def _open(self, number: int) -> Watched | None:
        opened = self.world.watch.open()
        return opened[number % len(opened)] if opened else None

    def _count(self, what: str) -> None:
        self.world.counts["steps"] += 1
        self.world.counts[what.split(maxsplit=1)[0]] += 1
        self.world.tell(what)


@dataclass
class Asking:
    """One who asks for a lock, and what he says afterwards."""

    world: World
    session: OneOfMany
    actor: Actor
    key: str
    kind: Kind
    renew: bool
    reentrant: bool
    min_hold: float
    longest: float | None
    owner: str | None
    asked: float = field(default_factory=clock.now)

    def __str__(self) -> str:
        extras = [name for name in ("renew", "reentrant", "min_hold", "longest", "owner") if getattr(self, name)]
        return f"{self.who}: {self.kind} {self.key!r} {' '.join(extras)}"

    @property
    def who(self) -> str:
        return f"{self.session.id} {self.actor}{f' for {self.owner}' if self.owner else ''}"

    def lock(self, lease: float, wait: float) -> MongoLock:
        """What it asks with."""
        capacity = {"exclusive": 1, "shared": UNLIMITED}.get(self.kind.mode, self.kind.permits)
        terms = Terms(
            self.kind.mode,
            capacity,
            lease=lease,
            margin=self.world.plan.margin,
            waiter_lease=min(lease, self.world.plan.waiter_lease),
            min_hold=self.min_hold,
            owner=self.owner,
        )
        options = Options(terms, wait, self.reentrant, self.renew, self.longest)
        return MongoLock(lambda: self.session, (self.key,), options)

    def over(self, lock: MongoLock, _: Any, error: BaseException | None) -> None:
        """It has it, or not."""
        had = clock.now()
        if error is not None:
            self._refused(error)
            return
        try:
            token = lock.fencing_token
        except LockMisused:
            self.world.fail(f"acquired, and without a token: {self}")
            return
        options = lock.options
        grant = Grant(self.key, token, self.kind, self.who, self.asked, had)
        if self.longest is not None:
            grant.last = had + self.longest
        if options.wait == 0:  # who has waited may have been given what his place in the queue had left
            grant.good = min(self.asked + options.terms.lease, self.asked + (self.longest or NEVER))
        self.world.counts["grants"] += 1
        self.world.counts["grants after a wait"] += had - self.asked > 0.05
        self.world.tell(f"acquired in {had - self.asked:.3f} s {grant}")
        if self.owner and self.session.dies:
            grant.cut = -NEVER
        self.world.watch.got(lock, grant, self.actor, shares=self.reentrant)
        if self.owner and self.session.dies:
            self.world.watch.cut(grant)

    def _refused(self, error: BaseException) -> None:
        name = type(error).__name__
        self.world.counts[name] += 1
        self.world.tell(f"refused {self}: {error!r}")
        if not isinstance(error, REFUSALS) and not (self.session.dies and isinstance(error, LockMisused)):
            self.world.fail(f"acquire: {error!r}")
