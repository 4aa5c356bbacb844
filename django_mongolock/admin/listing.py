"""The list of locks: its column contents, its filters, its search, and its queries.

`lock_admin` chooses the columns and the order of the locks. The list is made for a million documents. One command reads
a page. A second command counts the locks if there is more than one page. Each command uses an index, reads no more than
the locks held at the moment, and counts no further than `CAP`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Literal

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ORDER_VAR, SEARCH_VAR, ChangeList
from django.core.paginator import Paginator
from django.db.models import DateTimeField, Func, QuerySet
from django.db.models.expressions import Combinable, OrderBy
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from ..backends import mongo_store
from ..conf import get_settings
from ..engine.text_checks import check_text
from ..inspection import display
from ..inspection.kinds import Choice, KeyMatch, glob, starting
from ..inspection.named_locks import NamedLocks
from ..inspection.queries import LEASED, ORDERS, Bounds, chosen, count, ping
from ..models import Lock, LockQuerySet
from ..models.reading import Condition

if TYPE_CHECKING:
    from django.contrib.admin import ModelAdmin
    from django.utils.functional import _StrPromise as StrPromise

    LockModelAdmin = ModelAdmin[Lock]

#: The number of locks that the pages of a list show. The search finds the others.
CAP: Final = 1_000
#: Seconds that the search for a pattern may take. A pattern that begins with a star goes through all keys.
SEARCH_TIMEOUT: Final = 30.0
#: The facts of a holder that the search compares.
WORDS: Final = ("owner", "user", "host", "label")


class Computed(Func):
    """One of `ORDERS` by its name. The server computes the value for each lock. No index has it."""

    output_field = DateTimeField()

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def as_mql_expr(self, compiler: Any, connection: Any) -> Any:
        return ORDERS[self.name]


#: The states of the filter.
STATES: Final = {
    "held": _("Held"),
    "waited": _("With waiters"),
    "kept": _("Kept"),
    "stale": _("Stale"),
    "free": _("Free"),
    "all": _("All states"),
}


def chosen_state(request: HttpRequest) -> str:
    """Return the state of the locks that the list shows. The default is "held", and "all" for a search."""
    chosen = request.GET.get(StateFilter.parameter_name, "")
    return chosen if chosen in STATES else "all" if request.GET.get(SEARCH_VAR, "").strip() else "held"


def sorts_all(request: HttpRequest) -> bool:
    """Return whether the list shows only locks with a lease. These are few enough to be sorted without an index."""
    return chosen_state(request) not in ("all", "free")


class ChoiceFilter(admin.SimpleListFilter):
    """A filter with one choice that always applies. An unknown choice redirects, as with Django's own filters."""

    def __init__(self, request: HttpRequest, params: dict[str, Any], model: Any, model_admin: Any) -> None:
        super().__init__(request, params, model, model_admin)
        self.chosen = request.GET.get(str(self.parameter_name)) or self.default(request)
        if self.chosen not in dict(self.lookup_choices):
            raise IncorrectLookupParameters

    def default(self, request: HttpRequest) -> str:
        """Return the choice that applies if the address names none."""
        raise NotImplementedError

    def value(self) -> str:
        return self.chosen

    def choices(self, changelist: ChangeList) -> Iterator[Any]:
        for value, title in self.lookup_choices:
            query = changelist.get_query_string({str(self.parameter_name): value})
            yield {"selected": value == self.chosen, "query_string": query, "display": title}


class StateFilter(ChoiceFilter):
    """The state of a lock."""

    title = _("state")
    parameter_name = "state"

    def default(self, request: HttpRequest) -> str:
        return chosen_state(request)

    def lookups(self, request: HttpRequest, model_admin: LockModelAdmin) -> list[tuple[str, StrPromise]]:
        return list(STATES.items())

    def queryset(self, request: HttpRequest, queryset: Any) -> QuerySet[Lock]:
        chosen: QuerySet[Lock] = getattr(queryset, {"waited": "waited_for"}.get(self.chosen, self.chosen))()
        return chosen


def search(queryset: LockQuerySet, text: str) -> LockQuerySet:
    """Return the locks whose keys start with *text*, or else the locks with a holder that *text* names.

    A pattern with * or ? must match whole keys. An index finds the start of a key, however many keys there are. One
    query for keys and holders would go through all keys. Raises LockBackendFailed.
    """
    settings = get_settings()
    try:
        keys = queryset.matching(match_of(text, settings.KEY_PREFIX))
    except ValueError:  # no key can match
        return queryset.none()
    if is_pattern(text) or any(keys.snapshots(limit=1, timeout=settings.COMMAND_TIMEOUT)):
        return keys
    # All locks with a holder are in the index of leases. The index bounds the search.
    named = {"$or": [{name: {"$eq": text}} for name in WORDS]}
    return queryset.filter(Condition({**LEASED, "holders": {"$elemMatch": named}})).order_by("expires_at")


def match_of(text: str, prefix: str) -> KeyMatch:
    """Return the match of the keys that a search for *text* means, with or without their prefix. Raises ValueError."""
    if is_pattern(text):
        return glob(text, prefix)
    check_text("a key", text)
    return starting(text if text.startswith(prefix) else prefix + text)


def is_pattern(text: str) -> bool:
    """Return whether *text* is a pattern for whole keys."""
    return "*" in text or "?" in text


class BoundedChangeList(ChangeList):
    """A list that reads a page with one command. If there are more pages, a second command counts up to `CAP`."""

    #: Whether there are more results than the pages show.
    capped: bool

    def get_results(self, request: HttpRequest) -> None:
        """Read the page now, since an error must come before anything is rendered."""
        found = self._read(self.timeout())
        self.capped = found > CAP
        self.result_count = min(found, CAP)
        self.paginator = Paginator(range(self.result_count), self.list_per_page)
        self.multi_page = self.paginator.num_pages > 1
        self.can_show_all, self.show_full_result_count, self.full_result_count = False, False, self.result_count
        self.show_admin_actions = bool(found)

    def timeout(self) -> float:
        """Return the seconds that a command may take."""
        return get_settings().COMMAND_TIMEOUT

    def fetch(self, skip: int, limit: int, timeout: float) -> list[Any]:
        """Read a part of the list."""
        raise NotImplementedError

    def _read(self, timeout: float) -> int:
        """Read the page. Return the number of all results, at most one more than `CAP`."""
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
    """The list of locks, read as snapshots."""

    #: Whether no lock has ever been taken here.
    is_unused: bool
    #: Whether a filter narrows the search.
    is_narrowed: bool
    #: The number of stale locks that the list of held locks leaves out.
    stale: int

    #: The order of the list, if no index has that order.
    by: tuple[str, int] | None = None

    def get_ordering(self, request: HttpRequest, queryset: QuerySet[Lock]) -> list[str | Combinable]:
        """Return the order without the second key that Django adds for a definite order. The index has a definite
        order.
        """
        order: str | Combinable | OrderBy
        order = next((each for each in super().get_ordering(request, queryset) if each != "-pk"), "key")
        if not (isinstance(order, OrderBy) and isinstance(order.expression, Computed)):
            return [order]
        if not sorts_all(request):
            return ["key"]
        self.by = order.expression.name, -1 if order.descending else 1
        return ["expires_at"]

    def get_ordering_field_columns(self) -> dict[int, Literal["desc", "asc"]]:
        """Return the columns that show an arrow."""
        if ORDER_VAR in self.params:
            return super().get_ordering_field_columns()
        order = self.by[0] if self.by else self.queryset.query.order_by[0]
        name = {"key": "key_link", "expires_at": "left"}.get(order, order)
        return {self.list_display.index(name): "asc"} if name in self.list_display else {}

    def get_results(self, request: HttpRequest) -> None:
        """See BoundedChangeList.get_results()."""
        store = mongo_store(self.queryset.db)
        if is_pattern(self.query):  # a search may take long, but an unreachable server shall be noticed at once
            ping(store, get_settings().COMMAND_TIMEOUT)
        super().get_results(request)
        self.is_unused = not self.result_count and count(store, {}, 1, self.timeout()) == 0
        state, ours = chosen_state(request), starting(get_settings().KEY_PREFIX)
        stale = state == "held" and not self.query
        self.stale = count(store, chosen(Choice("stale", key=ours)), CAP, self.timeout()) if stale else 0
        self.is_narrowed = state != "all"

    def timeout(self) -> float:
        """See BoundedChangeList.timeout()."""
        seconds = super().timeout()
        return max(seconds, SEARCH_TIMEOUT) if is_pattern(self.query) else seconds

    def fetch(self, skip: int, limit: int, timeout: float) -> list[Lock]:
        """See BoundedChangeList.fetch()."""
        queryset: Any = self.queryset
        bounds: Bounds = {"skip": skip, "limit": limit, "timeout": timeout}
        found = queryset.snapshots(**bounds, **({"by": self.by} if self.by else {}))
        return [Lock.from_snapshot(each, queryset.db) for each in NamedLocks(queryset.db).with_obstacles(found)]


class Columns:
    """The columns of the list. Each takes a `Lock` with a `row`. `LockAdmin.list_display` chooses among them.

    On a narrow screen, a line is a card with labels.
    """

    @admin.display(description=_("state"))
    def state(self, lock: Lock) -> SafeString:
        """Return the verdict as a badge and in words."""
        row = lock.row
        text = row.text and format_html("<br><small>{}</small>", row.text)
        return format_html("{}{}", display.state_badge(row.condition), text)

    @admin.display(description=_("holder"))
    def who(self, lock: Lock) -> SafeString | str:
        return lock.row.holder_html

    @admin.display(description=_("held for"), ordering=Computed("since"))
    def since(self, lock: Lock) -> SafeString:
        return labelled(_("held for"), lock.row.held_html)

    @admin.display(description=_("lease left"), ordering="expires_at")
    def left(self, lock: Lock) -> SafeString:
        left = lock.row.left
        return labelled(_("lease left"), "–" if left is None else display.seconds_left(left))

    @admin.display(description=_("waiting"), ordering=Computed("waiting").desc())
    def waiting(self, lock: Lock) -> SafeString:
        return labelled(_("waiting"), str(lock.row.lock.waiting))

    @admin.display(description=_("longest wait"), ordering=Computed("waited"))
    def waited(self, lock: Lock) -> SafeString:
        seconds = lock.row.lock.longest_wait
        return labelled(_("longest wait"), "–" if seconds is None else display.duration(seconds))


def labelled(label: object, value: SafeString | str) -> SafeString:
    return format_html('<span class="mongolock-label" aria-hidden="true">{}</span> {}', label, value)
