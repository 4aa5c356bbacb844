"""The context of every question, with the servers, the thoroughness, and the contenders that can run here."""

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field

from bench.contend import Liar
from bench.contenders import BARE, Contender
from bench.peers import LEASE, Peer
from bench.workers import State, Worker, WorkerError
from bench.world import World


@dataclass
class Bench:
    """The context of a question.

    - quick: whether to run a small part of everything as a test. The figures are then worth nothing.
    """

    world: World
    quick: bool = False
    notes: list[str] = field(default_factory=list)

    def some(self, quick: int, thorough: int) -> int:
        return quick if self.quick else thorough

    def ready(self, contenders: Iterable[Contender]) -> dict[str, Contender]:
        """Return the contenders that can run here, by name. Write a note about each of the others."""
        found: dict[str, Contender] = {}
        for contender in contenders:
            if reason := contender.make.missing() or self.world.missing(contender.needs):
                self.note(f"{contender.name}: left out: {reason}")
            else:
                found[contender.name] = contender
        return found

    def open(self, crew: Iterable[Worker], contender: Contender, lease: float = LEASE) -> None:
        """Let each of the workers connect."""
        crew = list(crew)
        for worker in crew:
            worker.begin(open_peer, contender.make, self.world.uri(contender.needs), lease)
        for worker in crew:
            worker.result()

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def failed(self, name: str, error: Exception) -> None:
        """Note the name of a contender that failed and is left out, for `interleaved`."""
        known = isinstance(error, (WorkerError, Liar))
        self.note(f"{name}: left out: {error if known else f'{type(error).__name__}: {error}'}")


def is_lock(contender: Contender) -> bool:
    return contender.make is not BARE.make


def open_peer(state: State, make: type[Peer], uri: str, lease: float) -> None:
    """Connect. From now on, this process is that peer."""
    state["peer"] = make(uri, lease)


def fresh_key(name: str = "key") -> str:
    """Return a key that nobody has used."""
    return f"{name}-{uuid.uuid4().hex}"
