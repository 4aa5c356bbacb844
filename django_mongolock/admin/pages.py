"""The common base of the admin pages of locks and of events."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from ..context import check_encoding
from ..exceptions import printable
from ..inspection.display import lock_address, sentence
from ..inspection.kinds import UNREADABLE

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = admin.ModelAdmin

P = ParamSpec("P")
A = TypeVar("A", bound="Pages")
View = Callable[Concatenate[A, HttpRequest, P], HttpResponse]


class Pages(ModelAdmin):
    """The admin of a read-only model. Nothing is added, changed or deleted."""

    list_display_links = None
    list_per_page = 100
    list_max_show_all = 0
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER

    class Media:
        css = {"all": ("django_mongolock/locks.css",)}  # noqa: RUF012 - as Django wants it

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    has_change_permission = has_delete_permission = has_add_permission

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Return whether the lookup is one of the filters. Any other regular expression could keep the server busy."""
        return lookup in {getattr(each, "parameter_name", f"{each}__exact") for each in self.list_filter}

    def link(self, key: object) -> SafeString | str:
        """Return the key of a lock, with a link to its page if it is a key."""
        if type(key) is not str:
            return format_html("<bdi>{}</bdi>", "?" if key is None else printable(key))
        address = lock_address(key, self.admin_site.name)
        return format_html('<a class="mongolock-key" href="{}"><bdi>{}</bdi></a>', address, printable(key))

    def page(self, request: HttpRequest, name: str, context: dict[str, Any], status: int = 200) -> TemplateResponse:
        """Render a page of this app inside the admin."""
        request.current_app = self.admin_site.name
        defaults = {**self.admin_site.each_context(request), "opts": self.opts, "media": self.media}
        template = f"admin/django_mongolock/lock/{name}.html"
        return TemplateResponse(request, template, {**defaults, **context}, status=status)


def in_own_encoding(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """Refuse a request in another encoding than the site's with 400."""

    @wraps(view)
    def checked(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        check_encoding(request)
        return view(request, *args, **kwargs)

    return checked


def unless_away(view: View[A, P]) -> View[A, P]:
    """Show a page with status 503 while MongoDB does not answer, or locks are `UNREADABLE`."""

    @wraps(view)
    def guarded(self: A, request: HttpRequest, /, *args: P.args, **kwargs: P.kwargs) -> HttpResponse:
        try:
            return view(self, request, *args, **kwargs)
        except UNREADABLE as error:
            context = {"title": _("Locks"), "problem": sentence(getattr(error, "problem", error))}
            return self.page(request, "unavailable", context, status=503)

    return guarded
