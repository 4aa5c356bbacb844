"""The search through the model of the protocol (`tests/faults/model.py`): what must hold, and where it does not.

`python -m tests.faults.search` searches every world that the tests search, `--larger` those that take minutes; the name
of a bug (`"no tombstone"`) shows the shortest way to the harm that it does.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from tests.faults.model import BUGS, NAMES, TERM, Document, State, Violation, World

#: What is searched to the end.
WORLDS: Final = {
    "a client that asks twice, and another": World(asks=(2, 1)),
    "two clients whose clocks are slow": World(slow_clocks=True),
    "two clients and a failover": World(failovers=1),
    "two clients and a purge": World(purges=1),
    "a client that asks twice, and the lock is taken away": World(asks=(2,), thefts=1),
    "three clients who neither renew nor give up": World(asks=(1, 1, 1), calm=True),
}
#: The same for those who have some minutes and a few GB. The tests do not.
LARGER: Final = {
    "a client that asks twice, another, and a failover": World(asks=(2, 1), failovers=1),
    "two clients whose clocks are slow, and a failover": World(failovers=1, slow_clocks=True),
    "three clients, of whom one asks twice, who neither renew nor give up": World(asks=(1, 2, 1), calm=True),
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
                yield f"P1, P3: {name} believes that it holds the lock, and the majority does not have it so"
    for document in (state.document, state.majority):
        yield from _wrong_with(document, state, world)


def _wrong_with(document: Document, state: State, world: World) -> Iterator[str]:
    if document.waiters and not document.holders:
        yield "P5: the key is free, and the queue stands still"
    if document.clock == state.election and _longest(document) > TERM:
        yield "P6: an entry ends later than a lease from now"
    for number, client in enumerate(state.clients):
        name, there = NAMES[number], NAMES[number] in document.names()
        if client.phase == "waiting" and client.left and not there and not world.thefts:
            yield f"P5: {name} waits, and is forgotten"
        # A release may be undone by a failover: then the lock lives until its lease ends.
        if there and (client.phase == "settled" or (client.phase in ("released", "lost") and not world.failovers)):
            yield f"P6: {name} was {client.phase}, and is there again: an orphan"


def _longest(document: Document) -> int:
    return max([0, *(holder.left for holder in document.holders), *(waiter.left for waiter in document.waiters)])


def _holds(state: State, name: str) -> bool:
    foreign = state.majority.clock != state.election
    return any(holder.name == name and (foreign or holder.left > 0) for holder in state.majority.holders)


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
