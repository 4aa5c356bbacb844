"""Locks that no process keeps alive: an owner has them over several requests, whichever process serves each of them.

`Claim` is for any key. The edit lock of a browser tab (`editing`) is made of the same parts.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, Self, TypeVar

from django.http import HttpRequest

from .backends.base import get_backend
from .conf import get_settings
from .context import CLAIMED, holder_facts
from .engine import clock
from .engine.lock import detached
from .engine.protocol.actions import Answer, Apply, Protocol, Read
from .engine.protocol.processes import CLAIM
from .engine.rule.document import Terms, entry, milliseconds
from .engine.rule.options import check_seconds
from .engine.rule.replies import Reply
from .engine.rule.step import Step
from .engine.session.session import Session
from .engine.text_checks import check_fact, check_key, tidy_fact
from .exceptions import LockBackendFailed, LockLost, LockMisused, LockNotAcquired
from .keys import as_key
from .locks import Key
from .owners import asession_is_gone, asession_owner, keep_session, session_is_gone, session_of, session_owner

__all__ = ["Claim", "claim"]

#: How often a claim asks again, if the one that this owner had ended while it asked.
ROUNDS: Final = 3
#: The shortest lease of a claim of a session that is about to end, in seconds.
SHORTEST: Final = 1.0

T = TypeVar("T")
#: A text, or a request, for its session.
Owner = str | HttpRequest


@dataclass(frozen=True, slots=True)
class Belief:
    """The time for which this process knows that the lock is held, by the local clock; true until then.

    It is one lease, counted from before a command was sent that is known to have taken or renewed the lock. What is
    only read does not make it longer.
    """

    until: float = 0.0
    now: Callable[[], float] = clock.now
    pid: int = 0

    def __bool__(self) -> bool:
        return self.pid == os.getpid() and self.now() < self.until

    @property
    def remaining(self) -> float:
        """Seconds until then."""
        return max(0.0, self.until - self.now()) if self else 0.0


class Detached:
    """Sends steps for a lock that no process keeps alive, and notes what their answers are worth.

    Make one for each request; in a forked child, its parent's sends nothing.
    """

    def __init__(self, key: object, using: str | None) -> None:
        self._stored = check_key(key, get_settings().KEY_PREFIX)
        self._using = using
        self._pid = os.getpid()
        self._belief = Belief()

    def _apply(self, step: Step, lease: float) -> Protocol[Reply]:
        answer: Answer = yield Apply(self._stored, step)
        # Only a command that has itself taken or renewed the lock is a reason to believe in it.
        if answer.whole and answer.reply.held:
            self._belief = Belief(answer.sent + lease, self._session().now, self._pid)
        return answer.reply

    def _look(self, grant: str = "") -> Protocol[Reply]:
        answer: Answer = yield Read(self._stored, grant)
        return answer.reply

    def _session(self) -> Session:
        if self._pid != os.getpid():
            raise LockBackendFailed("a forked child cannot use what its parent has made", self._stored, passing=False)
        return get_backend(self._using).session()


class Claim(Detached):
    """A lock that its owner has taken, until code that knows the owner gives it back, or its lease ends.

    Each method is one command or two, and never waits. No process renews it: `acquire` and `renew` give it its
    whole lease, counted from then. All who know the owner share it, so two requests of one owner do not exclude each
    other. Other owners, and `mongo_lock` with any owner, are kept out: it is an ordinary lock with an ordinary fencing
    token, which stays the same for as long as the claim lasts.
    """

    def __init__(self, key: object, owner: Owner, lease: float, label: str | None, using: str | None) -> None:
        super().__init__(as_key(key), using)
        self._request = None if isinstance(owner, str) else owner
        self._owner = (check_fact("owner", owner) or "") if isinstance(owner, str) else ""
        if not isinstance(owner, str):
            session_of(owner)
        self.lease = check_seconds("lease", lease)
        self._label = check_fact("label", label)
        self._held: dict[str, Any] | None = None

    def __repr__(self) -> str:
        if not self.held:
            return f"<Claim {self._stored!r}, not known to be held>"
        return f"<Claim {self._stored!r} held, token {self.fencing_token}, {self.remaining:.1f} s left>"

    @property
    def key(self) -> str:
        """The key, with MONGOLOCK["KEY_PREFIX"]."""
        return self._stored

    @property
    def held(self) -> bool:
        """Whether this object knows that its owner has the lock: for one lease at most after `acquire` or `renew`."""
        return self._held is not None and bool(self._belief)

    @property
    def remaining(self) -> float:
        """Seconds until `held` is false, by the local clock."""
        return self._belief.remaining if self._held is not None else 0.0

    @property
    def fencing_token(self) -> int:
        """The token of the claim, larger than that of every earlier holder of the key. Raises LockMisused before."""
        return int(self._known["token"])

    @property
    def acquired_at(self) -> datetime:
        """When the owner took the lock, by the server's clock, for people. Raises LockMisused before."""
        at: datetime = self._known["acquired_at"]
        return at

    def ensure_held(self) -> None:
        """Raise LockLost unless `held`. Sends nothing: what was forced since then, only `renew` finds out."""
        if not self.held:
            raise LockLost(self._stored, None if self._held is None else self.fencing_token)

    def acquire(self) -> Self:
        """Take the lock if it is free, or keep it if its owner has it already, for a whole lease from now.

        Raises LockNotAcquired if another one has it, and LockBackendFailed.
        """
        return self._run(self._acquire())

    async def aacquire(self) -> Self:
        """See acquire()."""
        return await self._arun(self._acquire())

    def renew(self) -> Self:
        """Keep the lock for a whole lease from now. Raises LockLost if its owner has lost it, or its session has ended,
        and LockBackendFailed."""
        gone = self._request is not None and session_is_gone(self._request)
        return self._run(self._renew(gone=gone))

    async def arenew(self) -> Self:
        """See renew()."""
        gone = self._request is not None and await asession_is_gone(self._request)
        return await self._arun(self._renew(gone=gone))

    def release(self) -> bool:
        """Give the lock back; return whether its owner had it until then. Raises LockBackendFailed."""
        return self._run(self._release())

    async def arelease(self) -> bool:
        """See release()."""
        return await self._arun(self._release())

    # What is sent

    def _run(self, steps: Protocol[T]) -> T:
        if self._request is not None:
            self._owner = session_owner(self._request)
        return self._session().run(steps)

    async def _arun(self, steps: Protocol[T]) -> T:
        if self._request is not None:
            self._owner = await asession_owner(self._request)
        return await self._session().arun(steps)

    def _acquire(self) -> Protocol[Self]:
        reply = Reply()
        for _ in range(ROUNDS):
            terms = self._terms()
            session = secrets.token_hex(6)
            new = entry(f"{session}.1", session, terms, self._facts(), process=CLAIM)
            reply = yield from self._apply(detached.taking(new), terms.lease)
            if reply.held or (self._is_ours(reply) and (yield from self._keep(reply.theirs))):
                self._held = self._held if reply.mine is None else dict(reply.mine)
                return self
            if not self._is_ours(reply):
                break
        raise LockNotAcquired(self._stored, 0.0, reply.holder, reply.first_end or 0.0)

    def _renew(self, *, gone: bool = False) -> Protocol[Self]:
        if gone:
            yield from self._release()
        reply = yield from self._look()
        if not gone and self._is_ours(reply) and (yield from self._keep(reply.theirs)):
            return self
        token = None if self._held is None else self.fencing_token
        self._held, self._belief = None, Belief()
        raise LockLost(self._stored, token, "its owner does not hold it now")

    def _keep(self, holder: Any) -> Protocol[bool]:
        terms = self._terms()
        reply = yield from self._apply(detached.keeping(holder["grant"], terms), terms.lease)
        if reply.mine is not None:
            self._held = dict(reply.mine)
        return reply.held

    def _release(self) -> Protocol[bool]:
        reply = yield from self._look()
        self._held, self._belief = None, Belief()
        if not self._is_ours(reply) or reply.theirs is None:
            return False
        ttl = milliseconds(self._terms().server_lease)
        yield from self._apply(detached.leaving(reply.theirs["grant"], ttl), 0.0)
        return reply.now is not None and reply.theirs["until"] > reply.now

    def _is_ours(self, reply: Reply) -> bool:
        """Whether the holder is a claim of this owner; not what a process holds for it."""
        holder = reply.theirs
        return holder is not None and holder.get("owner") == self._owner and holder.get("process") == CLAIM

    def _terms(self) -> Terms:
        """Its terms as of now: the lock of a session ends with the session, at the latest."""
        terms = Terms(lease=self.lease, clock_margin=get_settings().CLOCK_MARGIN, owner=self._owner)
        if self._request is not None:
            left = terms.holder_lease_of(keep_session(self._request))
            terms = replace(terms, lease=min(terms.lease, max(left, SHORTEST)))
        return replace(terms, waiter_lease=terms.lease)

    def _facts(self) -> dict[str, str | int]:
        facts = holder_facts(self._label or "claim")
        user = getattr(self._request, "user", None)
        if user is not None and user.is_authenticated:
            facts["editor"] = tidy_fact(user.pk)  # by which all claims of a user are found
        return {name: value for name, value in facts.items() if name in ("label", "place", "user", "editor")} | {
            "host": CLAIMED
        }

    @property
    def _known(self) -> dict[str, Any]:
        if self._held is None:
            raise LockMisused(f"the claim on {self._stored!r} is not known to be held: call acquire() or renew() first")
        return self._held


def claim(
    key: Key, *, owner: Owner, lease: float = 1_800.0, label: str | None = None, using: str | None = None
) -> Claim:
    """Make the claim of *owner* on a key, for locks that last over several requests. Sends nothing.

    One request takes it (`Claim.acquire`), later ones extend it (`Claim.renew`), and one gives it back
    (`Claim.release`); each makes its own object with the same key and owner. owner: the request, for a claim of its
    session, which ends with the session, by logout or because it expires; or a text, which should be secret: all code
    that knows it can extend the claim and give it back. lease: seconds that it lasts without `acquire` or `renew`.
    label: for people who look at the locks. using: the DATABASES alias (MONGOLOCK["DATABASE"]).
    """
    return Claim(key, owner, lease, label, using)
