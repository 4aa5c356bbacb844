"""`Editing`: one page that edits one object, as one request sees it. For the admin and for views of one's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from asgiref.sync import sync_to_async
from django.core.exceptions import ValidationError
from django.db.models import Model
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse

from ..conf import get_settings
from ..context import view_name
from ..owners import session_owner
from . import form_state, texts
from .edit_lock import EditLock, Person, Standing, edit_key, new_tab
from .form_state import Difference, Shown

#: The parameters of the page's own address: what its script wants of it, and the tab whose place it takes.
ACTION: Final = "edit-lock"
FORMER: Final = "edit-tab"
#: The hidden fields: the tab's name, and what the page was made of. And the button that takes over and saves.
TAB: Final = "edit_lock_tab"
SEAL: Final = "edit_lock_seal"
TAKE_OVER: Final = "edit_lock_take_over"
#: Where a session notes that its browser runs the page's script.
SCRIPT: Final = "_mongolock_edit_script"
#: How long a page may take to load and to beat for the first time, in seconds: one that the browser gave up, as after
#: a double click, keeps the lock no longer.
LOADING: Final = 20.0
PERMISSION: Final = "django_mongolock.take_over_edit_lock"


class Editing:
    """A page that edits *target*, an object or anything else that has a name. Make it with `open()` or `aopen()`.

    response: what the view returns at once, where the request is a message of the page's script and not for the view.
    standing: who has the lock. refusals: why what was sent is not saved. differences: what it would change of what is
    stored now. seal: what the hidden field says that the page was made of ("" where nothing is compared).
    """

    def __init__(self, request: HttpRequest, target: Model | str, *, using: str | None = None) -> None:
        self.request = request
        self.response: HttpResponse | None = None
        self.refusals: list[str] = []
        self.differences: list[Difference] = []
        self.seal = ""
        #: Is the form shown again, or for the first time; or was it saved?
        self.shown = False
        #: Was the object deleted? Then there is nothing to lock.
        self.deleted = False
        self.pk = target.pk if isinstance(target, Model) else None
        self.lock = EditLock(edit_key(target), _person(request), facts={"place": view_name(request)}, using=using)
        self.standing = Standing()

    @classmethod
    def open(
        cls, request: HttpRequest, target: Model | str, *, respond: bool = True, using: str | None = None
    ) -> Editing:
        """Take the lock for the page that is asked for; keep it for what a page sends; answer the page's script.

        respond: answer the script here. With False, call `respond()` with what the form shows.
        """
        editing = cls(request, target, using=using)
        editing.standing = editing._ask()
        if respond and editing.action:
            editing.response = editing.respond()
        return editing

    @classmethod
    async def aopen(cls, request: HttpRequest, target: Model | str, *, using: str | None = None) -> Editing:
        """See open(). In a thread: the session and the permissions are asked, too."""
        return await sync_to_async(cls.open)(request, target, using=using)

    # How it stands

    @property
    def action(self) -> str:
        """What the page's script wants, if it is its request."""
        return self.request.GET.get(ACTION, "") if self.request.method == "POST" else ""

    @property
    def takes(self) -> bool:
        """Does the page's script want the lock again? Then it is told whether its page is still of today."""
        return self.action in ("take", "take-over")

    @property
    def held(self) -> bool:
        """Does this page hold the lock?"""
        return self.standing.held

    @property
    def may_write(self) -> bool:
        """May it be saved, as far as the lock is concerned? Without MongoDB, as MONGOLOCK["EDIT_FAIL_CLOSED"] says."""
        return self.held or (bool(self.standing.problem) and not get_settings().EDIT_FAIL_CLOSED)

    @property
    def readonly(self) -> bool:
        """Is the page for reading only? Not one that shows again what was typed."""
        return not self.may_write and self.request.method != "POST"

    @property
    def may_take_over(self) -> bool:
        """May this user take the lock from who has it? With the permission, or if it is his own in another tab."""
        editor = self.standing.editor
        if editor is None or editor.who == "mine":
            return False
        return editor.who != "somebody" or self.request.user.has_perm(PERMISSION)

    @property
    def state(self) -> str:
        """In a word: mine, busy, free, away, or refused."""
        if self.refusals:
            return "refused"
        if self.standing.problem:
            return "away"
        return "mine" if self.held else "busy" if self.standing.editor else "free"

    # Saving

    def forget(self) -> None:
        """Begin anew, where a save is tried again."""
        self.refusals, self.differences, self.shown = [], [], False

    def take_mine(self) -> Standing:
        """Take the lock for the time of this request, also from another tab of the same user."""
        self.standing = self.lock.take()
        if self.standing.editor is not None and self.standing.editor.who.endswith("elsewhere"):
            self.standing = self.lock.take_over(self.standing.editor.token)
        return self.standing

    def check(self, obj: Model, names: Any, rows: Shown | None = None) -> bool:
        """May what was sent be saved to *obj*, which was read just now? If not, `refusals` say why.

        names: the fields of the form. rows: those of its formsets. Call it in the transaction that saves, and before
        the form has put anything into *obj*.
        """
        sealed = self.request.POST.get(SEAL)
        if not self.may_write:
            self.refusals.append(texts.lost(self.standing))
        if not form_state.is_unchanged(sealed, obj, names, rows):
            self.refusals.append(texts.changed())
        self.seal = form_state.seal(obj, names, rows)
        return not self.refusals

    def refuse(self, form: Any) -> None:
        """Put the refusals into a form that has cleaned what was sent."""
        for text in self.refusals:
            form.add_error(None, ValidationError(text, code="edit_lock"))

    def compare(self, form: Any, stored: Model) -> None:
        """Note what a bound form would change of what is stored now. What was left alone then shows that."""
        had = form_state.unseal(self.request.POST.get(SEAL))
        self.differences += form_state.merge(form, stored, had["page"] if had else None)

    def compare_rows(self, formset: Any, stored: Iterable[Model], title: str) -> None:
        """See compare(), for the rows of a formset. title: what a row is called."""
        had = form_state.unseal(self.request.POST.get(SEAL))
        known = had["rows"].get(formset.prefix, {}) if had else {}
        there = {str(row.pk): row for row in stored}
        for form in formset.initial_forms:
            pk = str(form.instance.pk)
            if pk in there:
                self.differences += form_state.merge(form, there[pk], known.get(pk), f"{title} “{there[pk]}”: ")
        self.differences += form_state.merge_rows(known, there, title)

    def show(self, obj: Model, names: Any, rows: Shown | None = None) -> None:
        """Say what the page shows of *obj*, for the hidden field that `check()` looks at."""
        self.seal = form_state.seal(obj, names, rows)

    def done(self) -> None:
        """What was sent is saved: let others edit. Without it, the lock ends with its lease."""
        self.lock.release()

    async def adone(self) -> None:
        """See done()."""
        await self.lock.arelease()

    # Talking to the page's script

    def respond(self, obj: Model | None = None, names: Any = (), rows: Shown | None = None) -> HttpResponse:
        """What the page's script is told. With *obj*, also whether the page is of today."""
        if self.action == "take-over" and not self._wants_json:
            return HttpResponseRedirect(self.address(**({FORMER: self.lock.tab} if self.held else {})))
        answer: dict[str, Any] = {"state": self.state, "text": texts.state(self.standing, had=self._had)}
        if self._is_idle:
            answer |= {"state": "idle", "text": texts.idle()}
        editor = self.standing.editor
        answer |= {
            "detail": texts.detail(self.standing),
            "mayTakeOver": self.may_take_over,
            "token": str(editor.token) if editor else "",
        }
        if self.held and self.takes:
            answer["tab"] = self.lock.tab
            if obj is not None and not form_state.is_unchanged(self.request.POST.get(SEAL), obj, names, rows):
                answer |= {"text": texts.changed_meanwhile(), "changed": True}
        return _json(answer)

    def gone(self) -> HttpResponse:
        """What the page's script is told when there is nothing to edit any more."""
        self.lock.tab = self.request.POST.get(TAB) or self.lock.tab
        self.lock.release()
        return _json({"state": "gone", "text": texts.gone(), "detail": ""})

    def address(self, **more: str) -> str:
        """The address of this page, without what is only for its script."""
        query = self.request.GET.copy()
        for name in (ACTION, FORMER):
            query.pop(name, None)
        for name, value in more.items():
            query[name] = value
        return f"{self.request.path}?{query.urlencode()}" if query else self.request.path

    def action_address(self, action: str) -> str:
        """Where the page's script, or a button, sends what it wants."""
        return self.address(**{ACTION: action})

    @property
    def context(self) -> Mapping[str, Any]:
        """What the page is told, for its template."""
        settings = get_settings()
        editor = self.standing.editor
        return {
            "editing": self,
            "shape": texts.SHAPES[self.state],
            "text": texts.state(self.standing),
            "detail": texts.detail(self.standing),
            "token": editor.token if editor else "",
            "beat": settings.EDIT_BEAT,
            "lease": texts.lease(),
        }

    # Asking the lock

    def _ask(self) -> Standing:
        sent, lock, tab = self.request.POST, self.lock, self.request.POST.get(TAB, "")
        match self.action:
            case "beat" | "leave" if tab:
                lock.tab = tab
                if self.action == "beat" and not self._has_script:
                    self._note_script()
                return lock.release() if self.action == "leave" or self._is_idle else lock.beat()
            case "" | "take" | "take-over":
                pass
            case _:
                return lock.look()
        if self.action == "take-over" or TAKE_OVER in sent:
            return self._take_over(sent.get(TAKE_OVER, ""), tab)
        if self.request.method not in ("GET", "POST") or _is_prefetch(self.request):
            return lock.look()
        if self.action == "take" or (self.request.method == "GET" and self._has_script):
            lock.lease = min(lock.lease, max(LOADING, 3 * get_settings().EDIT_BEAT))
        former = tab or self.request.GET.get(FORMER, "")
        standing = lock.succeed(former) if former else lock.take()
        editor = standing.editor
        if editor is not None and editor.who == "mine-elsewhere" and self._has_script and not editor.beats:
            return lock.take_over(editor.token)  # that page never came to life: this one was asked for after it
        return standing

    def _take_over(self, token: str, tab: str) -> Standing:
        # It may be free by now, or this very page's.
        self.standing = self.lock.succeed(tab) if tab else self.lock.look()
        if self.held:
            return self.standing
        editor = self.standing.editor
        if editor is None and not self.standing.problem:
            return self.lock.take()
        if self.may_take_over and editor is not None and token == str(editor.token):
            return self.lock.take_over(editor.token)
        return self.standing

    @property
    def _has_script(self) -> bool:
        session = getattr(self.request, "session", None)
        return session is not None and bool(session.get(SCRIPT))

    def _note_script(self) -> None:
        session = getattr(self.request, "session", None)
        if session is not None:
            session[SCRIPT] = True

    @property
    def _is_idle(self) -> bool:
        limit, idle = get_settings().EDIT_IDLE, self.request.POST.get("idle", "")
        return self.action == "beat" and limit is not None and idle.isdecimal() and int(idle[:12]) >= limit

    @property
    def _had(self) -> bool:
        return self.action == "beat" or "had" in self.request.POST

    @property
    def _wants_json(self) -> bool:
        return not self.request.accepts("text/html")


def _json(answer: dict[str, Any]) -> HttpResponse:
    return JsonResponse(answer, headers={"Cache-Control": "no-store"})


def _person(request: HttpRequest) -> Person:
    """Who edits: a user; without one, a login that has a session of its own."""
    owner = session_owner(request) if getattr(request, "session", None) is not None else None
    user = getattr(request, "user", None)
    if user is not None and user.is_authenticated:
        return Person(str(user.pk), user.get_username(), owner)
    return Person(owner or f"nobody:{new_tab()}", "", owner)


def _is_prefetch(request: HttpRequest) -> bool:
    """Does the browser only read ahead? Nobody looks at that page yet, perhaps never."""
    return "prefetch" in request.headers.get("Sec-Purpose", "") or request.headers.get("Purpose") == "prefetch"
