"""Asking for locks and taking them: a page that says what will happen and who has them; then it is done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext, ngettext_lazy

from ..engine.document import tidy_fact
from ..inspect.snapshot import State
from ..models import Lock
from . import release

if TYPE_CHECKING:
    from django.utils.functional import _StrPromise as StrPromise

    from .lock_admin import LockAdmin

#: How many holders one page shows; the others are left alone.
SHOWN: Final = 100


class ReasonForm(forms.Form):
    """Why it is done."""

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
    """One of the two things that can be done to a holder."""

    name: str
    title: StrPromise
    needs_reason: bool


FORCE: Final = Kind("force_release", gettext_lazy("Force release?"), needs_reason=True)
ASK: Final = Kind("ask_to_release", gettext_lazy("Ask to release?"), needs_reason=False)


@dataclass(frozen=True)
class Row:
    """A lock on the page. chooses: may single ones of its holders be chosen?"""

    lock: Lock
    chooses: bool = False

    @property
    def shown(self) -> str:
        """What the form carries of it."""
        return release.as_shown(str(self.lock.key), self.lock.seen.tokens)

    @property
    def next(self) -> str:
        """What becomes of it when it is taken. Of several holders some may keep it."""
        waiting, alone = self.lock.seen.waiting, self.lock.seen.holding == 1
        if not waiting:
            return _("Nobody waits for it: it will be free.") if alone else _("Nobody waits for it.")
        if alone:
            text = ngettext(
                "%d waits for it, and gets it next.", "%d wait for it: the first of them gets it next.", waiting
            )
        else:
            text = ngettext(
                "%d waits for it, and gets it as soon as whoever still holds it lets that be.",
                "%d wait for it: the first gets it as soon as whoever still holds it lets that be.",
                waiting,
            )
        return text % waiting


def question(
    admin: LockAdmin, request: HttpRequest, kind: Kind, locks: Sequence[Lock], form: ReasonForm | None = None
) -> HttpResponse | None:
    """The page that asks; None where nobody holds any of these locks."""
    held = [lock for lock in locks if lock.seen.state is State.HELD]
    if not held:
        admin.message_user(request, _("Nobody holds any of the selected locks now."), messages.WARNING)
        return None
    rows = [Row(lock, chooses=len(held) == 1 and len(lock.seen.tokens) > 1) for lock in held]
    context = {
        "title": kind.title,
        "kind": kind.name,
        "rows": rows,
        "left_out": list(_left_out(locks)),
        "filters": request.POST.get("filters") or request.GET.urlencode(),
        "back": request.POST.get("back", ""),
        "way_back": admin.way_back(request),
        "form": form or ReasonForm(kind),
    }
    return admin.page(request, "incident", context)


def answer(admin: LockAdmin, request: HttpRequest, kind: Kind) -> HttpResponse:
    """Do what was confirmed, to those grants that were shown; ask again if no reason was given that is needed."""
    shown = release.read_shown(request.POST.getlist("lock"))
    if not shown:
        admin.message_user(request, _("No holder was chosen: nothing was done."), messages.WARNING)
        return HttpResponseRedirect(admin.way_back(request))
    form = ReasonForm(kind, request.POST)
    if not form.is_valid():
        asked = question(admin, request, kind, _again(admin, request, shown), form)
        return asked or HttpResponseRedirect(admin.way_back(request))
    by, reason = tidy_fact(request.user.get_username()), tidy_fact(form.cleaned_data["reason"])
    act = release.asking(by, _("%s, in the admin") % by, reason) if kind is ASK else release.forcing(by, reason)
    outcome = release.carry_out(admin.store(), shown, act)
    for key, tokens in outcome.done.items():
        admin.log(request, key, _written(kind, tokens, reason))
    _tell(admin, request, kind, outcome)
    return HttpResponseRedirect(admin.way_back(request))


def _again(admin: LockAdmin, request: HttpRequest, shown: Mapping[str, Sequence[int]]) -> list[Lock]:
    """The same locks as they are now, but only the holders that had been shown: nobody has read of the others."""
    locks = admin.read(request, list(shown), SHOWN)
    for lock in locks:
        known = tuple(holder for holder in lock.seen.holders if holder.token in shown[str(lock.key)])
        lock.seen = replace(lock.seen, holders=known, holding=len(known))
    return [lock for lock in locks if lock.seen.holders]


#: Why nothing is done to a selected lock, by the state in which it is.
_LEFT_OUT: Final = {
    State.FREE: ngettext_lazy(
        "%(count)d of the selected locks is left out, since nobody holds it now: %(keys)s",
        "%(count)d of the selected locks are left out, since nobody holds them now: %(keys)s",
        "count",
    ),
    State.STALE: ngettext_lazy(
        "%(count)d of the selected locks is left out, since it is stale, and whoever asks next gets it: %(keys)s",
        "%(count)d of the selected locks are left out, since they are stale, and whoever asks next gets them: %(keys)s",
        "count",
    ),
    State.DAMAGED: ngettext_lazy(
        "%(count)d of the selected locks is left out, since its document is damaged: %(keys)s",
        "%(count)d of the selected locks are left out, since their documents are damaged: %(keys)s",
        "count",
    ),
}


def _left_out(locks: Sequence[Lock]) -> Iterator[str]:
    """Which of the selected locks nothing is done to, and why."""
    for state, text in _LEFT_OUT.items():
        if keys := [str(lock.key) for lock in locks if lock.seen.state is state]:
            yield text % {"count": len(keys), "keys": _some(keys)}


def _written(kind: Kind, tokens: Sequence[int], reason: str) -> str:
    """What the log of the admin says."""
    numbers = ", ".join(map(str, tokens[:10])) + (" …" if len(tokens) > 10 else "")
    if kind is ASK:
        text = ngettext(
            "Asked its holder to release it (fencing token %s).",
            "Asked its holders to release it (fencing tokens %s).",
            len(tokens),
        )
    else:
        text = ngettext(
            "Force released; its holder had fencing token %s.",
            "Force released; its holders had fencing tokens %s.",
            len(tokens),
        )
    text %= numbers
    why = _("Reason: %s") % reason  # not inside of the f-string: xgettext does not look there
    return f"{text} {why}" if reason else text


def _tell(admin: LockAdmin, request: HttpRequest, kind: Kind, outcome: release.Outcome) -> None:
    if count := len(outcome.done):
        if kind is ASK:
            text = ngettext(
                "The holder of %d lock was asked. It learns of it at its next renewal, and does as it sees fit.",
                "The holders of %d locks were asked. They learn of it at their next renewal, and do as they see fit.",
                count,
            )
        else:
            text = ngettext("%d lock was taken from its holder.", "%d locks were taken from their holders.", count)
        admin.message_user(request, text % count, messages.SUCCESS)
    if count := len(outcome.gone):
        text = ngettext(
            "%(count)d lock was left alone, since its holder is not the one that was shown any more: %(keys)s",
            "%(count)d locks were left alone, since their holders are not those that were shown any more: %(keys)s",
            count,
        )
        admin.message_user(request, text % {"count": count, "keys": _some(outcome.gone)}, messages.WARNING)
    for key, problem in outcome.damaged.items():
        text = _("The document of “%(key)s” is damaged and was left as it is: %(problem)s")
        admin.message_user(request, text % {"key": key, "problem": problem}, messages.ERROR)
    if outcome.problem:
        admin.message_user(request, _("The rest was not done: %s.") % outcome.problem, messages.ERROR)


def _some(keys: Sequence[str]) -> str:
    return ", ".join(keys[:5]) + (" …" if len(keys) > 5 else "")
