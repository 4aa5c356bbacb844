"""`EditLock`: the lock of one browser tab on one object. Each method sends one command, or two.

An edit lock is an ordinary lock document. The lock admin, the commands and forced releases therefore know it. No
process renews the lock. The tab renews it by a beat every few seconds, and any process may serve a beat. Nothing here
lives longer than a request. The grant identifies the holder. The grant is made of the user, the key and the tab's
random name.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, Literal

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS
from django.db.models import Model
from django.utils.crypto import salted_hmac

from ..backends import get_backend
from ..conf import get_settings
from ..context import BROWSER
from ..engine.lock.detached import Belief, Detached
from ..engine.logs import INFO, log
from ..engine.protocol.actions import Protocol, twins
from ..engine.rule.document import Terms, entry, milliseconds
from ..engine.rule.replies import Reply
from ..engine.text_checks import MAX_KEY_BYTES, check_key, tidy_fact
from ..exceptions import LockBackendFailed, LockDocumentDamaged, printable
from ..keys import home_of, row_key
from ..versions.seal import secret_name, secret_of

#: The prefix of the key of a row. The key differs from the row's own key, so short row locks never wait for people.
PREFIX: Final = "edit:"
SALT: Final = "django_mongolock.editing"

#: mine: this tab holds the lock. mine-elsewhere: another tab of the same login. me-elsewhere: the same user, another
#: login.
Who = Literal["mine", "mine-elsewhere", "me-elsewhere", "other"]


@dataclass(frozen=True, slots=True)
class Person:
    """A person who edits.

    - id: identity of the user, independent of the name.
    - owner: login of the user (`session_owner`).
    """

    id: str
    name: str = ""
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class Editor:
    """The holder of an edit lock. Times are by the server's clock, for people.

    - since: moment when the lock was taken.
    - seen: moment of the last beat.
    - until: end of the lock without another beat.
    - token: fencing token, larger for every later editor.
    - beats: whether there has been a beat.
    - release_requested_by: name of the person who asks the editor to finish, and the reason.
    """

    who: Who
    name: str
    since: datetime
    seen: datetime
    until: datetime
    token: int
    beats: bool = False
    release_requested_by: str | None = None


@dataclass(frozen=True, slots=True)
class EditLockStatus:
    """The state of an edit lock at the server's time *now*: the editor, none, or the `problem` that hides it."""

    editor: Editor | None = None
    now: datetime | None = None
    problem: str = ""
    belief: Belief = field(default=Belief(), repr=False)

    @property
    def held(self) -> bool:
        """Whether this tab holds the lock. The tab no longer holds it when the lease is over without another beat."""
        return self.is_mine and bool(self.belief)

    @property
    def is_mine(self) -> bool:
        """Whether the lock document says that this tab holds the lock. See `held`."""
        return self.editor is not None and self.editor.who == "mine"

    @property
    def free(self) -> bool:
        """Whether the lock is known to have no editor."""
        return self.editor is None and not self.problem


def edit_key(target: Model | type[Model] | str, pk: object = None) -> str:
    """Return the key of the edit lock of an object, of a row of a model, or of anything that has a name.

    If a primary key is too long for a lock key, or has invalid characters, its hash replaces it.
    """
    if isinstance(target, str):
        return f"{PREFIX}{target}"
    using = DEFAULT_DB_ALIAS
    if isinstance(target, Model):
        using, pk, target = home_of(target), target.pk, target._meta.model
    try:
        key = f"{PREFIX}{row_key(target, pk, using)}"
        if len(check_key(key, get_settings().KEY_PREFIX).encode()) <= MAX_KEY_BYTES:
            return key
    except ValueError:
        if pk is None or (isinstance(pk, tuple) and None in pk):
            raise
    text = repr(tuple(map(str, pk)) if isinstance(pk, tuple) else str(pk))
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return f"{PREFIX}{row_key(target, 0, using)[:-1]}sha256-{digest}"


def new_tab() -> str:
    """Return a random name for a tab, known to the tab alone. The name begins with the name of the SECRET_KEY."""
    return f"{secret_name(settings.SECRET_KEY)}.{secrets.token_urlsafe(16)}"


class EditLock(Detached):
    """The edit lock *key*, as the tab *tab* of *person* sees it.

    Make one for each request. In a forked child, the parent's lock sends nothing. No method waits for another editor.
    If MongoDB does not answer, the status has the `problem`. In this case nothing is raised, and nothing more is sent.
    The next beat notifies an editor who has lost the lock. A save must therefore check the version as well.
    """

    def __init__(
        self,
        key: str,
        person: Person,
        tab: str = "",
        *,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        stored = check_key(key, get_settings().KEY_PREFIX)
        super().__init__(stored, lambda: get_backend().session())
        self.key = key
        self.person = person
        self.tab = tab or new_tab()
        self.lease = get_settings().EDIT_LEASE
        self._facts = facts or {}
        self._problem: EditLockStatus | None = None

    def _take(self, former: str = "") -> Protocol[EditLockStatus]:
        """Take the lock if it is free. Keep it if this tab holds it. A tab does not take a lock again that it has
        released.

        - former: earlier page of this very tab that this page replaces.
        """
        return (yield from self._take_from(former and self._grant(former)))

    take, atake = twins(_take)

    def _beat(self) -> Protocol[EditLockStatus]:
        """Keep the lock for another lease, if this tab still holds it."""
        return self._status((yield from self.keeping(self._grant(), self._terms())))

    beat, abeat = twins(_beat)

    def _read(self) -> Protocol[EditLockStatus]:
        """Read the holder without changing anything."""
        return self._status((yield from self.looking(self._grant())))

    read, aread = twins(_read)

    def _release(self) -> Protocol[EditLockStatus]:
        """Release the lock if this tab holds it. Otherwise nothing is written.

        A command of this tab that is still on its way finds a tombstone.
        """
        grant, ttl = self._grant(), milliseconds(self._terms().server_lease)
        reply = yield from self.leaving(grant, ttl, given=grant)
        return self._status(reply) if reply.found else (yield from self._read())

    release, arelease = twins(_release)

    def _take_over(self, token: int) -> Protocol[EditLockStatus]:
        """Take the lock from the editor with that fencing token, but not from a later one."""
        reply = yield from self.looking()
        if reply.theirs is None or reply.theirs["token"] != token:
            return (yield from self._take_from())  # that editor is gone, and a later one stays
        status = yield from self._take_from(reply.theirs["grant"])
        if status.held:
            log(INFO, "edit lock taken over", key=self._stored, by=self.person.name, holder=reply.holder)
        return status

    take_over, atake_over = twins(_take_over)

    # Commands

    def _take_from(self, former: str = "") -> Protocol[EditLockStatus]:
        grant, before = self._grant(), self._belief
        facts = {"label": "edit lock", "host": BROWSER, "user": self.person.name, **self._facts}
        tidy = {name: tidy_fact(value) for name, value in facts.items() if value}
        own: dict[str, str | int] = {**tidy, "editor": tidy_fact(self.person.id)}
        new = entry(grant, grant.partition(".")[0], self._terms(), own)
        status = self._status((yield from self.taking(new, former)))
        if status.is_mine and self._belief is before:
            return (yield from self._beat())  # this tab held it already, for the rest of an earlier lease
        return status

    def _grant(self, tab: str = "") -> str:
        """Return the id under which the lock is held. Only the server can make the id, and only for this user."""
        tab = tab or self.tab
        secret, text = secret_of(tab.partition(".")[0]), f"{self.person.id}\n{self._stored}\n{tab}"
        return salted_hmac(SALT, text, secret=secret, algorithm="sha256").hexdigest()[:32] + ".1"

    def _terms(self) -> Terms:
        part = get_settings().CLOCK_MARGIN
        return Terms(lease=self.lease, clock_margin=part, waiter_lease=self.lease, owner=self.person.owner)

    def _status(self, reply: Reply) -> EditLockStatus:
        holder = reply.mine or reply.theirs
        # The server decides whether the lock is free when a command comes. These times are for people.
        if holder is None or reply.now is None or holder["until"] <= reply.now:
            return EditLockStatus(None, reply.now)
        renewed = holder["until"] - timedelta(milliseconds=holder["server_lease"])
        requested_by = holder.get("release_requested_by")
        editor = Editor(
            who=self._who_has(holder),
            name=printable(holder.get("user") or ""),
            since=holder["acquired_at"],
            seen=max(holder["acquired_at"], renewed),
            until=holder["until"],
            token=holder["token"],
            beats=renewed > holder["acquired_at"],
            release_requested_by=printable(requested_by) if requested_by else None,
        )
        return EditLockStatus(editor, reply.now, belief=self._belief)

    def _who_has(self, holder: Mapping[str, Any]) -> Who:
        person = self.person
        if holder["grant"] == self._grant():
            return "mine"
        if not person.id or holder.get("editor") != tidy_fact(person.id):
            return "other"
        return "mine-elsewhere" if holder.get("owner") == person.owner else "me-elsewhere"

    def _run(self, steps: Protocol[Any]) -> Any:
        if self._problem is None:  # one wait is enough for a request
            with self._noting_problem():
                return self._session().run(steps)
        return self._problem

    async def _arun(self, steps: Protocol[Any]) -> Any:
        if self._problem is None:
            with self._noting_problem():
                return await self._session().arun(steps)
        return self._problem

    @contextmanager
    def _noting_problem(self) -> Iterator[None]:
        try:
            yield
        except (LockBackendFailed, LockDocumentDamaged) as error:
            log(INFO, "edit lock not known", error=error)
            text = error.problem if isinstance(error, LockBackendFailed) else str(error)
            self._problem = EditLockStatus(problem=text)
