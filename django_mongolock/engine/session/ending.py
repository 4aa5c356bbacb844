"""The end of a grant: the one function by which a session is through with it.

How a grant ends, who says so, and what may be left of it in the document then:

- REFUSED: its caller, who waits for it no more. Nothing is left; where that is not known, ABANDONED comes first.
- RELEASED: its caller, whose command has removed it. Nothing is left, unless an election undoes that: see `releases`.
- HANDED_OVER: its caller, whose command has put another grant in its place: a downgrade, a parked lock.
- ABANDONED: its caller, or the heartbeat where no caller is left, and it is not known how it stands. It may be there,
  or a command that adds it on its way: `cleanup` sees to it in the background that it is gone.
- LOST: the heartbeat, whose clock is past its deadline, or a command that should have found it. Where it was taken
  away, only a copy of its own command may be left; else the grant. `cleanup` removes either.

Each may come again, also after another one: only the first is reported. When the process ends, `Session.close` releases
in bulk what is left, and what had no answer in time stays until its lease ends.
"""

from __future__ import annotations

import os
from enum import Enum
from typing import Final

from .cleanup import Cleanup
from .grant import TAKEN, Grant, State
from .shared import Shared


class How(Enum):
    """How a grant ends: see the table of this module."""

    REFUSED = "refused"
    RELEASED = "released"
    HANDED_OVER = "handed over"
    ABANDONED = "abandoned"
    LOST = "lost"


REFUSED: Final = How.REFUSED
RELEASED: Final = How.RELEASED
HANDED_OVER: Final = How.HANDED_OVER
ABANDONED: Final = How.ABANDONED
LOST: Final = How.LOST


class Ending:
    """Ends the grants of a session. May be called from any thread."""

    def __init__(self, session: Shared, cleanup: Cleanup) -> None:
        self._session = session
        self._cleanup = cleanup

    def end(self, grant: Grant, how: How, *, stays: bool = False, noticed: bool = False, reason: str = "") -> None:
        """Be through with *grant*: renew it no more, have removed what may be left of it, and report it once.

        stays: an abandoned one was held, and its minimum hold is to last. noticed: the session has noticed the end,
        rather than the caller. reason: why a refused one is not asked for any more.
        """
        if how is LOST and grant.state is not State.LOST:
            return  # another thread has just released it, and sees to it
        if how is ABANDONED:
            grant.release()
        is_news = self.forget(grant)
        # Of a lost grant that was taken away, only a copy of its command can be left: that must not bring it back.
        if how is ABANDONED or (how is LOST and is_news and (grant.reason != TAKEN or grant.in_doubt)):
            if self._session.pid != os.getpid():
                return
            self._cleanup.ensure_removed(grant, stays=stays)
        grant.owner_ref = None
        if how is REFUSED:
            self._session.notifications.not_acquired(grant, reason, self._session.now() - grant.waiting.began)
        else:
            self._session.notifications.ended(grant, noticed=noticed)

    def forget(self, grant: Grant) -> bool:
        """Renew it no more, and let the next of its line ask. Return whether it was renewed until now."""
        was_held = self._session.registry.by_line.get(grant.line) is grant
        known = self._session.registry.forget(grant)
        if was_held and grant.line in self._session.queue.lines:
            self._session.queue.wake_first(grant.line)
        return known

    def taken(self, grant: Grant, *, by_release: bool = False, noticed: bool = False) -> bool:
        """End *grant*, which a command should have found in its document. Return whether that it is lost is news.

        by_release: it was the command that was to release it, so the grant is not held any more.
        """
        if is_news := grant.lose(TAKEN, by_release=by_release):
            self.end(grant, LOST, noticed=noticed)
        return is_news
