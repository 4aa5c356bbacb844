"""Locks that no process keeps alive. An owner has them over several requests, served by any process.

`Claim` is for any key. The edit lock of a browser tab (`editing`) is made of the same parts.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from datetime import datetime
from typing import Any, Final, Self, TypeVar

from asgiref.sync import sync_to_async
from django.http import HttpRequest

from .backends import get_backend
from .conf import get_settings
from .context import CLAIMED, holder_facts
from .engine.lock.detached import Belief, Detached
from .engine.protocol.actions import Protocol, twins
from .engine.protocol.processes import CLAIM
from .engine.rule.document import Terms, entry, milliseconds
from .engine.rule.options import check_seconds
from .engine.rule.replies import Reply
from .engine.text_checks import check_fact, check_key
from .exceptions import LockLost, LockMisused, LockNotAcquired
from .keys import as_key
from .locks import Key
from .owners import claim_owner, keep_session, session_is_gone, session_of, session_owner

__all__ = ["Claim", "claim"]

#: The number of times that a claim asks again, if the owner's own claim ended while it asked.
ROUNDS: Final = 3
#: The shortest lease of a claim of a session that is about to end, in seconds.
SHORTEST: Final = 1.0

T = TypeVar("T")
#: A text, or a request that stands for its session.
Owner = str | HttpRequest


class Claim(Detached):
    """A lock that its owner has taken, until code that knows the owner gives it back, or its lease ends.

    Each method sends one or two commands, and never waits. No process renews the claim. `acquire` and `renew` give it
    its whole lease, counted from then. All code that knows the owner shares the claim, so two requests of one owner do
    not exclude each other. Other owners, and `mongo_lock` with any owner, are kept out. A claim is an ordinary lock
    with an ordinary fencing token. The token stays the same for as long as the claim lasts.
    """

    def __init__(self, key: object, owner: Owner, lease: float, label: str | None, using: str | None) -> None:
        stored = check_key(as_key(key), get_settings().KEY_PREFIX)
        super().__init__(stored, lambda: get_backend(using).session())
        self._request = None if isinstance(owner, str) else owner
        self._owner = claim_owner(check_fact("owner", owner) or "") if isinstance(owner, str) else ""
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
        """Whether this object knows that its owner has the lock, for one lease at most after `acquire` or `renew`."""
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
        """The time when the owner took the lock, by the server's clock, for people. Raises LockMisused before."""
        at: datetime = self._known["acquired_at"]
        return at

    def ensure_held(self) -> None:
        """Raise LockLost unless `held`. Nothing is sent, so only `renew` notices a forced release."""
        if not self.held:
            raise LockLost(self._stored, None if self._held is None else self.fencing_token)

    def _acquire(self) -> Protocol[Claim]:
        """Take the lock if it is free, or keep it if its owner has it already, for a whole lease from now.

        Raises LockNotAcquired if another owner has it, and LockBackendFailed.
        """
        reply = Reply()
        for _ in range(ROUNDS):
            name = secrets.token_hex(6)
            new = entry(f"{name}.1", name, self._terms(), self._facts(), process=CLAIM)
            reply = yield from self.taking(new)
            if reply.mine is not None:
                self._held = dict(reply.mine)
            if reply.held or (self._is_ours(reply) and (yield from self._keep(reply.theirs))):
                return self
            if not self._is_ours(reply):
                break
        raise LockNotAcquired(self._stored, 0.0, reply.holder, reply.first_end or 0.0)

    acquire, aacquire = twins(_acquire)

    def renew(self) -> Self:
        """Keep the lock for a whole lease from now.

        Raises LockLost if its owner has lost it, or its session has ended. Raises LockBackendFailed.
        """
        gone = self._request is not None and session_is_gone(self._request)
        return self._run(self._renew(gone=gone))

    async def arenew(self) -> Self:
        """See renew()."""
        gone = self._request is not None and await sync_to_async(session_is_gone)(self._request)
        return await self._arun(self._renew(gone=gone))

    def _renew(self, *, gone: bool) -> Protocol[Self]:
        token = None if self._held is None else self.fencing_token
        if gone:
            yield from self._release()
        reply = yield from self.looking()
        if not gone and self._is_ours(reply) and (yield from self._keep(reply.theirs)):
            return self
        self._held, self._belief = None, Belief()
        raise LockLost(self._stored, token, "its owner does not hold it now")

    def _keep(self, holder: Any) -> Protocol[bool]:
        reply = yield from self.keeping(holder["grant"], self._terms())
        if reply.mine is not None:
            self._held = dict(reply.mine)
        return reply.held

    def _release(self) -> Protocol[bool]:
        """Give the lock back. Return whether its owner had it until then. Raises LockBackendFailed."""
        reply = yield from self.looking()
        self._held, self._belief = None, Belief()
        if not self._is_ours(reply) or reply.theirs is None:
            return False
        yield from self.leaving(reply.theirs["grant"], milliseconds(self._terms().server_lease))
        return reply.now is not None and reply.theirs["until"] > reply.now

    release, arelease = twins(_release)

    # The commands

    def _run(self, steps: Protocol[T]) -> T:
        self._find_owner()
        return self._session().run(steps)

    async def _arun(self, steps: Protocol[T]) -> T:
        if self._request is not None:  # in a thread, because this may load the session
            await sync_to_async(self._find_owner)()
        return await self._session().arun(steps)

    def _find_owner(self) -> None:
        if self._request is not None:
            self._owner = session_owner(self._request)

    def _is_ours(self, reply: Reply) -> bool:
        """Return whether the holder is a claim of this owner.

        A process that holds the lock for the owner does not count.
        """
        holder = reply.theirs
        return holder is not None and holder.get("owner") == self._owner and holder.get("process") == CLAIM

    def _terms(self) -> Terms:
        """Return its terms as of now. The lock of a session ends with the session, at the latest."""
        terms = Terms(lease=self.lease, clock_margin=get_settings().CLOCK_MARGIN, owner=self._owner)
        if self._request is not None:
            left = terms.holder_lease_of(keep_session(self._request))
            terms = replace(terms, lease=min(terms.lease, max(left, SHORTEST)))
        return replace(terms, waiter_lease=terms.lease)

    def _facts(self) -> dict[str, str | int]:
        facts = holder_facts(self._label or "claim")
        return {name: value for name, value in facts.items() if name in ("label", "place", "user")} | {"host": CLAIMED}

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
    (`Claim.release`). Each makes its own object with the same key and owner.

    - owner: request, for a claim of its session, or a text. All code that knows the text can extend the claim and give
      it back. The lock document therefore has only a digest of it.
    - lease: seconds that the claim lasts without `acquire` or `renew`.
    - label: note for people who look at the locks.
    - using: DATABASES alias (MONGOLOCK["DATABASE"]).

    The claim of a session ends on logout, when the session expires, and at the next `Claim.renew` after the session was
    removed.
    """
    return Claim(key, owner, lease, label, using)
