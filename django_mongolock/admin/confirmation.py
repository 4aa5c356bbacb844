"""What is asked before locks are taken from their holders, what a form carries of them, and what is reported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from bson import json_util
from bson.errors import BSONError
from django import forms
from django.contrib import messages
from django.core.exceptions import BadRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext, ngettext_lazy

from ..exceptions import LockBackendFailed, LockDocumentDamaged, printable
from ..inspection import display
from ..inspection.kinds import LockKind, Row, find_kind
from ..inspection.named_locks import LockRow
from ..inspection.snapshot import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.utils.functional import _StrPromise as StrPromise

#: How many locks one confirmation may be about.
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
        """Whether it does anything to a lock in this state. Only who is at work can be asked."""
        return row.state in kind.taken if self is FORCE else row.state is State.HELD


FORCE: Final = Action("force_release", gettext_lazy("Force release?"))
ASK: Final = Action("ask_to_release", gettext_lazy("Ask to release?"))


@dataclass(frozen=True)
class Shown:
    """A lock on a page. address: of its own page. chooses: the page offers each of its holders separately."""

    kind: LockKind
    row: Row
    address: str = ""
    chooses: bool = False

    @property
    def value(self) -> str:
        """The lock and its holders in a form."""
        return json_util.dumps([self.kind.name, self.row.key, self.row.seal])

    @property
    def left(self) -> str:
        """In what time it is stale, or for how long it has been."""
        left = self.row.left
        if left is None:
            return "–"
        return (_("in %s") if left > 0 else _("for %s")) % display.duration(left)

    @property
    def next(self) -> str:
        """What happens after a forced release of a named lock. Of several holders, some may keep it."""
        if not isinstance(self.row, LockRow):
            return ""
        lock = self.row.lock
        if lock.state is State.KEPT:
            end = display.moment(lock.expires_at or lock.now)
            return _("Kept until %s. If you free it, the job will run again when it is next called.") % end
        waiting, only_one = lock.waiting, lock.holding == 1
        if not waiting:
            return _("No waiters: the lock will be free.") if only_one else _("No waiters.")
        if only_one:
            text = ngettext(
                "%d waiter: it gets the lock next.", "%d waiters: the first in the queue gets the lock next.", waiting
            )
        else:
            text = ngettext(
                "%d waiter. It gets the lock when the remaining holders release it.",
                "%d waiters. The first in the queue gets it when the remaining holders release it.",
                waiting,
            )
        return text % waiting


def read_shown(values: Sequence[str]) -> tuple[Rows, list[str]]:
    """Read again the locks of a form, with the holders that were shown; return also the keys of those that have other
    holders now. Raises BadRequest for values that no form of ours has, and LockBackendFailed."""
    if len(values) > MAX_SELECTED:
        raise BadRequest("too many locks")
    found: dict[str, tuple[LockKind, list[tuple[Any, Any]]]] = {}
    rows: Rows = []
    changed: dict[str, None] = {}
    try:
        for value in values:
            name, key, seal = json_util.loads(value)
            found.setdefault(name, (find_kind(name), []))[1].append((key, seal))
        for kind, shown in found.values():
            again = kind.again(shown)
            rows += [(kind, row) for row in again]
            there = {str(row.key) for row in again}
            changed |= dict.fromkeys(text for key, _seal in shown if (text := str(key)) not in there)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError, BSONError):
        raise BadRequest("not a lock of this site") from None
    return rows, list(changed)


@dataclass
class Outcome:
    """The result for each lock. done: what was taken, or asked. changed: the keys of locks with other holders than
    those shown. damaged: why locks could not be judged, by key. problem: why the others were not processed."""

    done: Rows = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    problem: str = ""


def carry_out(rows: Rows, changed: list[str], act: Callable[[Any, Any], Any]) -> Outcome:
    """Act on these locks, one by one. One that fails does not stop the others; a server that is away does."""
    outcome = Outcome(changed=changed)
    try:
        for kind, row in rows:
            try:
                done = act(kind, row)
            except LockDocumentDamaged as error:
                outcome.damaged[str(row.key)] = error.problem
                continue
            if done:
                outcome.done.append((kind, row))
            else:
                outcome.changed.append(str(row.key))
    except LockBackendFailed as error:
        outcome.problem = error.problem
    return outcome


#: Why a selected lock is skipped, according to its state.
_LEFT_OUT: Final = {
    State.FREE: ngettext_lazy(
        "%(count)d of the selected locks was skipped because it is free now: %(keys)s",
        "%(count)d of the selected locks were skipped because they are free now: %(keys)s",
        "count",
    ),
    State.KEPT: ngettext_lazy(
        "%(count)d of the selected locks was skipped because its work is done, and no holder can be asked: %(keys)s",
        "%(count)d of the selected locks were skipped because their work is done, and no holder can be asked: %(keys)s",
        "count",
    ),
    State.STALE: ngettext_lazy(
        "%(count)d of the selected locks was skipped because it is stale, and the next process that asks gets it: "
        "%(keys)s",
        "%(count)d of the selected locks were skipped because they are stale, and the next process that asks gets "
        "them: %(keys)s",
        "count",
    ),
    State.DAMAGED: ngettext_lazy(
        "%(count)d of the selected locks was skipped because its document is damaged: %(keys)s",
        "%(count)d of the selected locks were skipped because their documents are damaged: %(keys)s",
        "count",
    ),
}


def left_out(action: Action, rows: Rows) -> Iterator[str]:
    """Which of the selected locks are skipped, and why."""
    skipped = [row for kind, row in rows if not action.meets(kind, row)]
    for state, text in _LEFT_OUT.items():
        if keys := [str(row.key) for row in skipped if row.state is state]:
            yield text % {"count": len(keys), "keys": _first(keys)}


def log_entry(action: Action, row: Row, reason: str) -> str:
    """The entry in the log of the admin."""
    if not isinstance(row, LockRow):
        text = _("Forced its release; it was held by %s.") % printable(row.holder)
    elif action is ASK:
        text = ngettext(
            "Asked its holder to release it (fencing token %s).",
            "Asked its holders to release it (fencing tokens %s).",
            len(row.seal),
        ) % _numbers(row.seal)
    else:
        text = ngettext(
            "Forced its release; its holder had the fencing token %s.",
            "Forced its release; its holders had the fencing tokens %s.",
            len(row.seal),
        ) % _numbers(row.seal)
    why = _("Reason: %s") % printable(reason)  # not inside the f-string: xgettext does not look there
    return f"{text} {why}" if reason else text


def _numbers(tokens: Sequence[int]) -> str:
    return ", ".join(map(str, tokens[:10])) + (" …" if len(tokens) > 10 else "")


def report(action: Action, outcome: Outcome) -> Iterator[tuple[int, str]]:
    """The messages to the user."""
    if count := len(outcome.done):
        if action is ASK:
            text = ngettext(
                "The holder of %d lock was asked to release it. It learns of the request at its next renewal, and "
                "decides for itself.",
                "The holders of %d locks were asked to release them. They learn of the request at their next renewal, "
                "and decide for themselves.",
                count,
            )
        else:
            text = ngettext("%d lock was taken from its holder.", "%d locks were taken from their holders.", count)
        yield messages.SUCCESS, text % count
    if count := len(outcome.changed):
        text = ngettext(
            "%(count)d lock was not changed because its holder has changed since it was shown: %(keys)s",
            "%(count)d locks were not changed because their holders have changed since they were shown: %(keys)s",
            count,
        )
        yield messages.WARNING, text % {"count": count, "keys": _first(outcome.changed)}
    for key, problem in outcome.damaged.items():
        text = _("The document of “%(key)s” is damaged, and was not changed: %(problem)s")
        yield messages.ERROR, text % {"key": key, "problem": problem}
    if outcome.problem:
        yield messages.ERROR, _("The remaining locks were not processed: %s.") % outcome.problem


def _first(keys: Sequence[str]) -> str:
    return ", ".join(keys[:5]) + (" …" if len(keys) > 5 else "")
