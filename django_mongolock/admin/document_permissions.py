"""Who may look at documents under locks, and release them: the permissions of named locks, and one for stale ones."""

from __future__ import annotations

from typing import Final

from django.http import HttpRequest

PERMISSION: Final = "django_mongolock.clear_document_lock"


def may_force(request: HttpRequest) -> bool:
    """Whether this user may take documents from their holders."""
    return request.user.has_perm("django_mongolock.force_release_lock")


def may_clear(request: HttpRequest) -> bool:
    """Whether this user may release stale documents: also everyone who may force a release."""
    return request.user.has_perm(PERMISSION) or may_force(request)


def may_view(request: HttpRequest) -> bool:
    """Whether this user may see who holds which document."""
    return request.user.has_perm("django_mongolock.view_lock") or request.user.has_perm(PERMISSION)
