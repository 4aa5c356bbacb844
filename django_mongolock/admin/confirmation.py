"""What an action on locks asks before it is done, and what it reports afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from django import forms
from django.contrib import messages
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext, ngettext_lazy

from ..inspection import display
from ..inspection.snapshot import LockSnapshot, State
from .release import Outcome, as_shown

if TYPE_CHECKING:
    from django.utils.functional import _StrPromise as StrPromise


class ReasonForm(forms.Form):
    """The reason."""

    reason = forms.CharField(
        label=gettext_lazy("Reason"),
        max_length=200,
        widget=forms.TextInput(attrs={"class": "vTextField", "autocomplete": "off", "aria-describedby": "why"}),
    )

    def __init__(self, kind: Kind, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(data)
        self.fields["reason"].required = kind.needs_reason


@dataclass(frozen=True)
class Kind:
    """An action that a page confirms, on locks in these states."""

    name: str
    title: StrPromise
    needs_reason: bool
    states: tuple[State, ...]


FORCE: Final = Kind("force_release", gettext_lazy("Force release?"), True, (State.HELD, State.KEPT))
ASK: Final = Kind("ask_to_release", gettext_lazy("Ask to release?"), False, (State.HELD,))


@dataclass(frozen=True)
class Row:
    """A lock on the page. chooses: the page offers each of its holders separately."""

    lock: LockSnapshot
    chooses: bool = False

    @property
    def shown(self) -> str:
        """The lock in the form."""
        return as_shown(self.lock.key, self.lock.tokens)

    @property
    def next(self) -> str:
        """What happens after a forced release. Of several holders, some may keep the lock."""
        if self.lock.state is State.KEPT:
            end = display.moment(self.lock.expires_at or self.lock.now)
            return _("Kept until %s. If you free it, the job will run again when it is next called.") % end
        waiting, only_one = self.lock.waiting, self.lock.holding == 1
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


def left_out(kind: Kind, locks: Sequence[LockSnapshot]) -> Iterator[str]:
    """Which of the selected locks are skipped, and why."""
    for state, text in _LEFT_OUT.items():
        if state not in kind.states and (keys := [str(lock.key) for lock in locks if lock.state is state]):
            yield text % {"count": len(keys), "keys": _first(keys)}


def log_entry(kind: Kind, tokens: Sequence[int], reason: str) -> str:
    """The entry in the log of the admin."""
    numbers = ", ".join(map(str, tokens[:10])) + (" …" if len(tokens) > 10 else "")
    if kind is ASK:
        text = ngettext(
            "Asked its holder to release it (fencing token %s).",
            "Asked its holders to release it (fencing tokens %s).",
            len(tokens),
        )
    else:
        text = ngettext(
            "Forced its release; its holder had the fencing token %s.",
            "Forced its release; its holders had the fencing tokens %s.",
            len(tokens),
        )
    text %= numbers
    why = _("Reason: %s") % reason  # not inside the f-string: xgettext does not look there
    return f"{text} {why}" if reason else text


def report(kind: Kind, outcome: Outcome) -> Iterator[tuple[int, str]]:
    """The messages to the user."""
    if count := len(outcome.done):
        if kind is ASK:
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
