"""What people read about an edit lock."""

from __future__ import annotations

from typing import Final

from django.utils.translation import gettext as _

from ..conf import get_settings
from ..inspect import display
from .edit_lock import Editor, Standing

#: A state is told by word and by shape; colour only comes on top.
SHAPES: Final = {"mine": "●", "busy": "◆", "free": "○", "idle": "○", "gone": "▲", "away": "▲", "refused": "▲"}


def who(editor: Editor) -> str:
    """Whom the reader would call it."""
    if editor.who == "mine-elsewhere":
        return _("you, in another tab")
    if editor.who == "me-elsewhere":
        return _("you, in another browser")
    return editor.name or _("somebody")


def state(standing: Standing, *, had: bool = False) -> str:
    """In one sentence or two, how it stands. had: this tab had the lock before."""
    if standing.problem:
        return away()
    if standing.held:
        return _("You are editing this. Until you save or leave, others can read it and not change it.")
    if standing.editor is None or standing.is_mine:
        return _free(had=had)
    name = who(standing.editor)
    if not had:
        return _("This is being edited: %s. You can read it; you can change it when it is free.") % name
    return (
        _("This is now being edited: %s. What you typed is still here, to be copied; it cannot be saved just now.")
        % name
    )


def _free(*, had: bool) -> str:
    if had:
        return _("Your edit lock has ended, and nobody else edits this now. What you typed is still here.")
    return _("It is free now: nobody edits this any more.")


def away() -> str:
    """MongoDB cannot be asked."""
    if get_settings().EDIT_FAIL_CLOSED:
        return _("It cannot be told just now whether somebody else edits this. Until it can, nothing is saved.")
    return _(
        "It cannot be told just now whether somebody else edits this. You can edit it: when you save, "
        "it is looked whether anybody has changed it meanwhile."
    )


def idle() -> str:
    """It was given back, as nobody did anything."""
    time = display.duration(get_settings().EDIT_IDLE or 0)
    return _("Nothing was typed for %s, so others may edit this now. What you typed is still here.") % time


def gone() -> str:
    """There is nothing to edit any more."""
    return _("This cannot be edited any more: it was deleted, or you may not change it. What you typed is still here.")


def detail(standing: Standing) -> str:
    """Since when, and when last seen: relative and absolute, for people, by the server's clock."""
    editor, now = standing.editor, standing.now
    if editor is None or now is None or editor.who == "mine":
        return _asks(editor.asks) if editor is not None and editor.asks else ""
    parts = {"since": display.moment(editor.since), "ago": display.ago(editor.since, now)}
    seen = {"seen": display.ago(editor.seen, now), "end": display.time_left(editor.until, now)}
    return _("Since %(since)s (%(ago)s), last seen %(seen)s. Without a sign of life it is free in %(end)s.") % {
        **parts,
        **seen,
    }


def _asks(text: str) -> str:
    """Who asks for the lock, and why: "who: why", as the lock admin and the command `release_lock` put it."""
    name, _colon, reason = text.partition(": ")
    name = name.removesuffix(_("%s, in the admin") % "")  # where else?
    if reason:
        return _("%(name)s asks you to finish: “%(reason)s”") % {"name": name, "reason": reason}
    return _("%s asks you to finish.") % name


def lost(standing: Standing) -> str:
    """Why it was not saved, if the lock is why."""
    if standing.problem:
        return _("Not saved: it cannot be told just now whether somebody else edits this. Try again in a moment.")
    name = who(standing.editor) if standing.editor else _("somebody")
    return _("Not saved: this is now being edited: %s. What you typed is still here.") % name


def changed() -> str:
    """Why it was not saved: somebody was faster."""
    return _("Not saved: this was changed while you were editing it. Look at both versions, then save again.")


def deleted() -> str:
    """Why it was not saved: it is gone."""
    return _("Not saved: this was deleted while you were editing it. Save again to make it anew.")


def lease() -> str:
    """How long it lasts without JavaScript."""
    return display.duration(get_settings().EDIT_LEASE)


def changed_meanwhile() -> str:
    """What was typed was typed into an older version."""
    return _("You may edit again, but this was changed meanwhile: when you save, you are shown both versions.")
