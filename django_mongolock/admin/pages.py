"""What the admin pages of locks and of events have in common."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.template.response import SimpleTemplateResponse, TemplateResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import get_language_bidi
from django.utils.translation import gettext as _

from ..context import check_encoding
from ..exceptions import printable
from ..inspection.display import lock_address
from ..inspection.kinds import UNREADABLE

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = admin.ModelAdmin

P = ParamSpec("P")
A = TypeVar("A", bound="Pages")
View = Callable[Concatenate[A, HttpRequest, P], HttpResponse]


class Pages(ModelAdmin):
    """The admin of a model that is only read: nothing is added, changed or deleted."""

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
        """Only the filters: a regular expression from the address bar could keep the server busy."""
        return lookup in {getattr(each, "parameter_name", f"{each}__exact") for each in self.list_filter}

    def link(self, key: object) -> SafeString | str:
        """The key of a lock, with a link to its page if it is a key."""
        if type(key) is not str:
            return format_html("<bdi>{}</bdi>", "?" if key is None else str(key))
        address = lock_address(key, self.admin_site.name)
        return format_html('<a class="mongolock-key" href="{}"><bdi>{}</bdi></a>', address, key)

    def page(self, request: HttpRequest, name: str, context: dict[str, Any], status: int = 200) -> TemplateResponse:
        """Render a page of this app inside the admin."""
        request.current_app = self.admin_site.name
        defaults = {**self.admin_site.each_context(request), "opts": self.opts, "media": self.media}
        template = f"admin/django_mongolock/lock/{name}.html"
        response = TemplateResponse(request, template, {**defaults, **context}, status=status)
        response.add_post_render_callback(_show_plainly)  # also where an action of a project's own page shows it
        return response


#: What hides or reverses other text. The first kind also stands in the texts of Django that are written from right to
#: left, and reverses no letters.
_MARKS: Final = "\u200e\u200f\u061c"
_HIDDEN: Final = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufeff\u200b\u2028\u2029]")
_HIDDEN_OR_MARK: Final = re.compile(f"{_HIDDEN.pattern[:-1]}{_MARKS}]")
#: A tag, with the attributes that are read by people; the others are for the browser, such as the values of fields.
_TAG: Final = re.compile("(<[^>]*>)")
_READ: Final = re.compile(r'((?: title| aria-label| data-label)="[^"]*")')


def plainly(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
    """Show control characters and direction marks by their codes, wherever on the page of *view* they are. A request in
    another encoding than the site's is refused with 400."""

    @wraps(view)
    def shown(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        check_encoding(request)
        response = view(request, *args, **kwargs)
        if isinstance(response, SimpleTemplateResponse) and not response.is_rendered:
            response.add_post_render_callback(_show_plainly)
        elif not response.streaming:
            _show_plainly(response)
        return response

    return shown


def _show_plainly(response: HttpResponse) -> None:
    if not response.headers.get("Content-Type", "").startswith("text/html"):
        return
    text = response.text
    hidden = _HIDDEN if get_language_bidi() else _HIDDEN_OR_MARK
    if hidden.search(text):
        response.content = "".join(
            _plain_tag(part, hidden) if part.startswith("<") else hidden.sub(_code, part) for part in _TAG.split(text)
        )


def _plain_tag(tag: str, hidden: re.Pattern[str]) -> str:
    """The tag with the codes in the attributes that are read, and references, which mean the same, in the others."""
    return "".join(
        hidden.sub(_code if number % 2 else lambda found: f"&#{ord(found[0])};", part)
        for number, part in enumerate(_READ.split(tag))
    )


def _code(found: re.Match[str]) -> str:
    return printable(found[0])


def unless_away(view: View[A, P]) -> View[A, P]:
    """While MongoDB does not answer, or locks are `UNREADABLE`, show a page that says so, with status 503."""

    @wraps(view)
    def guarded(self: A, request: HttpRequest, /, *args: P.args, **kwargs: P.kwargs) -> HttpResponse:
        try:
            return view(self, request, *args, **kwargs)
        except UNREADABLE as error:
            context = {"title": _("Locks"), "problem": getattr(error, "problem", error)}
            return self.page(request, "unavailable", context, status=503)

    return guarded
