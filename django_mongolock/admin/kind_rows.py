"""What a row of the page of other kinds of locks submits; and who may look at them, and release them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from bson import json_util
from django.http import HttpRequest
from django.utils.translation import gettext as _

from ..inspection import display
from ..inspection.kinds import LockKind, Row

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


@dataclass(frozen=True)
class Shown:
    """A row on a page, with what its form submits and the address of its page."""

    lock: LockKind
    document: Row
    address: str = ""

    @property
    def value(self) -> str:
        """The document and its holder in a form."""
        return json.dumps([self.lock.name, json_util.dumps(self.document.id), self.document.holder])

    @property
    def left(self) -> str:
        """In what time it is stale, or for how long it has been."""
        left = self.document.left
        if left is None:
            return "–"
        return (_("in %s") if left > 0 else _("for %s")) % display.duration(left)
