"""`EditLock`: the lock of one browser tab on one object. One command for each thing that it does.

It is an ordinary lock document, so the lock admin, the commands and force release know it. But no process renews it:
the tab does, by a beat every few seconds, and any process may serve a beat. So nothing here lives longer than a
request; who holds the lock is told by the grant, which is made of the user, the key and the tab's random name.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final, Literal

from django.db.models import Model
from django.utils.crypto import salted_hmac

from ..backends.base import get_backend
from ..conf import get_settings
from ..context import BROWSER
from ..engine import clock
from ..engine.document import Terms, entry, milliseconds
from ..engine.logs import INFO, log
from ..engine.protocol import Answer, Apply, Protocol, Read
from ..engine.replies import Reply
from ..engine.session.session import Session
from ..engine.step import Step
from ..engine.texts import MAX_KEY_BYTES, check_key, tidy_fact
from ..exceptions import LockBackendFailed, LockDocumentDamaged
from ..keys import row_key

#: Before the key of a row. Not the key of the row itself: work that takes that for a second does not wait for people.
PREFIX: Final = "edit:"
SALT: Final = "django_mongolock.editing"

#: mine: this tab has it. mine-elsewhere: another tab of the same login. me-elsewhere: the same user, another login.
Who = Literal["mine", "mine-elsewhere", "me-elsewhere", "somebody"]


@dataclass(frozen=True, slots=True)
class Person:
    """Who edits. id: the same for the same user, whatever he is called. owner: his login (`session_owner`)."""

    id: str
    name: str = ""
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class Editor:
    """Who holds an edit lock. Times are by the server's clock, for people.

    since: when it was taken. seen: the last beat. until: when it ends without another. token: the fencing token,
    which tells this editor from later ones. beats: has there been a beat? asks: who asks him to finish.
    """

    who: Who
    name: str
    since: datetime
    seen: datetime
    until: datetime
    token: int
    beats: bool = False
    asks: str | None = None


@dataclass(frozen=True, slots=True)
class Belief:
    """Until when a tab has the lock at any rate: one lease, counted by the local clock from before a command was sent
    that is known to have taken or renewed it. What is only seen, by whatever clock, makes it no longer. It is of the
    process *pid*, and true until then."""

    until: float = 0.0
    now: Callable[[], float] = clock.now
    pid: int = 0

    def __bool__(self) -> bool:
        return self.pid == os.getpid() and self.now() < self.until


@dataclass(frozen=True, slots=True)
class Standing:
    """How an edit lock stands: who holds it at the time *now* of the server, if anybody; or why that cannot be told
    (`problem`)."""

    editor: Editor | None = None
    now: datetime | None = None
    problem: str = ""
    belief: Belief = field(default=Belief(), repr=False)

    @property
    def held(self) -> bool:
        """Does this tab hold the lock? Not any more when its lease is over without another beat."""
        return self.is_mine and bool(self.belief)

    @property
    def is_mine(self) -> bool:
        """Does the lock document say that this tab holds the lock? See `held`."""
        return self.editor is not None and self.editor.who == "mine"

    @property
    def free(self) -> bool:
        """Does nobody hold it, for sure?"""
        return self.editor is None and not self.problem


def edit_key(target: Model | type[Model] | str, pk: object = None) -> str:
    """The key of the edit lock of an object, of a row of a model, or of anything that has a name.

    Whatever the primary key is: one that is too long for a key, or has characters that no key has, goes in by a hash.
    """
    if isinstance(target, str):
        return f"{PREFIX}{target}"
    model, pk = (target._meta.model, target.pk) if isinstance(target, Model) else (target, pk)
    try:
        key = f"{PREFIX}{row_key(model, pk)}"
        if len(check_key(key, get_settings().KEY_PREFIX).encode()) <= MAX_KEY_BYTES:
            return key
    except ValueError:
        if pk is None or (isinstance(pk, tuple) and None in pk):
            raise
    text = repr(tuple(map(str, pk)) if isinstance(pk, tuple) else str(pk))
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return f"{PREFIX}{row_key(model, 0)[:-1]}sha256-{digest}"


def new_tab() -> str:
    """The name of a tab: random, known to the tab alone."""
    return secrets.token_urlsafe(16)


class EditLock:
    """The edit lock *key*, as the tab *tab* of *person* sees it. Make one for each request, and in a forked child one
    of its own: its parent's sends nothing there.

    Nothing here waits for another editor. Where MongoDB does not answer, the standing tells the `problem`; nothing is
    raised. Whoever lost the lock learns it by his next beat: check what is saved by its version as well.
    """

    def __init__(
        self,
        key: str,
        person: Person,
        tab: str = "",
        *,
        facts: Mapping[str, str] | None = None,
        using: str | None = None,
    ) -> None:
        self.key = key
        self.person = person
        self.tab = tab or new_tab()
        self.lease = get_settings().EDIT_LEASE
        self._stored = check_key(key, get_settings().KEY_PREFIX)
        self._facts = facts or {}
        self._using = using
        self._pid = os.getpid()
        self._belief = Belief()

    def take(self) -> Standing:
        """Take the lock if it is free; keep it if it is this tab's. What a tab has released it does not take again."""
        return self._run(self._take())

    async def atake(self) -> Standing:
        """See take()."""
        return await self._arun(self._take())

    def beat(self) -> Standing:
        """Keep the lock for another lease, if it is still there."""
        return self._run(self._beat())

    async def abeat(self) -> Standing:
        """See beat()."""
        return await self._arun(self._beat())

    def look(self) -> Standing:
        """Tell who has it; change nothing."""
        return self._run(self._look())

    async def alook(self) -> Standing:
        """See look()."""
        return await self._arun(self._look())

    def release(self) -> Standing:
        """Give it back. A command of this tab that is still on its way finds a tombstone."""
        return self._run(self._release())

    async def arelease(self) -> Standing:
        """See release()."""
        return await self._arun(self._release())

    def take_over(self, token: int) -> Standing:
        """Take it from the editor with that fencing token, in one command; from nobody who came after him."""
        return self._run(self._take_over(token))

    async def atake_over(self, token: int) -> Standing:
        """See take_over()."""
        return await self._arun(self._take_over(token))

    def succeed(self, tab: str) -> Standing:
        """Take the place of *tab*, an earlier page of this very tab; if it has gone, take the lock if it is free."""
        return self._run(self._take(former=self._grant(tab)))

    async def asucceed(self, tab: str) -> Standing:
        """See succeed()."""
        return await self._arun(self._take(former=self._grant(tab)))

    # What is sent

    def _grant(self, tab: str | None = None) -> str:
        """The id that the lock is held under: nobody can make it who is not that user."""
        text = "\n".join((self.person.id, self._stored, self.tab if tab is None else tab))
        return salted_hmac(SALT, text, algorithm="sha256").hexdigest()[:32] + ".1"

    def _terms(self) -> Terms:
        part = get_settings().CLOCK_MARGIN
        return Terms(lease=self.lease, clock_margin=part, waiter_lease=self.lease, owner=self.person.owner)

    def _entry(self) -> dict[str, Any]:
        grant = self._grant()
        facts = {"label": "edit lock", "host": BROWSER, "user": self.person.name, **self._facts}
        tidy = {name: tidy_fact(value) for name, value in facts.items() if value}
        own: dict[str, str | int] = {**tidy, "editor": tidy_fact(self.person.id)}
        return entry(grant, grant.partition(".")[0], self._terms(), own)

    def _beat(self) -> Protocol[Standing]:
        terms, grant = self._terms(), self._grant()
        lease, server_lease = milliseconds(terms.lease), milliseconds(terms.server_lease)
        standing = yield from self._apply(Step(ask=grant, renew=(grant,), lease=lease, server_lease=server_lease))
        return standing

    def _take(self, former: str = "") -> Protocol[Standing]:
        grant, before = self._grant(), self._belief
        step = Step(ask=grant, add=self._entry(), trial=True)
        if former:
            step = replace(step, remove=(former,), force=True, resumes=True)
        standing = yield from self._apply(step)
        if standing.is_mine and self._belief is before:
            standing = yield from self._beat()  # it was this tab's already, for what is left of an earlier lease
        return standing

    def _take_over(self, token: int) -> Protocol[Standing]:
        reply = (yield Read(self._stored, "")).reply
        if reply.theirs is None or reply.theirs["token"] != token:
            standing = yield from self._take()  # he has gone; whoever came after him stays
            return standing
        standing = yield from self._take(former=reply.theirs["grant"])
        if standing.held:
            log(INFO, "edit lock taken over", key=self._stored, by=self.person.name, holder=reply.holder)
        return standing

    def _look(self) -> Protocol[Standing]:
        answer = yield Read(self._stored, self._grant())
        return self._read(answer.reply)  # what was believed before is believed on, and no longer

    def _release(self) -> Protocol[Standing]:
        grant = self._grant()
        step = Step(ask=grant, remove=(grant,), force=True, tombstone_ttl=milliseconds(self._terms().server_lease))
        standing = yield from self._apply(step)
        return standing

    def _apply(self, step: Step) -> Protocol[Standing]:
        answer: Answer = yield Apply(self._stored, step)
        # Only this very command, if it has taken or renewed the lock, gives reason to believe in it.
        if answer.whole and answer.reply.held:
            self._belief = Belief(answer.sent + self.lease, self._session().now, self._pid)
        return self._read(answer.reply)

    def _read(self, reply: Reply) -> Standing:
        holder = reply.mine or reply.theirs
        # For people, by the server's clock: whoever acts on it sends a command, by which the server decides.
        if holder is None or reply.now is None or holder["until"] <= reply.now:
            return Standing(None, reply.now)
        renewed = holder["until"] - timedelta(milliseconds=holder["server_lease"])
        editor = Editor(
            who=self._who(holder),
            name=holder.get("user") or "",
            since=holder["acquired_at"],
            seen=max(holder["acquired_at"], renewed),
            until=holder["until"],
            token=holder["token"],
            beats=renewed > holder["acquired_at"],
            asks=holder.get("release_requested_by"),
        )
        return Standing(editor, reply.now, belief=self._belief)

    def _who(self, holder: Mapping[str, Any]) -> Who:
        if holder["grant"] == self._grant():
            return "mine"
        if not self.person.id or holder.get("editor") != tidy_fact(self.person.id):
            return "somebody"
        return "mine-elsewhere" if holder.get("owner") == self.person.owner else "me-elsewhere"

    # Sending

    def _run(self, steps: Protocol[Standing]) -> Standing:
        try:
            return self._session().run(steps)
        except (LockBackendFailed, LockDocumentDamaged) as error:
            return _problem(error)

    async def _arun(self, steps: Protocol[Standing]) -> Standing:
        try:
            return await self._session().arun(steps)
        except (LockBackendFailed, LockDocumentDamaged) as error:
            return _problem(error)

    def _session(self) -> Session:
        if self._pid != os.getpid():
            raise LockBackendFailed("a forked child has no part in the edit locks of its parent", passing=False)
        return get_backend(self._using).session()


def _problem(error: LockBackendFailed | LockDocumentDamaged) -> Standing:
    text = error.problem if isinstance(error, LockBackendFailed) else str(error)
    log(INFO, "edit lock not known", error=error)
    return Standing(problem=text)
