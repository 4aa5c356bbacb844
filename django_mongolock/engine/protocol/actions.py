"""The actions that protocols yield, their outcomes, and two ways to run a protocol. `run` blocks, and `arun` awaits."""

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
    """Send a step. The outcome is an `Answer`."""

    key: str
    step: Step


@dataclass(frozen=True, slots=True)
class ReleaseUncontended:
    """Remove grants, one of each key, without waiting for the disk. A grant is only removed if it is the only holder of
    its key, and nobody waits. The outcome is the set of keys where nothing was removed.

    - after: whether this comes after a wait that is over, and has a moment.
    """

    keys: tuple[str, ...]
    grants: tuple[str, ...]
    after: bool = False

    @property
    def key(self) -> str | None:
        """The key, if there is only one."""
        return self.keys[0] if len(self.keys) == 1 else None


@dataclass(frozen=True, slots=True)
class Read:
    """Read how a grant stands, and the other grant of *owner*, as the majority has them. The outcome is an `Answer`."""

    key: str
    grant: str
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class QueueNext:
    """Queue the next waiter of this process for the same key behind *grant*. The grant is about to leave the queue.

    A later waiter of another process then cannot overtake an earlier one of this process. There is no outcome.
    """

    key: str
    grant: str


@dataclass(frozen=True, slots=True)
class FindDeadlock:
    """Look for a cycle of waits with this waiter. The outcome is a `deadlock.Cycle` or None."""

    key: str
    grant: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait for news of a grant. The outcome is a `WaitResult`.

    - timer: longest wait in seconds.
    - in_queue: whether the grant stands in the queue of the document. News of it may come from another process.
    """

    grant: str
    timer: float
    in_queue: bool = False


Command = Apply | ReleaseUncontended | Read | QueueNext | FindDeadlock
Action = Command | Pause
T = TypeVar("T")
A = TypeVar("A")
P = ParamSpec("P")
S = TypeVar("S", bound="Performer")
#: A generator that decides what to do next. The generator yields actions, receives outcomes, and never waits itself.
Protocol = Generator[Action, Any, T]


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply, with the moments when the command was sent and answered, in seconds of the local clock.

    - whole: whether this very command gave the grant a whole lease, or a whole place in the queue. Only then may the
      session rely on that time, counted from *sent*.
    - former: fate of the process that has the other grant of this owner (None if there is no other grant).
    """

    reply: Reply
    sent: float
    now: float
    whole: bool = False
    former: Fate | None = None


#: The place of a waiter among those of this process for the same key. "behind" stands behind another waiter. "next"
#: gets the lock when the holder in this process releases it. "now" may ask the server.
Turn = Literal["behind", "next", "now"]


@dataclass(frozen=True, slots=True)
class WaitResult:
    """The state of a wait after a pause.

    - now: present time.
    - news: news by a bell that the grant is held.
    - answer: answer to the command that another grant of this process sent for this one.
    - queued_until: end of the entry as a waiter or as a holder, by the local clock, as set by the grant's last command.
    - last_token: last token of the key when that command found the grant waiting.
    - turn: whether the grant may enter the queue of the document.
    - place_gone: whether the entry was not found. The grant has to ask again then.
    - cancelled: whether the wait has to end.
    - holder: text about the holder, as far as the waiters before this one know.
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
    """The lock is held with this token, at least until this time of the local clock.

    - uncontended: whether `ReleaseUncontended` may release the lock. The lock is exclusive then, without a minimum
      hold, and nobody waited for it. False if unknown.
    """

    token: int
    acquired_at: datetime
    until: float
    now: float
    uncontended: bool = False


@dataclass(frozen=True, slots=True)
class Acquisition:
    """One acquisition: its key, its id, its terms, and the other contents of its entry (see `document.entry`).

    - facts: description of the caller, for people.
    - nested: whether the thread or task holds another lock, and may be part of a deadlock.
    - whole: whether the lock begins with a whole lease (see `LockOptions`).
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
        """Take the place of a grant of the same owner whose process is gone.

        Commands of that process may still arrive.
        """
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
        """The seconds that a grant must have left to be used before it is renewed."""
        return FOREVER if self.whole else self.terms.waiter_lease / 4


def run(steps: Generator[A, Any, T], perform: Callable[[A], Any]) -> T:
    """Run *steps* to their end in this thread. *perform* carries out the yielded actions, and waits where they say so.

    Every error on the way is thrown into the steps, which clean up. This includes errors from signal handlers.
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
    """See run(). If the coroutine is cancelled, the steps get CancelledError at the point where they wait."""
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
    """Return two methods made of one that has the steps. The first blocks, and the second is awaited."""
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
