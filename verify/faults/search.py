"""The search through the model of the protocol (`verify/faults/model.py`): what must hold, and where it does not.

`python -m verify.faults.search` searches every world that the tests search, `--larger` those that take minutes; the
name of a bug (`"no tombstone"`) shows the shortest way to the harm that it does.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from verify.faults.model import BUGS, NAMES, State, Violation, World
from verify.faults.model_document import Document
from verify.faults.model_lines import Lines

#: What is searched to the end.
WORLDS: Final = {
    "a client that asks twice, and another": World(asks=(2, 1)),
    "two clients whose clocks are slow": World(slow_clocks=True),
    "two clients and a failover": World(failovers=1),
    "two clients and a purge": World(purges=1),
    "a client that asks twice, and the lock is taken away": World(asks=(2,), thefts=1),
    "a client that asks twice, and may try a last time": World(asks=(2,), tries=True),
    "three clients who neither renew nor give up": World(asks=(1, 1, 1), calm=True),
    "two clients who do not give up, and a command that is held up": World(hold_ups=1, steady=True),
    "two calm clients, a command that is held up, and a clock that is set back": World(
        hold_ups=1, set_backs=1, calm=True
    ),
    "two calm clients who look, a lease of 3, a place of 1, and a clock that is set back": World(
        lease=3, reads=True, set_backs=1, calm=True
    ),
    "two clients who look and do not give up, a lease of 3 and a place of 1": World(lease=3, reads=True, steady=True),
    "two clients and a minimum hold": World(min_hold=2),
    "two clients who make their leases longer and do not give up": World(more=2, steady=True),
    "two threads of one process, and one of another": Lines(asks=(1, 1, 1), lease=2, waiter_lease=2, calm=True),
}
#: The same for those who have some minutes and a few GB. The tests do not, unless they are asked to.
LARGER: Final = {
    "a client that asks twice, another, and a failover": World(asks=(2, 1), failovers=1),
    "two clients whose clocks are slow, and a failover": World(failovers=1, slow_clocks=True),
    "two clients whose clocks are slow, who do not give up, a lease of 3 and a place of 1": World(
        lease=3, slow_clocks=True, steady=True
    ),
    "three clients, of whom one asks twice, who neither renew nor give up": World(asks=(1, 2, 1), calm=True),
    "two calm clients who may try a last time": World(tries=True, calm=True),
    "two clients and a command that is held up": World(hold_ups=1),
    "two clients who do not give up, a lease of 2, a place of 1, and a command that is held up": World(
        lease=2, hold_ups=1, steady=True
    ),
    "two clients who do not give up, and two commands that are held up": World(hold_ups=2, steady=True),
    "two clients who do not give up, a command that is held up, and a clock that is set back": World(
        hold_ups=1, set_backs=1, steady=True
    ),
    "two calm clients, two commands that are held up, and a clock that is set back": World(
        hold_ups=2, set_backs=1, calm=True
    ),
    "two calm clients, a command that is held up, and a failover": World(hold_ups=1, failovers=1, calm=True),
    "two threads of one process, and two of another": Lines(
        asks=(1, 1, 1, 1), processes=(0, 0, 1, 1), lease=2, waiter_lease=2, calm=True
    ),
}
#: Where each bug is looked for.
HAUNTS: Final = {
    "no margin": World(slow_clocks=True),
    "no clock stamp": World(failovers=1),
    "w:1 grants": World(failovers=1),
    "local read": World(failovers=1),
    "old news": World(asks=(1, 2, 1), calm=True),
    "counter token": World(purges=1),
    "taken and forgotten": World(asks=(2,), thefts=1),
    "an old time cuts": World(hold_ups=1, steady=True),
    "late is not noticed": World(hold_ups=1, steady=True),
    "set back is not noticed": World(hold_ups=1, set_backs=1, calm=True),
    "equal cluster times: an earlier time cuts": World(hold_ups=1, steady=True),
    "equal cluster times: a later time prunes": World(hold_ups=1, set_backs=1, calm=True),
    "a read lengthens": World(lease=3, reads=True, set_backs=1, calm=True),
    "a place counts as a lease": World(lease=3, reads=True, steady=True),
    "an extension counts at once": World(more=2, steady=True),
    "arrivals are forgotten": Lines(asks=(1, 1, 1), lease=2, waiter_lease=2, calm=True),
    "a renewal revives what was released": World(min_hold=2),
}


def wrong(state: State, world: World) -> str | None:
    """Which promise is broken in this state, if any."""
    return next(_all_wrong(state, world), None)


def _all_wrong(state: State, world: World) -> Iterator[str]:
    believers = [NAMES[number] for number, client in enumerate(state.clients) if client.believes]
    if not world.thefts:  # who takes a lock away by force takes that on himself
        if len(believers) > 1:
            yield f"P1: {' and '.join(believers)} both believe that they hold the lock"
        for name in believers:
            if not _holds(state, name):
                yield f"P1, P3: {name} believes that it holds the lock, but has no valid grant in the majority"
    for document in (state.document, state.majority):
        yield from _wrong_with(document, state, world)


def _wrong_with(document: Document, state: State, world: World) -> Iterator[str]:
    if document.waiters and not document.holders:
        yield "P5: the key is free, and the queue stands still"
    kept = document.released
    if kept is not None and kept.left > state.kept:
        yield f"F64: {kept.name}'s minimum hold is longer than it was to be"
    if state.kept and kept is None:
        yield "a minimum hold is shorter than it was to be"
    for number, client in enumerate(state.clients):
        name = NAMES[number]
        there = name in document.names() and not (kept is not None and kept.name == name)
        if client.phase == "waiting" and client.left and not there and not world.thefts:
            yield f"P5: {name} waits, and is forgotten"
        # A release may be undone by a failover: then the lock lives until its lease ends.
        if there and (client.phase == "removed" or (client.phase in ("released", "lost") and not world.failovers)):
            yield f"P6: {name} was {client.phase}, and is there again: a grant without a holder"


def _holds(state: State, name: str) -> bool:
    other_primary = state.majority.clock != state.election
    holders = [holder for holder in state.majority.holders if holder.name == name and not holder.released]
    return any(other_primary or holder.left > 0 for holder in holders)


@dataclass(frozen=True)
class Found:
    """What a search found: how many states, and the shortest way to a broken promise, if there is one."""

    states: int
    violation: str = ""
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.violation:
            return f"{self.states} states, and no promise is broken"
        steps = [f"{number:3}. {step}" for number, step in enumerate(self.trace, 1)]
        return "\n".join([*steps, f"     {self.violation}"])


def search(world: World) -> Found:
    """Go through every state that can be reached, nearest first, until a promise is broken or there is none left."""
    first = world.first()
    came_from: dict[State, tuple[State, str] | None] = {first: None}
    queue = deque([first])
    while queue:
        state = queue.popleft()
        try:
            for label, after in world.moves(state):
                if after not in came_from:
                    came_from[after] = state, label
                    queue.append(after)
                    if broken := wrong(after, world):
                        return Found(len(came_from), broken, _trace(came_from, after))
        except Violation as violation:
            return Found(len(came_from), str(violation), _trace(came_from, state))
    return Found(len(came_from))


def _trace(came_from: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    steps: list[str] = []
    while (before := came_from[state]) is not None:
        state, label = before
        steps.append(label)
    return tuple(reversed(steps))


def hunt(bug: str) -> Found:
    """Look for what a bug does."""
    if bug not in BUGS:
        raise SystemExit(f"no such bug: choose from {', '.join(map(repr, BUGS))}")
    return search(replace(HAUNTS.get(bug, World()), bug=bug))


def main(arguments: list[str]) -> None:
    """Search the worlds, or look for bugs by their names."""
    bugs = [argument for argument in arguments if argument != "--larger"]
    for bug in bugs:
        sys.stdout.write(f"{bug}: {BUGS.get(bug)}\n{hunt(bug)}\n")
    if not bugs:
        for name, world in (LARGER if arguments else WORLDS).items():
            sys.stdout.write(f"{name}: {search(world)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
