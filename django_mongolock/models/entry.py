"""The fields of holders and waiters that say who it is."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _
from django_mongodb_backend.models import EmbeddedModel

from .fields import Number, ServerTime, Text


class PartyFields(models.Model):
    """What holders and waiters have in common, and what an app may note of them."""

    mode = Text(_("mode"), max_length=16, null=True)
    owner = Text(_("owner"), max_length=256, null=True)
    label = Text(_("label"), max_length=256, null=True)
    place = Text(_("view or task"), max_length=256, null=True)
    user = Text(_("user"), max_length=256, null=True)
    host = Text(_("host"), max_length=256, null=True)
    pid = Number(_("process"), null=True)
    thread = Text(_("thread"), max_length=256, null=True)
    token = Number(_("fencing token"), null=True)

    class Meta:
        abstract = True


class Entry(PartyFields, EmbeddedModel):  # type: ignore[misc, django-manager-missing]  # noqa: DJ008 - no objects are made
    """The fields of a holder or a waiter that a query may name, as in ``holders__owner``. They are read as `Party`."""

    grant = Text(_("grant"), max_length=64)
    session = Text(_("session"), max_length=32, help_text=_("the process, under a name of its own"))
    worker = Text(_("thread or task"), max_length=256, null=True)
    capacity = Number(_("capacity"))
    lease = Number(_("lease"), help_text=_("milliseconds"))
    since = ServerTime(_("requested"))
    until = ServerTime(_("until"), help_text=_("when it ends unless it is renewed"))
    acquired_at = ServerTime(_("acquired"))
    more_permits = Number(_("more permits"), null=True, help_text=_("how many it takes beyond one"))
    behind = Number(_("behind it"), null=True, help_text=_("how many more of its process wait"))

    class Meta:
        managed = False
        default_permissions = ()
