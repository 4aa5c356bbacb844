"""Checks of edit locks, if the project has any."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from django.apps import AppConfig, apps
from django.core.checks import CheckMessage, register

from ..conf import NAME, LockSettings, error, get_settings, warning
from ..management.checks import has_wrong_settings

#: The longest pause in seconds between two beats of a background tab, with a reserve. Browsers allow one beat a minute.
_THROTTLED: Final = 75.0


@register()
def check_edit_locks(*, app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """Check the requirements of edit locks, if the project has any."""
    return [] if not _has_edit_locks() or has_wrong_settings() else list(_check_edit_locks(get_settings()))


def _check_edit_locks(values: LockSettings) -> Iterator[CheckMessage]:
    if values.EDIT_BEAT * 2 > values.EDIT_LEASE:
        message = f"EDIT_BEAT is {values.EDIT_BEAT:g} s and EDIT_LEASE {values.EDIT_LEASE:g} s"
        cure = "Make EDIT_LEASE at least three times EDIT_BEAT."
        yield error("E084", f"{NAME}: {message}: one missed beat loses the lock.", cure)
    elif values.EDIT_LEASE < _THROTTLED:
        message = f'{NAME}["EDIT_LEASE"] is {values.EDIT_LEASE:g} s, but a tab in the background beats once a minute.'
        yield warning("W080", message, f"Set it to at least {_THROTTLED:g}.")


def _has_edit_locks() -> bool:
    """Return whether the admin has an EditLockMixin."""
    if not apps.is_installed("django.contrib.admin"):
        return False
    from django.contrib.admin import sites  # its modules cannot be imported without it

    from .admin import EditLockMixin

    registered = (model_admin for site in sites.all_sites for model_admin in site._registry.values())
    return any(isinstance(model_admin, EditLockMixin) for model_admin in registered)
