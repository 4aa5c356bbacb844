"""Checks of what the project has locked: its functions and views."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage, Tags, register
from django.urls import URLPattern, URLResolver, get_resolver
from django.urls.converters import PathConverter, StringConverter

from ..decorator.calls import shared_by_all
from ..decorator.mongo_locked import TEMPLATES
from ..inspection.check_messages import warning
from ..keys import KeyTemplate

#: Converters that pass text on as it was typed. A regular expression does so, too.
_AS_TYPED: Final = (StringConverter, PathConverter)


@register()
def check_shared_locks(*, app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Check that a function with arguments says which of its calls exclude one another."""
    return [
        warning(
            "W009",
            f"All calls of {name}() share one lock, whatever their arguments: its @mongo_locked has no key.",
            'Name the arguments that matter, as in @mongo_locked("order:{order_id}"). If all calls are meant, name the '
            'lock: @mongo_locked("import").',
        )
        for name in sorted(shared_by_all)
    ]


@register(Tags.urls)
def check_views(*, app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Warn of locked views whose key has a part of the address as it was typed, in any spelling."""
    if not getattr(settings, "ROOT_URLCONF", None):
        return []
    try:
        return list(_check_patterns(get_resolver().url_patterns, "", frozenset()))
    except Exception:  # noqa: BLE001 - Django's own check reports addresses that cannot be loaded
        return []


def _check_patterns(patterns: Sequence[Any], start: str, typed: frozenset[str]) -> Iterator[CheckMessage]:
    for each in patterns:
        route, names = start + str(each.pattern), typed | _as_typed(each.pattern)
        if isinstance(each, URLResolver):
            yield from _check_patterns(each.url_patterns, route, names)
        elif isinstance(each, URLPattern):
            for template in _templates(each.callback):
                for name in sorted(template.plain & names):
                    yield _warning(each.lookup_str, route, template, name)


def _as_typed(pattern: Any) -> frozenset[str]:
    """The names of the arguments that *pattern* takes from the address as text."""
    if hasattr(pattern, "regex") and not pattern.converters:
        return frozenset(pattern.regex.groupindex)
    return frozenset(name for name, converter in pattern.converters.items() if type(converter) in _AS_TYPED)


def _templates(view: Any) -> list[KeyTemplate]:
    """The templates of a view: of its function, or of its class and the methods of that."""
    cls = getattr(view, "view_class", None) or getattr(view, "cls", None)
    places = [view] if cls is None else [getattr(cls, name, None) for name in dir(cls) if not name.startswith("__")]
    return list(dict.fromkeys(template for place in places for template in getattr(place, TEMPLATES, ())))


def _warning(view: str, route: str, template: KeyTemplate, name: str) -> CheckMessage:
    return warning(
        "W010",
        f"The key of the view {view}, {template.template!r}, has {name} as it was typed into the address {route!r}: "
        "spellings of one value, such as 1 and 01, are different locks.",
        f"Bring it into one form: {{{name}:app.Model}}, {{{name}:int}}, {{{name}:uuid}} or {{{name}:slug}}; or have a "
        f"converter do so, such as <int:{name}>. If each text is a name of its own, write {{{name}!s}}.",
    )
