"""The confirmation of actions on locks: the question, the contents of the form, and the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from bson import json_util
from bson.errors import BSONError
from django import forms
from django.contrib import messages
from django.core.exceptions import BadRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..exceptions import printable
from ..inspection import display
from ..inspection.kinds import LockKind, Row, kinds
from ..inspection.named_locks import LockRow, NamedLocks
from ..inspection.snapshot import ShownState

if TYPE_CHECKING:
    from django.utils.functional import _StrPromise as StrPromise

#: The largest number of locks in one confirmation.
MAX_SELECTED: Final = 100

#: Locks with their kinds.
Rows = list[tuple[LockKind, Row]]


class ReasonForm(forms.Form):
    """The reason."""

    reason = forms.CharField(
        label=gettext_lazy("Reason"),
        max_length=200,
        widget=forms.TextInput(attrs={"class": "vTextField", "autocomplete": "off", "aria-describedby": "why"}),
    )

    def __init__(self, action: Action, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(data)
        self.fields["reason"].required = action is FORCE


@dataclass(frozen=True)
class Action:
    """An action that a page confirms."""

    name: str
    title: StrPromise

    def meets(self, kind: LockKind, row: Row) -> bool:
        """Return whether the action affects a lock in this state. Only a holder at work can be asked."""
        return row.state in kind.taken if self is FORCE else row.state is ShownState.HELD


FORCE: Final = Action("force_release", gettext_lazy("Force release?"))
ASK: Final = Action("ask_to_release", gettext_lazy("Ask to release?"))


@dataclass(frozen=True)
class Shown:
    """A lock on a page.

    - address: address of the lock's own page.
    - chooses: whether the page offers each of its holders separately.
    """

    kind: LockKind
    row: Row
    address: str = ""
    chooses: bool = False

    @property
    def value(self) -> str:
        """The lock and its holders as a form carries them."""
        return json_util.dumps([self.kind.name, self.row.key, self.row.seal])

    @property
    def left(self) -> str:
        """The time until the lock is stale, or since it has been."""
        left = self.row.left
        if left is None:
            return "–"
        return (_("in %s") if left > 0 else _("for %s")) % display.duration(left)

    @property
    def next(self) -> str:
        """The consequence of a forced release of a named lock. If there are several holders, some may keep the lock."""
        if not isinstance(self.row, LockRow):
            return ""
        lock = self.row.lock
        if lock.state is ShownState.KEPT:
            end = display.moment(lock.expires_at or lock.now)
            return _("Kept until %s. If you free it, the job will run again when it is next called.") % end
        if not lock.waiting:
            return _("No waiters: the lock will be free.") if lock.holding == 1 else self.waiters
        first = next((display.who(each) for each in lock.waiters), "?")
        then = (
            _("Then “%s” gets the lock.")
            if lock.holding == 1
            else _("When all holders have released it, “%s” gets it.")
        )
        return f"{self.waiters} {then % first}"

    @property
    def waiters(self) -> str:
        """The number of waiters in words."""
        waiting = self.row.lock.waiting if isinstance(self.row, LockRow) else 0
        return ngettext("%d waiter.", "%d waiters.", waiting) % waiting if waiting else _("No waiters.")


def read_shown(values: Sequence[str], *, named: bool = False) -> tuple[Rows, list[str]]:
    """Read again the locks of a form, with the holders that were shown.

    Return also the keys of the locks that have other holders now. Raises BadRequest for values that no form of ours
    contains, and LockBackendFailed.

    - named: whether the form has only named locks.
    """
    if len(values) > MAX_SELECTED:
        raise BadRequest("too many locks")
    known = {kind.name: kind for kind in kinds() if not named or isinstance(kind, NamedLocks)}
    found: dict[str, tuple[LockKind, list[tuple[Any, Any]]]] = {}
    rows: Rows = []
    changed: dict[str, None] = {}
    try:
        for value in values:
            name, key, seal = json_util.loads(value)
            found.setdefault(name, (known[name], []))[1].append((key, seal))
        for kind, shown in found.values():
            again = kind.again(shown)
            rows += [(kind, row) for row in again]
            there = {str(row.key) for row in again}
            changed |= dict.fromkeys(text for key, _seal in shown if (text := str(key)) not in there)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError, BSONError):
        raise BadRequest("not a lock of this site") from None
    return rows, list(changed)


#: The reason why a selected lock is skipped, by its state.
_LEFT_OUT: Final = {
    ShownState.FREE: gettext_lazy("Skipped because it is free now: %s"),
    ShownState.KEPT: gettext_lazy("Skipped because its work is done, and no holder can be asked: %s"),
    ShownState.STALE: gettext_lazy("Skipped because it is stale, and the next process that asks gets it: %s"),
    ShownState.DAMAGED: gettext_lazy("Skipped because its document is damaged: %s"),
}


def left_out(action: Action, rows: Rows) -> Iterator[str]:
    """Yield a text for each reason that skips some of the selected locks."""
    skipped = [row for kind, row in rows if not action.meets(kind, row)]
    for state, text in _LEFT_OUT.items():
        if keys := [str(row.key) for row in skipped if row.state is state]:
            yield text % _first(keys)


def log_entry(action: Action, row: Row, reason: str) -> str:
    """Return the entry in the log of the admin."""
    text = (
        _("Asked for its release; it is held by %s.") if action is ASK else _("Forced its release; it was held by %s.")
    )
    who = printable(row.holder)
    if isinstance(row, LockRow):
        who = _("%(holder)s, fencing token %(tokens)s") % {"holder": who, "tokens": _first(list(map(str, row.seal)))}
    why = _("Reason: %s") % printable(reason)  # not inside the f-string: xgettext does not look there
    return f"{text % who} {why}" if reason else text % who


def report(action: Action, done: int, changed: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield the messages to the user about the locks taken or asked, and about the locks with other holders than those
    shown.
    """
    if done:
        if action is ASK:
            text = ngettext(
                "The holder of %d lock was asked to release it. It learns of the request at its next renewal, and "
                "decides for itself.",
                "The holders of %d locks were asked to release them. They learn of the request at their next renewal, "
                "and decide for themselves.",
                done,
            )
        else:
            text = ngettext("%d lock was taken from its holder.", "%d locks were taken from their holders.", done)
        yield messages.SUCCESS, text % done
    if count := len(changed):
        text = ngettext(
            "%(count)d lock was not changed because its holder has changed since it was shown: %(keys)s",
            "%(count)d locks were not changed because their holders have changed since they were shown: %(keys)s",
            count,
        )
        yield messages.WARNING, text % {"count": count, "keys": _first(changed)}


def _first(keys: Sequence[str]) -> str:
    return ", ".join(map(printable, keys[:5])) + display.more(len(keys) - 5)
