"""`Editing`: one page that edits one object, during one request. The admin and other views use it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

from asgiref.sync import sync_to_async
from django.db import router, transaction
from django.db.models import Model
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.utils.translation import gettext as _

from ..conf import get_settings
from ..context import view_name
from ..inspection import display
from ..versions.retry import open_transaction
from ..versions.saving import Saving, locked_row
from ..versions.seal import is_current, unseal
from . import texts
from .edit_lock import EditLock, EditLockStatus, edit_key
from .page_request import ACTION, FORMER, PageRequest

#: The seconds for a page to load and to beat for the first time. A page that the browser gave up, as after a double
#: click, keeps the lock no longer.
LOADING_TIME: Final = 20.0
PERMISSION: Final = "django_mongolock.take_over_edit_lock"


class Editing(Saving):
    """A page that edits *target*, an object or anything else that has a name. Make it with `open()` or `aopen()`.

    - response: response that the view returns at once, if the request is a message of the page's script.
    - status: state of the lock.
    - refusals: reasons why the sent data is not saved, besides the errors of its form.
    """

    def __init__(self, request: HttpRequest, target: Model | str) -> None:
        super().__init__()
        self.page = PageRequest(request)
        self.response: HttpResponse | None = None
        self.model: Any = target._meta.model if isinstance(target, Model) else None
        self.pk = getattr(target, "pk", None)
        self.lock = EditLock(edit_key(target), self.page.person(), facts={"place": view_name(request)})
        self.status = EditLockStatus()

    @classmethod
    def open(cls, request: HttpRequest, target: Model | str, *, respond: bool = True) -> Editing:
        """Take the lock for a requested page, keep it for a sent form, or answer the page's script.

        - respond: whether to answer the script here. With False, call `respond()` with the object of the form.
        """
        editing = cls(request, target)
        editing.status = editing._ask()
        if not (editing.status.is_mine or editing.status.problem):
            editing.page.forget_person()
        if editing.page.is_post and not (editing.page.action or editing.may_write):
            editing.refusals.append(texts.lost(editing.status))
        if respond and editing.page.action:
            editing.response = editing.respond()
        return editing

    @classmethod
    async def aopen(cls, request: HttpRequest, target: Model | str) -> Editing:
        """See open(). This runs in a thread, since it also reads the session and the permissions."""
        return await sync_to_async(cls.open)(request, target)

    # The holder

    @property
    def held(self) -> bool:
        """Whether this page holds the lock."""
        return self.status.held

    @property
    def may_write(self) -> bool:
        """Whether the lock allows a save. Without MongoDB, MONGOLOCK["EDIT_FAIL_CLOSED"] decides."""
        return self.held or (bool(self.status.problem) and not get_settings().EDIT_FAIL_CLOSED)

    @property
    def readonly(self) -> bool:
        """Whether the page is read-only. A page that shows typed values again is not."""
        return not self.may_write and not self.page.is_post

    @property
    def may_take_over(self) -> bool:
        """Whether this user may take the lock from the editor, by the permission or because the editor is their own
        other tab.
        """
        editor = self.status.editor
        if editor is None or editor.who == "mine":
            return False
        user = getattr(self.page.http, "user", None)
        return editor.who != "other" or (user is not None and user.has_perm(PERMISSION))

    @property
    def state(self) -> str:
        """The state in a word: mine, busy, free, away, or refused."""
        if self.refused:
            return "refused"
        if self.status.problem:
            return "away"
        return "mine" if self.held else "busy" if self.status.editor else "free"

    # Saving

    def try_save(self, form: Any) -> bool:
        """Save a `SealedModelForm` with the sent data, and release the lock. Return whether the form was saved.

        If not, the form gives the reason. Call this outside a transaction. The method reads the object again, and locks
        its row.
        """
        using = router.db_for_write(self.model, instance=form.instance)

        def attempt() -> bool:
            form.instance = locked_row(self.model, using, self.pk) or self.model()
            form.full_clean()
            self.shown = not form.is_valid()
            if not self.shown:
                form.save()
            return not self.shown

        form.saving, form._alone = self, frozenset()
        saved = bool(self.run([using], attempt))
        if saved:
            self.end(using)
        return saved

    def end(self, using: str) -> None:
        """Release the lock when the transaction has ended, if there is one."""
        if open_transaction(using):
            transaction.on_commit(self.done, using=using)
        else:
            self.done()

    def done(self) -> None:
        """Release the lock, since the sent data is saved. Without this call, the lock ends with its lease."""
        self.page.note_saved()
        self.lock.release()

    # Answering the page's script

    def respond(self, obj: Model | None = None) -> HttpResponse:
        """Return the answer to the page's script. With *obj*, it also says whether the page is up to date."""
        if self.page.action == "take-over" and self.page.http.accepts("text/html"):
            return HttpResponseRedirect(self.page.address(**({FORMER: self.lock.tab} if self.held else {})))
        answer: dict[str, Any] = {"state": self.state, "text": texts.state(self.status, had=self.page.had)}
        if self.page.is_idle:
            answer |= {"state": "idle", "text": texts.idle()}
        answer |= {"detail": texts.detail(self.status), "mayTakeOver": self.may_take_over, "token": self._token}
        if self.held and self.page.takes:
            answer["tab"] = self.lock.tab
            if obj is not None and not is_current(unseal(self.page.seal), obj):
                answer["text"] = _(
                    "You can edit this again, but it was changed meanwhile: when you save, you will see what was "
                    "changed."
                )
        return _json(answer)

    def gone(self) -> HttpResponse:
        """Release the lock and tell the page's script that nothing can be edited any more."""
        self.lock.tab = self.page.tab or self.lock.tab
        self.lock.release()
        return _json({"state": "gone", "text": texts.gone(), "detail": ""})

    @property
    def context(self) -> Mapping[str, Any]:
        """The context for the template of the panel."""
        settings = get_settings()
        return {
            "editing": self,
            "person": hashlib.sha256(self.lock.person.id.encode()).hexdigest()[:16],
            "address": self.page.address(),
            "take_over_address": self.page.address(**{ACTION: "take-over"}),
            "shape": texts.SHAPES[self.state],
            "text": texts.state(self.status),
            "detail": texts.detail(self.status),
            "token": self._token,
            "saved": self.page.saved,
            "beat": settings.EDIT_BEAT,
            "lease": display.duration(settings.EDIT_LEASE),
        }

    @property
    def _token(self) -> str:
        return str(self.status.editor.token) if self.status.editor else ""

    # Asking for the lock

    def _ask(self) -> EditLockStatus:
        page, lock = self.page, self.lock
        if page.action in ("beat", "leave") and page.tab:
            return self._keep()
        if page.token is not None and (page.takes or not page.action):
            return self._take_over(page.token)
        if page.only_reads:
            return lock.read()
        if page.action == "take" or (not page.is_post and page.has_script):
            lock.lease = min(lock.lease, max(LOADING_TIME, 3 * get_settings().EDIT_BEAT))
        status = lock.take(page.former)
        editor = status.editor
        is_silent = editor is not None and editor.who == "mine-elsewhere" and not editor.beats
        sent_again = page.is_post and page.tab in page.saved.split()  # the answer to the first time may have been lost
        if editor is not None and is_silent and (page.has_script or sent_again):
            return lock.take_over(editor.token)  # that page never came to life, and this one was requested later
        return status

    def _keep(self) -> EditLockStatus:
        """Beat or release, as the page's script asks."""
        self.lock.tab = self.page.tab
        if self.page.action == "leave" or self.page.is_idle:
            return self.lock.release()
        status = self.lock.beat()
        if status.held or status.problem:
            self.page.note_script()
        return status

    def _take_over(self, token: str) -> EditLockStatus:
        self.status = self.lock.take(self.page.tab)  # the lock may be free by now, or this page's own
        if self.may_take_over and self.status.editor is not None and token == self._token:
            return self.lock.take_over(self.status.editor.token)
        return self.status


def _json(answer: dict[str, Any]) -> HttpResponse:
    return JsonResponse(answer, headers={"Cache-Control": "no-store"})
