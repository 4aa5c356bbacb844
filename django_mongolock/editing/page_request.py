"""The request of a page that edits, or of its script."""

from __future__ import annotations

from typing import Final

from django.http import HttpRequest

from ..conf import get_settings
from ..context import check_encoding, own_address
from ..keys import person_id
from ..owners import OWNER_KEY, session_owner
from ..versions.forms import FIELD
from .edit_lock import Person, new_tab

#: The parameters of the page's own address: the action of its script, and the tab that this page replaces.
ACTION: Final = "edit-lock"
FORMER: Final = "edit-tab"
#: The hidden field with the tab's name, and the button that takes over and saves.
TAB: Final = "edit_lock_tab"
TAKE_OVER: Final = "edit_lock_take_over"
#: The session key for the fact that the browser runs the page's script.
SCRIPT: Final = "_mongolock_edit_script"
#: The session key for the tabs that have saved, and the largest number of them.
SAVED: Final = "_mongolock_edit_saved"
MOST_SAVED: Final = 10


class PageRequest:
    """A request for a page that edits one object.

    - action: action of the page's script, "" in any other request.
    - tab: name of the tab that sent the request.
    - seal: state from which the tab's page was made.
    - had: whether the tab held the lock before.
    """

    def __init__(self, request: HttpRequest) -> None:
        check_encoding(request)
        self.http = request
        self.is_post = request.method == "POST"
        self.action = request.GET.get(ACTION, "") if self.is_post else ""
        self.tab = request.POST.get(TAB, "")
        self.seal = request.POST.get(FIELD)
        self.had = self.action == "beat" or "had" in request.POST
        self._session = getattr(request, "session", None)
        self._is_known = self._session is not None and OWNER_KEY in self._session

    @property
    def former(self) -> str:
        """The tab that this page replaces, either itself or one that was left."""
        return self.tab or self.http.GET.get(FORMER, "")

    @property
    def token(self) -> str | None:
        """The fencing token of the editor to take over from. None if the request takes nothing over."""
        token = self.http.POST.get(TAKE_OVER)
        return "" if token is None and self.action == "take-over" else token

    @property
    def takes(self) -> bool:
        """Whether the page's script asks for the lock again. The answer then reports whether its page is up to date."""
        return self.action in ("take", "take-over")

    @property
    def only_reads(self) -> bool:
        """Whether to read the lock only. The lock is taken if the page is opened, saved, or asks for it."""
        if self.is_post:
            return self.action not in ("", "take", "take-over")
        # An opened page is neither prefetched nor loaded as an image or in a frame. Another site may cause such loads.
        headers = self.http.headers
        prefetch = "prefetch" in headers.get("Sec-Purpose", "") or headers.get("Purpose") == "prefetch"
        opened = not prefetch and headers.get("Sec-Fetch-Dest", "document") == "document"
        return self.http.method != "GET" or not opened

    @property
    def is_idle(self) -> bool:
        """Whether nothing was typed for so long that the lock is to be released."""
        limit, idle = get_settings().EDIT_IDLE, self.http.POST.get("idle", "")
        return self.action == "beat" and limit is not None and idle.isdecimal() and int(idle[:12]) >= limit

    @property
    def has_script(self) -> bool:
        """Whether this browser is known to run the page's script."""
        return self._session is not None and bool(self._session.get(SCRIPT))

    def note_script(self) -> None:
        """Record that this browser runs the page's script."""
        if self._session is not None and not self.has_script:
            self._session[SCRIPT] = True

    @property
    def saved(self) -> str:
        """The tabs whose forms this session has saved last. Their typed values are no drafts any more."""
        return " ".join(self._session.get(SAVED, ())) if self._session is not None else ""

    def note_saved(self) -> None:
        """Record that the data sent by this tab is saved."""
        if self._session is not None and self.tab:
            self._session[SAVED] = [*self._session.get(SAVED, ()), self.tab][-MOST_SAVED:]

    def person(self) -> Person:
        """Return the editing person: the user, or else a login with a session of its own."""
        owner = session_owner(self.http) if self._session is not None else None
        user = getattr(self.http, "user", None)
        if user is not None and user.is_authenticated:
            return Person(person_id(user), user.get_username(), owner)
        return Person(owner or f"anonymous:{new_tab()}", "", owner)

    def forget_person(self) -> None:
        """Remove the session of a person who holds nothing, such as a visitor who only reads, or a robot."""
        if self._session is not None and not self._is_known:
            self._session.pop(OWNER_KEY, None)

    def address(self, **more: str) -> str:
        """Return the address of this page, without the parameters of its script, and with *more*."""
        query = self.http.GET.copy()
        for name in (ACTION, FORMER):
            query.pop(name, None)
        for name, value in more.items():
            query[name] = value
        return own_address(self.http, query)
