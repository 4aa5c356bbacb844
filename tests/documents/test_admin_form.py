"""The form of a model's own admin: what the lock has written since the form was opened stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from bson import ObjectId
from django.contrib import admin
from django.contrib.auth.models import User
from django.forms.models import model_to_dict
from django.test import RequestFactory

from django_mongolock import DocumentChanged
from django_mongolock.admin import DocumentLockAdminMixin
from testproject.shop.models import Ad
from tests.documents.conftest import Ground
from tests.support.lock_fixtures import WITH_MONGO

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = admin.ModelAdmin

pytestmark = WITH_MONGO


@pytest.fixture
def ground(make: Callable[..., Ground]) -> Ground:
    """Ads."""
    return make("model")


class Form:
    """The form of an ad as it was when it was opened."""

    def __init__(self, ground: Ground, id_: ObjectId, **options: Any) -> None:
        options = {"document_lock": ground.lock, **options}
        self.admin = type("AdAdmin", (DocumentLockAdminMixin, ModelAdmin), options)(Ad, admin.AdminSite())
        self.ad = Ad.objects.get(pk=id_)
        self.fields = self.admin.get_form(self.request, self.ad, change=True).base_fields
        self.opened = {name: value for name, value in model_to_dict(self.ad).items() if name in self.fields}

    @property
    def request(self) -> Any:
        """One of a user who may change ads."""
        request = RequestFactory().post("/")
        request.user = User(is_superuser=True, is_staff=True, is_active=True)
        return request

    def save(self, **changes: Any) -> Ad:
        """Submit it with these changes."""
        ad = Ad.objects.get(pk=self.ad.pk)
        form = self.admin.get_form(self.request, ad, change=True)({**self.opened, **changes}, instance=ad)
        assert form.is_valid(), form.errors
        self.admin.save_model(self.request, form.save(commit=False), form, change=True)
        return ad


def add(ground: Ground, **values: Any) -> ObjectId:
    """An ad that can be submitted."""
    ad = Ad.objects.create(title="bike", user_id="7", price=5, body="x")
    ground.change(ad.pk, **values)
    return ObjectId(ad.pk)


def test_it_does_not_undo_what_the_lock_has_done(ground: Ground) -> None:
    """Opened in one version, saved after an export: its state and its version stay, and the version grows."""
    id_ = add(ground)
    form = Form(ground, id_)
    with ground.lock.hold(Ad.objects.get(pk=id_), "exporting", final="exported"):
        pass
    ad = form.save(price=7)
    assert ground.read(id_, "version", "state", "holder", "price") == (3, "exported", None, 7)
    assert (ad.document_version, ad.export_status, ad.price) == (3, "exported", 7)


def test_work_under_way_is_done_again(ground: Ground) -> None:
    """Its holder finds that the document has changed, and it gets the failed state: what was exported is outdated."""
    id_ = add(ground)
    form = Form(ground, id_)
    held = ground.lock.acquire(Ad.objects.get(pk=id_), "exporting", final="exported", owner="flow 7")
    form.save(price=7)
    assert ground.read(id_, "version", "state", "holder") == (3, "exporting", "flow 7")
    with pytest.raises(DocumentChanged), held:
        pass
    assert ground.read(id_, "state", "holder", "price") == ("failed", None, 7)


def test_a_document_without_a_version(ground: Ground) -> None:
    """It counts as version 0."""
    id_ = add(ground)
    form = Form(ground, id_)
    ground.collection.update_one({"_id": id_}, {"$unset": {"documentVersion": 1}})
    form.save(price=7)
    assert ground.read(id_, "version") == 1


def test_the_fields_of_the_lock_are_shown(ground: Ground) -> None:
    """Read-only, with the holder and since when; what the project has made read-only stays first."""
    form = Form(ground, add(ground), readonly_fields=("deleted", "export_status"))
    names = ["deleted", "export_status", "document_version", "locked_by", "lock_timestamp"]
    assert form.admin.get_readonly_fields(form.request) == names
    assert not form.fields.keys() & set(names)
    assert set(names) <= set(form.admin.get_fields(form.request, form.ad))


def test_a_field_that_the_project_puts_into_the_form_is_written(ground: Ground) -> None:
    """An admin that lets operators set a state: only that one is written of the lock's fields."""
    id_ = add(ground, state="failed")
    form = Form(ground, id_, get_readonly_fields=lambda self, request, obj=None: ("document_version",))
    form.save(export_status="pending")
    assert ground.read(id_, "state", "version", "holder") == ("pending", 2, None)


def test_a_new_document(ground: Ground) -> None:
    """It is saved as always, with the defaults of its model."""
    form = Form(ground, add(ground))
    ad = Ad(title="new", user_id="7", price=1)
    form.admin.save_model(form.request, ad, None, change=False)
    assert ground.read(ad.pk, "version", "state") == (1, "pending")
