"""Protocols: what they yield, what they are sent back, and the two ways to run them: `run` blocks, `arun` awaits."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Concatenate, Final, Literal, ParamSpec, TypeVar
from typing import Protocol as Interface

from ..rule.document import Step, Terms, entry
from ..rule.replies import News, Reply
from .processes import Fate

FOREVER: Final = float("inf")


@dataclass(frozen=True, slots=True)
class Apply:
    """Send a step. Outcome: an `Answer`."""

    key: str
    step: Step


@dataclass(frozen=True, slots=True)
class ReleaseUncontended:
    """Remove grants, one of each key, where that is the only one and has no waiter, without waiting for the disk.
    Outcome: the keys where it did not. after: it comes after a wait that is over, and has a moment."""

    keys: tuple[str, ...]
    grants: tuple[str, ...]
    after: bool = False

    @property
    def key(self) -> str | None:
        """The key, if there is only one."""
        return self.keys[0] if len(self.keys) == 1 else None


@dataclass(frozen=True, slots=True)
class Read:
    """Read how a grant stands, and which other grant *owner* has, as the majority has it. Outcome: an `Answer`."""

    key: str
    grant: str
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class QueueNext:
    """Queue the next waiter of this process for the same key behind *grant*, which is about to leave the queue.

    So a later waiter of another process does not overtake an earlier one of this process. No outcome.
    """

    key: str
    grant: str


@dataclass(frozen=True, slots=True)
class FindDeadlock:
    """Look for a cycle of waits with this waiter. Outcome: a `deadlock.Cycle`, or None."""

    key: str
    grant: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait for news of a grant. Outcome: `WaitResult`.

    timer: seconds to wait at most. poll: the same, while nobody listens.
    """

    grant: str
    timer: float
    poll: float = FOREVER


Command = Apply | ReleaseUncontended | Read | QueueNext | FindDeadlock
Action = Command | Pause
T = TypeVar("T")
A = TypeVar("A")
P = ParamSpec("P")
S = TypeVar("S", bound="Performer")
#: Decides what to do next: it yields actions, is sent their outcomes, and never waits itself.
Protocol = Generator[Action, Any, T]


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply, and when the command was sent and answered, in seconds of the local clock.

    whole: whether this very command gave the grant a whole lease, or a whole place in the queue. Only then may the
    session rely on it, and only for that long from when it was *sent*. former: what is known of the process that has
    the other grant of this owner; None if there is none.
    """

    reply: Reply
    sent: float
    now: float
    whole: bool = False
    former: Fate | None = None


#: Where a waiter stands among those of this process that want the same key: behind another waiter; next, when the
#: holder in this process releases it; or it is its turn now to ask the server.
Turn = Literal["behind", "next", "now"]


@dataclass(frozen=True, slots=True)
class WaitResult:
    """What is known after a pause.

    now: the time. news: a bell said that the grant is held. answer: to the command that another grant of this process
    sent for this one. queued_until: until when its entry lives, as a waiter or as a holder, by the local clock: as its
    own last command has given. last_token: the key's when that command found it waiting. turn: whether it may enter the
    document's queue. place_gone: its entry was not found, so it has to ask again. cancelled: the wait is to end.
    holder: who has the lock, in words, as far as the waiters before it know.
    """

    now: float
    news: News | None = None
    answer: Answer | None = None
    queued_until: float = 0.0
    last_token: int = 0
    turn: Turn = "now"
    cancelled: bool = False
    place_gone: bool = False
    holder: str | None = None


@dataclass(frozen=True, slots=True)
class Granted:
    """The lock is held with this token, at least until this time of the local clock. uncontended: it is exclusive,
    without a minimum hold, and nobody waited for it then, so that `ReleaseUncontended` may release it. False where that
    is not known."""

    token: int
    acquired_at: datetime
    until: float
    now: float
    uncontended: bool = False


@dataclass(frozen=True, slots=True)
class Acquisition:
    """One acquisition: its key, its id, its terms, and what its entry says besides (see `document.entry`).

    facts: who asks, for people. nested: its thread or task holds another lock, so that it may be part of a deadlock.
    whole: it begins with a whole lease (see `LockOptions`).
    """

    key: str
    grant: str
    terms: Terms
    session: str = ""
    worker: str = ""
    process: str = ""
    facts: Mapping[str, str | int] = field(default_factory=dict)
    whole: bool = False
    nested: bool = False

    @property
    def entry(self) -> dict[str, Any]:
        return entry(self.grant, self.session, self.terms, self.facts, self.worker, process=self.process)

    def enter(self, trial: bool) -> Apply:
        return Apply(self.key, Step(ask=self.grant, add=self.entry, trial=trial))

    def resume(self, former: str, trial: bool, tombstone_ttl: int) -> Apply:
        """Take the place of a grant of the same owner whose process is gone. What that has sent may still arrive."""
        others: dict[str, Any] = {"remove": (former,), "force": True, "tombstone_ttl": tombstone_ttl, "resumes": True}
        return Apply(self.key, Step(ask=self.grant, add=self.entry, trial=trial, **others))

    def confirm(self) -> Apply:
        return Apply(self.key, Step(ask=self.grant, renew=(self.grant,)))

    def give_up(self) -> Apply:
        return Apply(self.key, Step(ask=self.grant, remove=(self.grant,), force=True))

    def read(self) -> Read:
        return Read(self.key, self.grant, self.terms.owner)

    @property
    def enough(self) -> float:
        """How many seconds a grant must have left to be used before it is renewed."""
        return FOREVER if self.whole else self.terms.waiter_lease / 4


def run(steps: Generator[A, Any, T], perform: Callable[[A], Any]) -> T:
    """Run *steps* to their end in this thread; *perform* carries out what they yield, and waits where they say so.

    Whatever is raised on the way, also by a signal handler, is thrown into the steps, which clean up.
    """
    try:
        action = next(steps)
        while True:
            try:
                outcome = perform(action)
            except BaseException as error:  # noqa: BLE001 - all of it goes to the steps
                action = steps.throw(error)
            else:
                action = steps.send(outcome)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()


async def arun(steps: Generator[A, Any, T], perform: Callable[[A], Awaitable[Any]]) -> T:
    """See run(). A cancelled coroutine is thrown CancelledError at the point where it waits, and passes it on."""
    try:
        action = next(steps)
        while True:
            try:
                outcome = await perform(action)
            except BaseException as error:  # noqa: BLE001 - all of it goes to the steps
                action = steps.throw(error)
            else:
                action = steps.send(outcome)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()


class Performer(Interface):
    """An object that runs the steps of its own methods."""

    def _run(self, steps: Generator[Any, Any, T], /) -> T: ...
    def _arun(self, steps: Generator[Any, Any, T], /) -> Coroutine[Any, Any, T]: ...


def twins(
    steps: Callable[Concatenate[S, P], Generator[Any, Any, T]],
) -> tuple[Callable[Concatenate[S, P], T], Callable[Concatenate[S, P], Coroutine[Any, Any, T]]]:
    """Make two methods of one that has the steps: one that blocks, and one that is awaited."""
    name, plain = steps.__name__.removeprefix("_"), inspect.signature(steps)
    returned = plain.return_annotation.partition("[")[2].removesuffix("]")

    def blocking(self: S, /, *arguments: P.args, **options: P.kwargs) -> T:
        return self._run(steps(self, *arguments, **options))

    async def awaited(self: S, /, *arguments: P.args, **options: P.kwargs) -> T:
        return await self._arun(steps(self, *arguments, **options))

    for made, title, doc in ((blocking, name, steps.__doc__), (awaited, f"a{name}", f"See {name}().")):
        functools.update_wrapper(made, steps)
        made.__name__, made.__doc__ = title, doc
        made.__qualname__ = steps.__qualname__.replace(steps.__name__, title)
        setattr(made, "__signature__", plain.replace(return_annotation=returned))  # noqa: B010 - unknown to checkers
    return blocking, awaited
