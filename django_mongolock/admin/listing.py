"""The list of locks: which are shown, in which order, and how they are read.

Made for a million documents: one command for a page, and a second one that counts where there is more than that page.
Each goes by an index, reads no more than what is held at the moment, and nothing is counted beyond `CAP`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Literal

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ORDER_VAR, SEARCH_VAR, ChangeList
from django.core.paginator import Paginator
from django.db.models import Q, QuerySet
from django.db.models.expressions import Combinable
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from ..backends.base import mongo_store
from ..conf import get_settings
from ..engine.deadlock import Cycle
from ..engine.document import check_text
from ..engine.store import MongoStore
from ..inspect.patterns import KeyMatch, glob, starting
from ..inspect.snapshot import count, find_deadlocks, ping
from ..models import Lock, LockQuerySet
from ..models.lock import LONG_AGO

if TYPE_CHECKING:
    from django.contrib.admin import ModelAdmin
    from django.utils.functional import _StrPromise as StrPromise

    LockModelAdmin = ModelAdmin[Lock]

#: How many locks the pages of one list reach. Whoever has more searches.
CAP: Final = 1_000
#: Seconds that a search for a pattern may take: one that begins with a star goes through all keys.
SEARCH_TIMEOUT: Final = 30.0
#: The facts of a holder that a word is searched in.
WORDS: Final = ("owner", "user", "host", "label")


class StateFilter(admin.SimpleListFilter):
    """Held, unless another choice was made: at night one wants to know who has what. Whoever searches means all."""

    title = _("state")
    parameter_name = "state"

    def __init__(self, request: HttpRequest, params: dict[str, Any], model: type[Lock], model_admin: Any) -> None:
        self.default = "all" if request.GET.get(SEARCH_VAR, "").strip() else "held"
        super().__init__(request, params, model, model_admin)

    def lookups(self, request: HttpRequest, model_admin: LockModelAdmin) -> list[tuple[str, StrPromise]]:
        return [
            ("held", _("Held")),
            ("waited", _("Waited for")),
            ("stale", _("Stale")),
            ("free", _("Free")),
            ("all", _("All")),
        ]

    def value(self) -> str:
        chosen = super().value()
        return chosen if chosen in dict(self.lookup_choices) else self.default

    def choices(self, changelist: ChangeList) -> Iterator[Any]:
        for value, title in self.lookup_choices:
            query = changelist.get_query_string({self.parameter_name: value})
            yield {"selected": value == self.value(), "query_string": query, "display": title}

    def queryset(self, request: HttpRequest, queryset: Any) -> QuerySet[Lock]:
        choose = {"waited": "waited_for"}.get(self.value(), self.value())
        chosen: QuerySet[Lock] = getattr(queryset, choose)()
        return chosen


class ModeFilter(admin.SimpleListFilter):
    """How a lock is held."""

    title = _("mode")
    parameter_name = "mode"

    def lookups(self, request: HttpRequest, model_admin: LockModelAdmin) -> list[tuple[str, StrPromise]]:
        return [("exclusive", _("Exclusive")), ("shared", _("Shared")), ("semaphore", _("Semaphore"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Lock]) -> QuerySet[Lock]:
        if self.value() not in dict(self.lookup_choices):
            return queryset
        return queryset.filter(_of_holders([{"mode": str(self.value())}]))


def search(queryset: LockQuerySet, text: str) -> LockQuerySet:
    """Locks by the start of their key; if there are none, by a word of their holders. Or by a pattern with * and ? for
    all of the key.

    The start of a key is found in the index, however many keys there are. Not both in one query: the server would try
    to go through all keys for it. Raises LockBackendFailed.
    """
    settings = get_settings()
    try:
        keys = queryset.matching(match_of(text, settings.KEY_PREFIX))
    except ValueError:  # no key and no word can be like that
        return queryset.none()
    if is_pattern(text) or any(keys.survey(limit=1, timeout=settings.COMMAND_TIMEOUT)):
        return keys
    return queryset.filter(_of_holders([{name: text} for name in WORDS])).order_by("expires_at")


def match_of(text: str, prefix: str) -> KeyMatch:
    """The keys that somebody means who searches for *text*; their prefix may be left out. Raises ValueError."""
    if is_pattern(text):
        return glob(text, prefix)
    check_text("a key", text)
    return starting(text if text.startswith(prefix) else prefix + text)


def is_pattern(text: str) -> bool:
    """Does it describe a key as a whole?"""
    return "*" in text or "?" in text


def _of_holders(facts: list[dict[str, str]]) -> Q:
    """A condition on holders. Whoever has one is in the index of leases: that bounds the search."""
    return Q(expires_at__gt=LONG_AGO, holders__having=facts)


class BoundedChangeList(ChangeList):
    """Reads a page with one command, and counts with a second one where there is more: no further than `CAP`."""

    #: Were there more than the pages can show?
    capped: bool

    def get_results(self, request: HttpRequest) -> None:
        """Read the page, then count, if there is more: now, since an error must come before anything is rendered."""
        found = self._read(self.timeout())
        self.capped = found > CAP
        self.result_count = min(found, CAP)
        self.paginator = Paginator(range(self.result_count), self.list_per_page)
        self.multi_page = self.paginator.num_pages > 1
        self.can_show_all, self.show_full_result_count, self.full_result_count = False, False, self.result_count
        self.show_admin_actions = bool(found)

    def timeout(self) -> float:
        """Seconds that a command may take."""
        return get_settings().COMMAND_TIMEOUT

    def fetch(self, skip: int, limit: int, timeout: float) -> list[Any]:
        """A part of what is listed."""
        raise NotImplementedError

    def _read(self, timeout: float) -> int:
        """Read the page; return how many there are at all, at most one more than `CAP`."""
        queryset: Any = self.queryset
        skip = (self.page_num - 1) * self.list_per_page
        size = min(self.list_per_page, CAP - skip)
        if skip < 0 or size <= 0:
            raise IncorrectLookupParameters
        found = self.fetch(skip, size + 1, timeout)
        self.result_list = found[:size]
        if skip and not found:
            raise IncorrectLookupParameters
        return skip + len(found) if len(found) <= size else queryset.count_up_to(CAP + 1, timeout)


class LockChangeList(BoundedChangeList):
    """The list of locks. Each is read together with what the server says of it at that time."""

    #: Has nobody ever taken a lock here?
    is_unused: bool
    #: Is only a part of the locks searched?
    is_narrowed: bool
    #: Where it shows what is waited for: who waits for each other.
    deadlocks: list[Cycle]

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Lock]) -> list[str | Combinable]:
        """Without Django's second key for a definite order: the index has a definite order by itself."""
        chosen = [name for name in super().get_ordering(request, queryset) if name != "-pk"]
        return chosen[:1] or ["key"]

    def get_ordering_field_columns(self) -> dict[int, Literal["desc", "asc"]]:
        """Which arrows to show."""
        if ORDER_VAR in self.params:
            return super().get_ordering_field_columns()
        name = "key_link" if self.queryset.query.order_by[:1] == ("key",) else "left"
        return {self.list_display.index(name): "asc"}

    def get_results(self, request: HttpRequest) -> None:
        """See BoundedChangeList.get_results()."""
        store = mongo_store(self.queryset.db)
        if is_pattern(self.query):  # going through all keys takes its time; that the server answers at all does not
            ping(store, get_settings().COMMAND_TIMEOUT)
        super().get_results(request)
        self.is_unused = not self.result_count and count(store, {}, timeout=self.timeout()) == 0
        states = [spec.value() for spec in self.filter_specs if isinstance(spec, StateFilter)]
        self.is_narrowed = states != ["all"] or ModeFilter.parameter_name in self.params
        waited = self.params.get(StateFilter.parameter_name) == "waited"
        self.deadlocks = self._deadlocks(store, self.timeout()) if waited and self.result_list else []

    def timeout(self) -> float:
        """See BoundedChangeList.timeout()."""
        seconds = super().timeout()
        return max(seconds, SEARCH_TIMEOUT) if is_pattern(self.query) else seconds

    def fetch(self, skip: int, limit: int, timeout: float) -> list[Lock]:
        """See BoundedChangeList.fetch()."""
        queryset: Any = self.queryset
        return list(queryset.survey(skip=skip, limit=limit, timeout=timeout))

    def _deadlocks(self, store: MongoStore, timeout: float) -> list[Cycle]:
        """A cycle is among the locks that are waited for: where the page shows all of these, no others are read."""
        all_of_them = not self.multi_page and set(self.params) == {StateFilter.parameter_name}
        keys = [lock.key for lock in self.result_list] if all_of_them else None
        return find_deadlocks(store, starting(get_settings().KEY_PREFIX), timeout, among=keys)
