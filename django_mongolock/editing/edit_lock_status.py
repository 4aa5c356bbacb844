"""Who has an edit lock, as one tab sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

from ..engine.lock.detached import Belief
from ..engine.rule.replies import Reply
from ..engine.text_checks import tidy_fact
from ..exceptions import printable

#: mine: this tab has it. mine-elsewhere: another tab of the same login. me-elsewhere: the same user, another login.
Who = Literal["mine", "mine-elsewhere", "me-elsewhere", "other"]


@dataclass(frozen=True, slots=True)
class Person:
    """A person who edits. id: identifies the user, whatever the name. owner: their login (`session_owner`)."""

    id: str
    name: str = ""
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class Editor:
    """The holder of an edit lock. Times are by the server's clock, for people.

    since: when it was taken. seen: the last beat. until: when it ends without another. token: the fencing token, which
    is larger for every later editor. beats: whether there has been a beat. release_requested_by: who asks the editor
    to finish, and why.
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
    """The editor who holds an edit lock at the server's time *now*, if any; or why that is unknown (`problem`)."""

    editor: Editor | None = None
    now: datetime | None = None
    problem: str = ""
    belief: Belief = field(default=Belief(), repr=False)

    @property
    def held(self) -> bool:
        """Whether this tab holds the lock. It does not any more when its lease is over without another beat."""
        return self.is_mine and bool(self.belief)

    @property
    def is_mine(self) -> bool:
        """Whether the lock document says that this tab holds the lock; see `held`."""
        return self.editor is not None and self.editor.who == "mine"

    @property
    def is_others(self) -> bool:
        """Whether another user holds the lock."""
        return self.editor is not None and self.editor.who == "other"

    @property
    def free(self) -> bool:
        """Whether it is known that there is no editor."""
        return self.editor is None and not self.problem


def read_status(reply: Reply, grant: str, person: Person, belief: Belief) -> EditLockStatus:
    """Return the status for the tab of *person* that holds the lock under the id *grant*, if it does."""
    holder = reply.mine or reply.theirs
    # For people, by the server's clock: whether it is free is decided by the server when a command comes.
    if holder is None or reply.now is None or holder["until"] <= reply.now:
        return EditLockStatus(None, reply.now)
    renewed = holder["until"] - timedelta(milliseconds=holder["server_lease"])
    requested_by = holder.get("release_requested_by")
    editor = Editor(
        who=_who_has(holder, grant, person),
        name=printable(holder.get("user") or ""),
        since=holder["acquired_at"],
        seen=max(holder["acquired_at"], renewed),
        until=holder["until"],
        token=holder["token"],
        beats=renewed > holder["acquired_at"],
        release_requested_by=printable(requested_by) if requested_by else None,
    )
    return EditLockStatus(editor, reply.now, belief=belief)


def _who_has(holder: Mapping[str, Any], grant: str, person: Person) -> Who:
    if holder["grant"] == grant:
        return "mine"
    if not person.id or holder.get("editor") != tidy_fact(person.id):
        return "other"
    return "mine-elsewhere" if holder.get("owner") == person.owner else "me-elsewhere"
