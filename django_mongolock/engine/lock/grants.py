"""The grants of one lock object, and the steps by which the object acquires, shares, extends and releases them."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from ...exceptions import LockBackendFailed, LockCancelled, LockLost, LockMisused, LockNotAcquired, LockReentry
from ..logs import WARNING, log
from ..protocol import procedures
from ..protocol.actions import FOREVER, Acquisition, Apply, Protocol, ReleaseUncontended
from ..rule.document import Step, Terms, milliseconds
from ..rule.options import LockOptions, Seconds, check_seconds
from ..session import flow
from ..session.ending import EndReason
from ..session.grant import Grant, OwnerToken, User
from ..session.grant_registry import current_worker
from ..session.session import Session

Facts = Callable[[], Mapping[str, str | int]]
#: Packages whose frames do not count as the place where a lock was acquired.
_OURS: Final = {"django_mongolock", "asyncio", "contextlib"}


class LockGrants:
    """The grants of one lock object, one for each of its keys. A session runs the generators.

    - session: session that has acquired the grants.
    - grants: grants that are held, or none.
    - last: grants that were acquired last, also after their release.
    - wanted: grant of the present wait.
    - is_cancelled: whether the waits of this `acquire` have to end, including the wait for the next key.
    """

    __slots__ = (
        *("_busy", "_facts", "_lock", "_owner_tokens", "_user"),
        *("grants", "is_cancelled", "keys", "last", "options", "session", "terms", "wanted"),
    )

    def __init__(self, lock: object, keys: tuple[str, ...], terms: Terms, options: LockOptions, facts: Facts) -> None:
        self.keys, self.terms, self.options = keys, terms, options
        self.session: Session | None = None
        self.grants: tuple[Grant, ...] = ()
        self.last: tuple[Grant, ...] = ()
        self.wanted: Grant | None = None
        self.is_cancelled = False
        self._facts = facts
        self._owner_tokens: tuple[OwnerToken, ...] = ()
        self._busy = threading.Lock()
        self._lock = weakref.ref(lock)
        self._user = self._new_user()

    def _new_user(self) -> User:
        calls = {"on_lost": self.options.on_lost, "on_release_requested": self.options.on_release_requested}
        return User(self._lock, {name: callback for name, callback in calls.items() if callback is not None})

    @property
    def is_ours(self) -> bool:
        """Whether the grants belong to this process, and not to the parent that it was forked from."""
        return self.session is not None and self.session.pid == os.getpid()

    def all_held(self, grants: tuple[Grant, ...]) -> bool:
        """Return whether *grants* is not empty, and all of them are held.

        The caller reads the grants once and passes them, because another thread may release them meanwhile. An empty
        tuple is not held, although all() is true for it.
        """
        return bool(grants) and self.is_ours and all(grant.held for grant in grants)

    def acquire_all(self, session: Session, wait: float | None) -> Protocol[None]:
        """Acquire all keys, or none."""
        self._begin()
        self.session = session
        called = began = session.now()
        deadline = FOREVER if wait is None else began + wait
        grants: list[Grant] = []
        owner_tokens: list[OwnerToken] = []
        try:
            for key in self.keys:
                grant = yield from self._acquire_key(session, key, (began, deadline), owner_tokens, trial=wait == 0)
                grants.append(grant)
                began = session.now()
            where = calling_line()
            for grant in grants:
                grant.acquired_from = grant.acquired_from or where
                if not grant.held:  # lost during the wait for the next one
                    raise LockLost(grant.key, grant.token, grant.reason)
            self.grants, self._owner_tokens = tuple(grants), tuple(owner_tokens)
            self.last = self.grants
        except LockNotAcquired:
            try:
                if session.now() < deadline + session.commands.timeout:
                    yield from self._give_back(session, grants)
            finally:
                self._drop(session, grants)
            raise
        except BaseException as error:
            if isinstance(error, LockBackendFailed):
                error.waited = session.now() - called
            self._drop(session, grants)
            raise
        finally:
            self._busy.release()

    def _give_back(self, session: Session, grants: list[Grant]) -> Protocol[None]:
        """Release those of *grants* that only this object uses, in one command, and take them out of the list."""
        alone = [grant for grant in grants if not grant.in_doubt and grant.drop_user(self._lock)]
        if not alone:
            return
        with contextlib.suppress(LockBackendFailed):
            keys, ids = tuple(grant.key for grant in alone), tuple(grant.id for grant in alone)
            left = yield ReleaseUncontended(keys, ids, after=True)
            for grant in alone:
                if grant.key not in left:
                    session.ending.end(grant, EndReason.RELEASED)
                    grants.remove(grant)

    def _begin(self) -> None:
        if not self._busy.acquire(blocking=False):
            raise LockMisused("this lock object is being acquired elsewhere: make a new one for every use")
        if self.grants and self.is_ours:
            self._busy.release()
            raise LockMisused("this lock object is in use: `with` needs no acquire(); make a new one for every use")
        self.grants = self.last = self._owner_tokens = ()
        self.is_cancelled = False
        self._user = self._new_user()

    def _acquire_key(
        self, session: Session, key: str, times: tuple[float, float], owner_tokens: list[OwnerToken], *, trial: bool
    ) -> Protocol[Grant]:
        """Acquire one key. The *times* are the start of the wait for it, and its deadline."""
        worker = current_worker()
        flow.enter(worker)
        held = session.registry.held_by(worker)
        if (mine := held.get(key)) is not None and (token := (yield from self._enter_again(session, mine))) is not None:
            owner_tokens.append(token)
            return mine
        grant = self.new_grant(session, key, worker, held, self.terms)
        owner_tokens.append(grant.new_owner_token(session.heartbeat.inbox.put))
        began, deadline = times
        grant.waiting.began, grant.waiting.back_by = began, deadline + session.commands.timeout
        try:
            self.wanted = grant
            turn = session.queue.join(grant, trial=trial)
            if self.is_cancelled:  # during the acquisition of another key
                raise LockCancelled(key, 0.0)
            if turn == "now":
                answer, now = None, began
            else:
                result = yield from procedures.wait_in_line(grant.acquisition, turn, deadline, began)
                answer, now = result.answer, result.now
                trial = answer is None and now >= deadline
            session.registry.expect(grant)
            granted = yield from procedures.acquire(
                grant.acquisition, deadline, now, since=began, trial=trial, answer=answer
            )
            session.register_grant(grant, granted)
        except BaseException as error:
            self.give_up(session, grant, error)
            raise
        finally:
            self.wanted = None
        return grant

    def _enter_again(self, session: Session, grant: Grant) -> Protocol[OwnerToken | None]:
        """Share *grant*, if this thread or task still holds it. Return its owner token, or None if it is not held.

        Raise LockReentry unless the caller allows to share it, and the terms agree.
        """
        if (token := grant.owner_token()) is None:
            return None
        mine, its = ((each.mode, each.capacity, each.weight) for each in (self.terms, grant.terms))
        if not (self.options.reentrant and mine == its):
            # The grant may have been taken away by force, and this process may not know yet.
            answer = yield grant.acquisition.confirm()
            if answer.reply.token == grant.token:
                raise self._reentry(grant)
            session.ending.not_found(grant)
            return None
        return token if session.share(grant, self._user) else None

    def _reentry(self, grant: Grant) -> LockReentry:
        """Return the error. The caller keeps it in no variable, because its frames lead to an owner token."""
        error = LockReentry(grant.key)
        error.upgrade = (grant.terms.mode, self.terms.mode) == ("shared", "exclusive")
        error.differs = self.options.reentrant
        return error

    def new_grant(self, session: Session, key: str, worker: object, held: Mapping[str, Grant], terms: Terms) -> Grant:
        """Return a grant that has not been asked for yet. *held* has the grants of its *worker*."""
        # A wait for a release that is still on its way is no deadlock, and does not count. The copy is made at once,
        # because the heartbeat may take out a lost grant. One grant is enough, because there may be thousands.
        other = next((grant for grant in list(held.values()) if grant.owner_token() is not None), None)
        options, facts = self.options, self._facts()
        # A worker keeps its name as long as it holds a lock. Deadlocks are found by that name.
        name = f"{session.id}/{secrets.token_hex(4)}" if other is None else other.acquisition.worker
        # The random part makes ids unique in a clone of this machine, and in a child whose fork went unnoticed.
        acquisition = Acquisition(
            key,
            f"{session.id}.{next(session.commands.numbers)}-{secrets.token_hex(4)}",
            terms,
            session.id,
            name,
            "" if terms.owner is None else session.name_process(),
            facts,
            whole=options.whole or not options.auto_renew,
            nested=other is not None,
        )
        grant = Grant(
            acquisition,
            worker=worker,
            auto_renew=options.auto_renew,
            max_hold=options.max_hold,
            now=session.now,
            users=(self._user,),
        )
        grant.reporting.template = options.templates.get(key, "")
        return grant

    def give_up(self, session: Session, grant: Grant, error: BaseException) -> None:
        """Clean up after *error*, which ended the wait."""
        reason, refused = type(error).__name__, False
        if isinstance(error, LockNotAcquired):
            reason, refused = error.why, error.__cause__ is None  # with a cause, it may still be in the queue
            error.template = grant.reporting.template
        session.queue.leave(grant)
        waiting = grant.waiting
        # The order matters, because `finish_handover` writes the other fields before it says that the hand-over is
        # over. Unless the grant was refused, the last command may have taken effect, or still may.
        if grant.in_doubt or waiting.answer is not None or (waiting.sent and not refused):
            session.ending.end(grant, EndReason.ABANDONED)
        session.ending.end(grant, EndReason.REFUSED, reason=reason)

    # Release

    def release_all(self, early: bool = False) -> Protocol[bool]:
        """Release all keys. Return whether all were held until then. With *early*, end their minimum hold too."""
        # Keep the owner tokens. Another thread may clear them, and the heartbeat would then release the same grants.
        session, grants, owner_tokens = self.session, self.grants, self._owner_tokens
        if session is None or not self.is_ours:
            return False
        ours = bool(grants)
        try:
            for place, grant in enumerate(grants, start=1):
                was_held = yield from self._release_key(session, grant, early)
                if was_held is None:  # no answer, and the others would wait in vain too
                    ours &= all(other.held for other in grants[place:])
                    self._drop(session, grants[place:], stays=not early)
                    break
                ours &= was_held
        except BaseException:
            self._drop(session, grants, stays=not early)
            raise
        finally:
            self.clear(grants)
            del owner_tokens
        return ours

    def clear(self, grants: tuple[Grant, ...]) -> None:
        """Forget *grants*, which have ended. If another thread released them, newer grants stay."""
        if self.grants is grants:
            self.grants = self._owner_tokens = ()

    def _release_key(self, session: Session, grant: Grant, early: bool = False) -> Protocol[bool | None]:
        """Release one grant, unless another lock object of its worker shares it.

        Return whether the grant was held, or None if there was no answer.
        """
        releaser = current_worker()
        if (was_held := grant.drop_user(self._lock)) is None:
            return grant.held
        if not was_held:
            session.ending.end(grant, EndReason.LOST)
            return False
        grant.releaser = releaser
        stays = grant.terms.min_hold > 0 and not early
        next_waiter = session.queue.reserve_handover(grant) if grant.line in session.queue.lines else None
        answer = None
        try:
            was_there, answer = yield from procedures.release(
                grant.key,
                grant.id,
                None if next_waiter is None else next_waiter.acquisition,
                uncontended=grant.lease.uncontended and not session.commands.guesses.has_waiters(grant.key),
                stays=stays,
                leave_tombstone=grant.needs_tombstone(),
            )
        except LockBackendFailed as error:
            log(WARNING, "release postponed", key=grant.key, error=error)
            session.ending.end(grant, EndReason.ABANDONED, stays=stays)
            return None
        finally:
            if next_waiter is not None:
                session.queue.finish_handover(next_waiter, answer)
        if was_there:
            session.ending.end(grant, EndReason.RELEASED)
        else:
            was_there = not session.ending.not_found(grant, by_release=True)
        return was_there

    def abandon(self, *, stays: bool = False) -> None:
        """Drop grants of this thread or task that the caller does not know of, or could not release.

        - stays: whether minimum holds last.
        """
        grants = [grant for grant in self.grants if grant.worker is current_worker()]
        if grants and self.session is not None:
            owner_tokens = self._owner_tokens  # keeps the heartbeat from releasing the grants that are dropped here
            self.grants = self._owner_tokens = ()
            self._drop(self.session, grants, stays=stays)
            del owner_tokens

    def _drop(self, session: Session, grants: Iterable[Grant], *, stays: bool = False) -> None:
        """Remove grants in the background. A second call for the same grants is safe. See `abandon` for *stays*."""
        for grant in grants:
            if grant.drop_user(self._lock) is not None:
                session.ending.end(grant, EndReason.ABANDONED, stays=stays)

    # Extend

    def extend_all(self, lease: Seconds | None) -> Protocol[bool]:
        """Move the end of every lease to *lease* seconds from now. Return whether all are held."""
        wanted = 0.0 if lease is None else check_seconds("lease", lease)
        session, grants = self.session, self.grants
        if session is None or not self.all_held(grants):
            return False
        for grant in grants:
            length = max(wanted, grant.lease.length)
            lease_ms, server_ms = milliseconds(length), milliseconds(grant.terms.server_lease_of(length))
            step = Step(ask=grant.id, renew=(grant.id,), lease=lease_ms, server_lease=server_ms)
            answer = yield Apply(grant.key, step)
            # Another token means that the grant was taken away, and that a delayed older command has brought it back.
            if answer.reply.token != grant.token:
                session.ending.not_found(grant)
                break
            if answer.whole:
                grant.renewed(answer.sent + length, answer.now, length)
        if self.all_held(grants):
            return True
        return self.grants is not grants and (yield from self.extend_all(lease))  # downgraded meanwhile

    def replace(self, grant: Grant, other: Grant, token: OwnerToken) -> None:
        """Put *other* with its *token* in the place of *grant*.

        If another thread released *grant* meanwhile, the token is dropped, and *other* is removed with it.
        """
        if grant in self.grants:
            self.grants = self.last = tuple(other if each is grant else each for each in self.grants)
            self._owner_tokens += (token,)


def calling_line() -> str:
    """Return file and line of the nearest caller that is not part of the library."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
