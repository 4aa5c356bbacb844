"""Who has an edit lock, as one tab sees it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from ..engine import clock

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
class Belief:
    """The time for which this process knows that the tab has the lock, by the local clock; true until then.

    It is one lease, counted from before a command was sent that is known to have taken or renewed the lock. What is
    only read does not make it longer.
    """

    until: float = 0.0
    now: Callable[[], float] = clock.now
    pid: int = 0

    def __bool__(self) -> bool:
        return self.pid == os.getpid() and self.now() < self.until


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
