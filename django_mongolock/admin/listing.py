"""The list of locks: which are shown, in which order, and how they are read.

Made for a million documents: two commands for a page, each on an index, and nothing is counted beyond `CAP`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Literal

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ORDER_VAR, ChangeList
from django.core.paginator import InvalidPage, Paginator
from django.db.models import Q, QuerySet
from django.db.models.expressions import Combinable
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from ..backends.base import mongo_store
from ..conf import get_settings
from ..engine.patterns import containing, glob
from ..engine.survey import count, ping
from ..models import LONG_AGO, Lock, LockQuerySet, key_condition

if TYPE_CHECKING:
    from django.contrib.admin import ModelAdmin
    from django.utils.functional import _StrPromise as StrPromise

    LockModelAdmin = ModelAdmin[Lock]

#: How many locks the pages of one list reach. Whoever has more searches.
CAP: Final = 10_000
#: Seconds that one command of a search may take.
SEARCH_TIMEOUT: Final = 30.0


class StateFilter(admin.SimpleListFilter):
    """Held, unless another choice was made: at night one wants to know who has what."""

    title = _("state")
    parameter_name = "state"

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
        return chosen if chosen in dict(self.lookup_choices) else "held"

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
        return queryset.filter(_of_holders(Q(holders__mode=self.value())))


def search(queryset: LockQuerySet, text: str) -> LockQuerySet:
    """Locks by a part of their key, or by a pattern with * and ? for all of it; or by a word of their holders."""
    prefix = get_settings().KEY_PREFIX
    try:
        if "*" in text or "?" in text:
            return queryset.matching(glob(text, prefix))
        match = containing(text, prefix)
    except ValueError:  # no key and no word can be like that
        return queryset.none()
    words = Q(holders__owner=text) | Q(holders__user=text) | Q(holders__host=text) | Q(holders__label=text)
    return queryset.filter(key_condition(match) | _of_holders(words))


def _of_holders(condition: Q) -> Q:
    """A condition on holders. Whoever has one is in the index of leases: that bounds the search."""
    return Q(expires_at__gt=LONG_AGO) & condition


class LockChangeList(ChangeList):
    """Reads a page with one command, which also asks the server for its time."""

    #: Were there more than the pages can show?
    capped: bool
    #: Has nobody ever taken a lock here?
    is_unused: bool

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
        """Count, then read the page: now, since an error must come before anything is rendered."""
        queryset: Any = self.queryset
        store, timeout = mongo_store(queryset.db), get_settings().COMMAND_TIMEOUT
        if self.query:  # going through all keys takes its time; that the server answers at all does not
            ping(store, timeout)
            timeout = max(timeout, SEARCH_TIMEOUT)
        found = queryset.count_up_to(CAP + 1, timeout)
        self.capped = found > CAP
        self.result_count = min(found, CAP)
        self.paginator = Paginator(range(self.result_count), self.list_per_page)
        self.multi_page = self.paginator.num_pages > 1
        self.can_show_all, self.show_full_result_count, self.full_result_count = False, False, self.result_count
        self.show_admin_actions = bool(found)
        try:
            page = self.paginator.page(self.page_num)
        except InvalidPage:
            raise IncorrectLookupParameters from None
        skip, end = page.object_list.start, page.object_list.stop
        bounds = {"skip": skip, "limit": end - skip, "timeout": timeout}
        self.result_list = list(queryset.survey(**bounds)) if end > skip else []
        self.is_unused = not found and count(store, {}, timeout=timeout) == 0
