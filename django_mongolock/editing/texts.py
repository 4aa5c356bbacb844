"""The texts for people about an edit lock."""

from __future__ import annotations

from typing import Final

from django.utils.translation import gettext as _

from ..conf import get_settings
from ..inspection import display
from .edit_lock import EditLockStatus, Editor

#: A state is shown by a word and a shape. Colour only adds to them.
SHAPES: Final = {"mine": "●", "busy": "◆", "free": "○", "idle": "○", "gone": "▲", "away": "▲", "refused": "▲"}


def who(editor: Editor | None) -> str:
    """Return the name of the editor from the reader's view."""
    if editor is not None and editor.who == "mine-elsewhere":
        return _("you, in another tab")
    if editor is not None and editor.who == "me-elsewhere":
        return _("you, in another browser")
    return (editor.name if editor is not None else "") or _("someone else")


def state(status: EditLockStatus, *, had: bool = False) -> str:
    """Return one or two sentences about the editor.

    - had: whether this tab had the lock before.
    """
    if status.problem:
        return _away()
    if status.held:
        return _("You are editing this. Until you save or leave, others can read it, but not change it.")
    if status.editor is None or status.is_mine:
        if had:
            return _("Your edit lock has ended, and no one else is editing this now. What you typed is still here.")
        return _("It is free now: no one is editing this any more.")
    name = who(status.editor)
    if not had:
        return _("This is being edited by %s. You can read it now, and change it when it is free.") % name
    return _("This is now being edited by %s. What you typed is still here to copy; it cannot be saved now.") % name


def _away() -> str:
    """Return the text for an outage of MongoDB."""
    if get_settings().EDIT_FAIL_CLOSED:
        return _("We cannot check at the moment whether someone else is editing this. Until we can, nothing is saved.")
    return _(
        "We cannot check at the moment whether someone else is editing this. You can edit it. When you save, "
        "we check whether someone else has changed it."
    )


def idle() -> str:
    """Return the text for a lock that was released because nothing was typed."""
    time = display.duration(get_settings().EDIT_IDLE or 0)
    return _("Nothing was typed for %s, so others may edit this now. What you typed is still here.") % time


def detail(status: EditLockStatus) -> str:
    """Return since when another editor has the lock, relative and absolute, or who asks this editor to finish."""
    editor, now = status.editor, status.now
    if editor is None or now is None or editor.who == "mine":
        return _release_request(editor.release_requested_by) if editor is not None else ""
    return _("Since %(since)s (%(ago)s), last seen %(seen)s. Without a sign of life it becomes free in %(end)s.") % {
        "since": display.moment(editor.since),
        "ago": display.ago(editor.since, now),
        "seen": display.ago(editor.seen, now),
        "end": display.time_left(editor.until, now),
    }


def _release_request(text: str | None) -> str:
    """Return who asks for the lock, and why. *text* is "who: why", as the lock admin and `release_lock` store it."""
    name, _colon, reason = (text or "").partition(": ")
    name = name.removesuffix(_("%s, in the admin") % "")
    if reason:
        return _("%(name)s asks you to finish: “%(reason)s”") % {"name": name, "reason": reason}
    return _("%s asks you to finish.") % name if name else ""


def gone() -> str:
    """Return the text for an object that is gone, or that the user may not edit any more."""
    return _("This cannot be edited any more: it was deleted, or you may not change it. What you typed is still here.")


def lost(status: EditLockStatus) -> str:
    """Return the text for a save that the lock refused."""
    if status.problem:
        return _("Not saved: we cannot check at the moment whether someone else is editing this. Try again shortly.")
    return _("Not saved: this is now being edited by %s. What you typed is still here.") % who(status.editor)
