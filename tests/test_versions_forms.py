"""Forms and admin of models with a version overwrite nothing silently, and lose no typed text."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django import forms
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.admin.widgets import AdminSplitDateTime, RelatedFieldWidgetWrapper
from django.contrib.auth.models import User
from django.db import OperationalError, connections, models
from django.http import HttpResponse
from django.template.response import TemplateResponse
from django.test import Client, RequestFactory
from django.test.utils import CaptureQueriesContext
from django_mongodb_backend.fields import ArrayField, EmbeddedModelArrayField, EmbeddedModelField, ObjectIdAutoField
from django_mongodb_backend.models import EmbeddedModel
from pytest_django import Settings

from django_mongolock.exceptions import VersionConflict
from django_mongolock.versions import VersionedManager
from django_mongolock.versions.admin import VersionedAdmin, VersionedForms
from django_mongolock.versions.checking import all_or_nothing
from django_mongolock.versions.forms import SealedModelForm, VersionedModelForm
from django_mongolock.versions.saving import lock_rows, locked_row
from django_mongolock.versions.seal import changed, sent_back
from django_mongolock.versions.seal import page_of as sealed_page
from testproject.rates.admin import RateAdmin
from testproject.rates.models import PlainRate, Rate
from tests.editing.site import BuyerAdmin, OrderRows
from tests.editing.staff import Tab
from tests.support.lock_fixtures import WITH_MONGO
from tests.versioned.databases import db, failing_hook, home, postgres
from tests.versioned.shapes import Named, Shape, Thing, Topic

__all__ = ["db", "home", "postgres"]


#: The error of a refused form, with the changed fields in the middle.
SAID = (
    "Not saved: this was changed while you were editing it. %s"
    "What you typed is still here: save again to replace what is stored."
)


class ThingForm(VersionedModelForm):
    class Meta:
        model = Thing
        fields = ("title", "count", "topic")


class TextForm(ThingForm):
    title = forms.CharField(widget=forms.Textarea)


def sent_of(form: Any) -> dict[str, Any]:
    """Return the data that a browser would send back of an untouched form."""
    return {bound.html_name: "" if (value := bound.value()) is None else value for bound in form}


def page_of(thing: Thing, kind: type[ThingForm] = ThingForm) -> dict[str, Any]:
    """Return the data that a browser would send back of the page of *thing*."""
    return sent_of(kind(instance=again(thing)))


@pytest.fixture
def thing(db: str) -> Thing:
    return Thing.objects.using(db).create(title="a", count=1)


def again(thing: Thing) -> Thing:
    return Thing.objects.using(thing._state.db).get(pk=thing.pk)


def somebody_else(thing: Thing, **values: Any) -> None:
    other = again(thing)
    for name, value in values.items():
        setattr(other, name, value)
    other.save()


def form_of(thing: Thing, sent: dict[str, Any], kind: type[ThingForm] = ThingForm) -> ThingForm:
    return kind(sent, instance=again(thing))


class TestForm:
    """VersionedModelForm in a view of one's own, on each database."""

    def test_what_changed_is_said_and_typing_stays(self, thing: Thing) -> None:
        """The error names the changed fields, and my field keeps my text. A field that I left alone takes the stored
        value. The second send saves."""
        sent = page_of(thing)
        somebody_else(thing, title="theirs <b>", count=7)
        form = form_of(thing, {**sent, "title": "mine"})
        assert form.errors == {"__all__": [SAID % "Changed meanwhile: Title, Count. "]}
        assert (form["title"].value(), form["count"].value()) == ("mine", 7)
        assert again(thing).title == "theirs <b>", "not written over"
        form = form_of(thing, sent_of(form))
        assert form.is_valid(), form.errors
        form.save()
        assert (again(thing).title, again(thing).count, again(thing).version) == ("mine", 7, 3)

    def test_a_change_elsewhere_in_the_object(self, thing: Thing) -> None:
        """The version counts, not only the fields of the form. No field has an error then."""
        sent = page_of(thing)
        somebody_else(thing)
        form = form_of(thing, {**sent, "title": "mine"})
        assert form.errors == {"__all__": [SAID % ""]}

    def test_nothing_to_save_is_no_conflict(self, thing: Thing) -> None:
        """A user who writes the stored value overwrites nothing."""
        sent = page_of(thing)
        somebody_else(thing, title="b")
        assert form_of(thing, {**sent, "title": "b"}).is_valid()

    def test_a_suggestion_is_no_excuse(self, thing: Thing) -> None:
        """Values that the view suggests (initial=) and the user takes are written, so they may conflict."""
        suggested = {"title": "suggested"}
        sent = sent_of(ThingForm(instance=again(thing), initial=suggested))
        somebody_else(thing, title="theirs", count=7)
        form = ThingForm({**sent, "count": 7}, instance=again(thing), initial={**suggested, "count": 7})
        assert not form.has_changed()
        assert form.errors == {"__all__": [SAID % "Changed meanwhile: Title, Count. "]}

    def test_save_as_new(self, thing: Thing) -> None:
        """The page of one object is sent as a new one."""
        form = ThingForm({**page_of(thing), "title": "copy"})
        assert form.is_valid(), form.errors
        assert form.save().version == 1
        assert Thing.objects.count() == 2

    def test_a_form_with_more_than_columns(self, thing: Thing) -> None:
        """The form's own save() may write data that is not a column. Any change counts then."""

        class More(ThingForm):
            more = forms.CharField(required=False)

        sent = page_of(thing)
        somebody_else(thing)
        assert [form_of(thing, {**sent, "more": more}, More).is_valid() for more in ("", "x")] == [True, False]

    @pytest.mark.parametrize("token", [None, "", "forged", "other"])
    def test_a_page_without_a_good_version_saves_nothing(self, thing: Thing, token: str | None) -> None:
        """A version that is missing, forged, or of another object counts as none."""
        sent = page_of(thing)
        del sent["version_read"]
        if token == "other":
            other = Thing.objects.using(thing._state.db).create(title="mine")  # "left alone", if that page counted
            token = page_of(other)["version_read"]
        form = form_of(thing, {**sent, "title": "mine", **({} if token is None else {"version_read": token})})
        assert form.non_field_errors() == [SAID % ""]
        assert form["title"].value() == "mine"

    def test_a_field_with_a_mistake_keeps_it(self, thing: Thing) -> None:
        """Typed text that cannot be cleaned stays as it is."""
        sent = page_of(thing)
        somebody_else(thing, count=7)
        form = form_of(thing, {**sent, "count": "many"})
        assert form.errors.keys() == {"count", "__all__"}
        assert form["count"].value() == "many"

    def test_foreign_keys(self, thing: Thing) -> None:
        """Foreign keys are compared by key."""
        db = str(thing._state.db)
        old, new = (Topic._base_manager.using(db).create(name=name) for name in "on")
        somebody_else(thing, topic=old)
        sent = page_of(thing)
        assert form_of(thing, {**sent, "title": "x"}).is_valid()
        somebody_else(thing, topic=new)
        form = form_of(thing, {**sent, "title": "x"})
        assert "Changed meanwhile: Topic." in str(form)
        assert str(form["topic"].value()) == str(new.pk)

    def test_what_a_browser_changes_was_left_alone(self, thing: Thing) -> None:
        """F89: Browsers change line ends and trailing spaces. An untouched field takes the stored value, to the
        letter."""
        somebody_else(thing, title="one\ntwo ")
        form = form_of(thing, {**page_of(thing, TextForm), "title": "one\r\ntwo", "count": 5}, TextForm)
        assert form.is_valid(), form.errors
        form.save()
        assert (again(thing).title, again(thing).count) == ("one\ntwo ", 5), "nothing was typed into the title"
        sent = {**page_of(thing, TextForm), "title": "one\r\ntwo", "count": 6}
        somebody_else(thing, title="theirs ")
        form = form_of(thing, sent, TextForm)
        assert form.errors == {"__all__": [SAID % "Changed meanwhile: Title. "]}
        assert form["title"].value() == "theirs "
        form = form_of(thing, {**sent_of(form), "title": "mine"}, TextForm)
        assert form.is_valid()
        assert form.save().title == "mine"

    def test_a_space_that_was_typed(self, thing: Thing) -> None:
        """A form that keeps spaces keeps those that a person typed."""

        class Exact(ThingForm):
            title = forms.CharField(strip=False)

        form = form_of(thing, {**page_of(thing), "title": "a "}, Exact)
        assert form.save().title == "a "

    def test_between_validation_and_save(self, thing: Thing) -> None:
        """try_save() makes the same page of a conflict that came late, and the next one is saved."""
        form = form_of(thing, {**page_of(thing), "title": "mine"})
        assert form.is_valid()
        somebody_else(thing, title="theirs", count=7)
        assert not form.try_save()
        assert form.errors == {"__all__": [SAID % "Changed meanwhile: Title, Count. "]}
        assert (form["title"].value(), form["count"].value()) == ("mine", 7)
        assert form_of(thing, sent_of(form)).try_save()
        assert (again(thing).title, again(thing).count) == ("mine", 7)

    def test_deleted_between_validation_and_save(self, thing: Thing) -> None:
        """The form reports the deletion, and keeps the typed text."""
        form = form_of(thing, {**page_of(thing), "title": "mine"})
        assert form.is_valid()
        again(thing).delete()
        assert not form.try_save()
        assert "this was deleted while you were editing it." in str(form)
        assert (form["title"].value(), form["version_read"].value()) == ("mine", "")

    def test_a_model_without_a_version(self) -> None:
        """The error comes at once, before anything is lost."""

        class PlainForm(VersionedModelForm):
            class Meta:
                model = PlainRate
                fields = ("value",)

        with pytest.raises(TypeError, match=r"rates\.PlainRate has no VersionField, which PlainForm needs"):
            PlainForm()


MOMENT = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
WITHOUT_MICROSECONDS = MOMENT.replace(microsecond=0)
CHOICES = [("a", "A"), ("b", "B")]
WRAPPED: Any = RelatedFieldWidgetWrapper(forms.TextInput(), None, None, can_add_related=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "comes_back"),
    [
        (forms.CharField(), "a\nb ", "ab"),
        (forms.CharField(widget=forms.Textarea), "a\nb ", "a\r\nb"),
        (forms.CharField(strip=False), "a ", "a "),
        (forms.CharField(widget=WRAPPED), "a ", "a"),
        (forms.DateTimeField(), MOMENT, WITHOUT_MICROSECONDS),
        (forms.SplitDateTimeField(), MOMENT, WITHOUT_MICROSECONDS),
        (forms.SplitDateTimeField(widget=AdminSplitDateTime), MOMENT, WITHOUT_MICROSECONDS),
        (forms.DateField(widget=forms.SelectDateWidget), MOMENT.date(), MOMENT.date()),
        (forms.BooleanField(required=False), True, True),
        (forms.BooleanField(required=False), False, False),
        (forms.NullBooleanField(), None, None),
        (forms.ChoiceField(choices=CHOICES), "b", "b"),
        (forms.ChoiceField(choices=CHOICES, widget=forms.RadioSelect), "b", "b"),
        (forms.MultipleChoiceField(choices=CHOICES), ["a", "b"], ["a", "b"]),
        (forms.MultipleChoiceField(choices=CHOICES, widget=forms.CheckboxSelectMultiple), ["b"], ["b"]),
        (forms.JSONField(), {"b": [1.0], "a": "x "}, {"b": [1.0], "a": "x "}),
        (forms.IntegerField(), None, None),  # not valid, so unchanged
        (forms.ModelChoiceField(Thing._base_manager.none()), 5, 5),
    ],
)
def test_what_a_browser_sends_back(field: forms.Field, value: Any, comes_back: Any) -> None:
    """A browser sends an untouched value back in the form of its widget."""
    assert sent_back(field, value) == comes_back


class City(EmbeddedModel):  # type: ignore[misc]
    name = models.CharField(max_length=20)
    since = models.DateTimeField(null=True, blank=True)

    class Meta(Shape.Meta):
        abstract = False


class Customer(models.Model):  # noqa: DJ008 - never shown
    id = ObjectIdAutoField(primary_key=True)
    note = models.CharField(max_length=20, blank=True)
    city = EmbeddedModelField(City)
    others = EmbeddedModelArrayField(City, null=True, blank=True)
    tags = ArrayField(models.CharField(max_length=9), default=list)
    picture = models.BinaryField(default=b"")

    class Meta(Shape.Meta):
        abstract = False


class CustomerForm(SealedModelForm):
    class Meta:
        model = Customer
        fields = ("note", "city", "others")


class TestEmbedded:
    """Embedded documents are compared by each of their values."""

    def customer(self, city: str = "Bern", others: tuple[str, ...] = ("Bern",), **values: Any) -> Customer:
        """Return a customer as it is read."""
        pk = "6" * 24
        found = Customer(pk=pk, city=City(name=city), others=[City(name=each) for each in others], **values)
        found._state.adding = False
        return found

    def form(self, stored: Customer, city: str, others: tuple[str, ...] = ("Bern",), note: str = "new") -> Any:
        """Return the form sent from the page of a customer in Bern, for the *stored* customer."""
        rows = {f"others-{number}-name": name for number, name in enumerate(others)}
        count = {"others-TOTAL_FORMS": len(others), "others-INITIAL_FORMS": len(others)}
        seal = CustomerForm(instance=self.customer())["version_read"].value()
        return CustomerForm({"note": note, "city-name": city, "version_read": seal, **rows, **count}, instance=stored)

    @pytest.mark.parametrize(
        ("now", "typed", "name"),
        [
            ({"city": "Basel"}, ("Zurich",), "City"),
            ({"others": ("Basel",)}, ("Bern", ("Zurich",)), "Others"),
            ({"others": ()}, ("Bern", ("Zurich",)), "Others"),
        ],
    )
    def test_changed_meanwhile(self, now: dict[str, Any], typed: tuple[Any, ...], name: str) -> None:
        """A change inside an embedded document is not overwritten silently."""
        assert self.form(self.customer(**now), *typed).errors == {"__all__": [SAID % f"Changed meanwhile: {name}. "]}

    @pytest.mark.parametrize("now", [{"city": "Basel"}, {"others": ("Basel",)}, {"others": ()}])
    def test_left_alone(self, now: dict[str, Any]) -> None:
        """An embedded document that the user left alone stays as it is stored, and the page shows it."""
        stored = self.customer(**now)
        form = self.form(stored, "Bern")
        assert form.is_valid(), form.errors
        assert form.instance.city.name == now.get("city", "Bern")
        assert tuple(city.name for city in form.instance.others) == now.get("others", ("Bern",))
        city = form["city"].value()  # the sent value, since django-mongodb-backend 6.1
        assert (city["city-name"] if isinstance(city, dict) else city.name) == now.get("city", "Bern")

    def test_what_is_saved(self) -> None:
        """An unchanged field is no conflict. A typed value is taken. An emptied list is taken, too."""
        form = self.form(self.customer(), "Zurich", ())
        assert form.is_valid(), form.errors
        assert (form.instance.city.name, form.instance.others, form.instance.note) == ("Zurich", [], "new")

    def test_values_that_are_equal(self) -> None:
        """Two equal values have one digest, in any time zone and in any type of bytes."""
        there = datetime(2026, 7, 1, 12, tzinfo=ZoneInfo("Europe/Zurich"))
        one, other = self.customer(picture=memoryview(b"x")), self.customer(picture=memoryview(b"x"), tags=["a"])
        one.city.since, other.city.since = there, there.astimezone(UTC)
        page = sealed_page(one, dict.fromkeys(("city", "others", "picture", "tags")))
        assert [field.name for field in changed(page, other, page["fields"])] == ["tags"]


LIST = "/admin/rates/rate/"
PAGE = f"{LIST}EUR/change/"
DELETE = f"{LIST}EUR/delete/"


@pytest.fixture
def person(client: Client) -> Client:
    client.force_login(User.objects.create_superuser("root"))
    Rate.objects.create(name="EUR", value=1, note="n")
    return client


class ReplicaRouter:
    """A router that reads from another database than it writes to."""

    def db_for_read(self, *args: Any, **hints: Any) -> str:
        return "replica"

    def db_for_write(self, *args: Any, **hints: Any) -> str:
        return "primary"


@WITH_MONGO
class TestAdmin:
    """VersionedAdmin, with the change page, the list, and deleting."""

    def test_conflict_on_the_change_page(self, person: Client) -> None:
        """Nothing is written. The second send saves."""
        tab = Tab(person, PAGE)
        assert tab.fields["version_read"]
        Rate.objects.filter(pk="EUR").update(value=5, note="theirs")
        assert tab.send(note="mine").status_code == 200
        assert "Changed meanwhile: Value, Note." in tab.text
        assert (tab.fields["value"], tab.fields["note"]) == ("5", "mine")
        assert Rate.objects.get().note == "theirs"
        assert not LogEntry.objects.exists()
        assert tab.send().status_code == 302
        assert (Rate.objects.get().value, Rate.objects.get().note, Rate.objects.get().version) == (5, "mine", 3)

    def test_the_key_of_another(self, person: Client) -> None:
        """Saving under another key makes a copy, as in Django. No other object is overwritten."""
        Rate.objects.create(name="USD", value=2)
        tab = Tab(person, PAGE)
        assert tab.send(name="USD").status_code == 200
        assert "Rate with this Name already exists." in tab.text
        assert tab.send(name="CHF").status_code == 302
        assert list(Rate.objects.values_list("name", "value", "version")) == [
            ("CHF", 1, 1),
            ("EUR", 1, 1),
            ("USD", 2, 1),
        ]

    def test_faster_than_the_save(self, person: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        """A change between the check and the write leads to the same page."""
        tab, saved, save = Tab(person, PAGE), list[str](), RateAdmin.save_model

        def slow(self: Any, request: Any, obj: Any, form: Any, change: bool) -> None:
            if not saved:
                saved.append(obj.note)
                Rate.objects.filter(pk="EUR").update(note="theirs")
            save(self, request, obj, form, change)

        monkeypatch.setattr(RateAdmin, "save_model", slow)
        # The update was made in the request's own transaction here, and rolled back with it. Only the retry remains.
        assert tab.send(note="mine").status_code == 302
        assert saved == ["mine"]
        assert Rate.objects.get().note == "mine"

    @pytest.mark.parametrize("times", [1, 3])
    def test_a_busy_database(self, person: Client, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        """F212: A save that the database asks to repeat is repeated. After the second time, the form is shown again."""
        tab, save, errors = Tab(person, PAGE), Rate.save, [OperationalError(1213, "Deadlock found")] * times

        def busy(self: Any, *args: Any, **kwargs: Any) -> None:
            if errors:
                raise errors.pop()
            save(self, *args, **kwargs)

        monkeypatch.setattr(Rate, "save", busy)
        assert tab.send(note="mine").status_code == (302 if times == 1 else 200)
        assert Rate.objects.get().note == ("mine" if times == 1 else "n")
        assert tab.fields["note"] == ("n" if times == 1 else "mine")

    def test_deleted_while_it_was_edited(self, person: Client) -> None:
        """The typed text is still there, and can be saved as a new object."""
        tab = Tab(person, PAGE)
        Rate.objects.all().delete()
        tab.send(note="mine")
        assert "this was deleted while you were editing it." in tab.text
        assert (tab.fields["note"], tab.fields["version_read"]) == ("mine", "")
        assert not Rate.objects.exists()
        assert tab.send().status_code == 302
        assert (Rate.objects.get().note, Rate.objects.get().version) == ("mine", 1)
        assert person.post(f"{LIST}USD/change/", {"name": "USD"}).status_code == 302, "Django's own answer"

    def test_the_list(self, person: Client) -> None:
        """Rows that were changed meanwhile show their own errors. The second send saves the page."""
        Rate.objects.create(name="USD", value=2)
        tab = Tab(person, LIST)
        assert {"form-0-version_read", "form-1-version_read"} <= tab.fields.keys()
        Rate.objects.filter(pk="USD").update(value=20)
        assert tab.send({"form-0-value": "10", "form-1-value": "200"}, _save="Save").status_code == 200
        assert tab.text.count("Changed meanwhile: Value.") == 1
        assert [rate.value for rate in Rate.objects.all()] == [1, 20]
        assert (tab.fields["form-0-value"], tab.fields["form-1-value"]) == ("10", "200")
        assert tab.send(_save="Save").status_code == 302
        assert [rate.value for rate in Rate.objects.all()] == [10, 200]

    def test_an_untouched_row_of_the_list(self, person: Client) -> None:
        """If nothing was typed and no shown value has changed, there is no conflict."""
        Rate.objects.create(name="USD", value=2)
        tab = Tab(person, LIST)
        Rate.objects.filter(pk="USD").update(note="new")
        assert tab.send({"form-0-value": "10"}, _save="Save").status_code == 302
        assert [(rate.value, rate.note) for rate in Rate.objects.all()] == [(10, "n"), (2, "new")]

    def test_what_a_user_sees_no_more(self, person: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        """If the object is hidden by now, the typed text is shown, to be created again under another key."""
        tab, queryset = Tab(person, PAGE), RateAdmin.get_queryset
        monkeypatch.setattr(RateAdmin, "get_queryset", lambda *args: queryset(*args).exclude(note="closed"))
        Rate.objects.update(note="closed")
        tab.send(note="mine")
        assert "this was deleted while you were editing it" in tab.text
        assert tab.send().status_code == 200
        assert "Rate with this Name already exists." in tab.text
        assert tab.send(name="USD").status_code == 302
        assert [(rate.pk, rate.note) for rate in Rate.objects.all()] == [("EUR", "closed"), ("USD", "mine")]
        assert person.post(f"{PAGE}?_to_field=value", tab.fields).status_code == 400, "Django's own answer"

    def test_a_replica_that_is_behind(self, settings: Settings) -> None:
        """A page is compared with the database in which it is saved, including rows of inlines."""
        settings.DATABASE_ROUTERS = [ReplicaRouter()]
        for request, alias in ((RequestFactory().get("/"), "replica"), (RequestFactory().post("/"), "primary")):
            request.user = User(is_superuser=True, is_active=True)
            for kind in (RateAdmin(Rate, admin.site), ThingInline(Topic, admin.site)):
                assert kind.get_queryset(request).db == alias
            rows = BuyerAdmin(User, admin.site).get_formset_kwargs(request, User(), OrderRows(User, admin.site), "rows")
            assert rows["queryset"].db == alias

    @pytest.mark.parametrize(
        ("address", "typed"), [(PAGE, {"value": "5"}), (LIST, {"form-0-value": "5"}), (f"{LIST}add/", {"name": "USD"})]
    )
    def test_an_error_after_the_commit(self, person: Client, address: str, typed: dict[str, str]) -> None:
        """The error is raised. The page is not shown again, because it would make a second object or say that nothing
        was saved."""
        tab = Tab(person, address)
        with failing_hook(Rate, "mongo"):  # where Django runs such a function at once
            tab.send({"value": "1"} | typed, _save="Save")

    def test_an_action_is_run_once(self, person: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        """A conflict of an action is its own. Earlier effects of the action are not repeated."""
        runs: list[str] = []

        def twice(admin: Any, request: Any, queryset: Any) -> None:
            runs.append("run")
            first, second = queryset.get(), queryset.get()
            first.save()
            second.save()

        monkeypatch.setattr(RateAdmin, "actions", [twice])
        with pytest.raises(VersionConflict):
            person.post(LIST, {"action": "twice", "_selected_action": "EUR"})
        assert runs == ["run"]

    def test_an_action_with_a_page_of_its_own(self, person: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        """A template without a context is none of our business."""

        def shows(admin: Any, request: Any, queryset: Any) -> TemplateResponse:
            return TemplateResponse(request, "admin/404.html")

        monkeypatch.setattr(RateAdmin, "actions", [shows])
        assert person.post(LIST, {"action": "shows", "_selected_action": "EUR"}).status_code == 200

    def test_deleting(self, person: Client) -> None:
        """The question carries the version. After a change, or for a hand-made address, it is asked again."""
        asked = person.get(DELETE, follow=True)
        (address, status), *_ = asked.redirect_chain
        assert status == 302
        Rate.objects.filter(pk="EUR").update(note="theirs")
        for outdated in (DELETE, address):
            asked = person.post(outdated, {"post": "yes"}, follow=True)
            assert "This was changed meanwhile. Look again before you delete it." in asked.content.decode()
            assert Rate.objects.exists()
            assert not LogEntry.objects.exists()
        address, _status = asked.redirect_chain[-1]
        assert person.post(address, {"post": "yes"}).status_code == 302
        assert not Rate.objects.exists()
        assert person.get(DELETE).status_code == 302, "Django's own answer"

    def test_deleting_in_a_popup(self, person: Client) -> None:
        """Other parameters of the address stay. A user who may not delete learns nothing."""
        popup = f"{DELETE}?_popup=1&_to_field=name"
        asked = person.get(popup, follow=True)
        assert asked.status_code == 200
        Rate.objects.filter(pk="EUR").update(note="theirs")
        answered = person.post(asked.redirect_chain[0][0], {"post": "yes"}, follow=True)
        for address, _ in answered.redirect_chain:
            assert "_popup=1&_to_field=name" in address
        Rate.objects.update(note="EUR")
        assert person.get(f"{DELETE}?_to_field=note").status_code == 400, "Django's own answer: nobody refers to a note"
        person.force_login(User.objects.create_user("nobody", is_staff=True))
        assert person.get(DELETE).status_code == 403


class ThingInline(VersionedForms, admin.TabularInline):  # type: ignore[misc,type-arg]
    model = Thing
    fields = ("title", "count")
    extra = 0


class TopicAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """Things under their topic. The log, the template and the redirect are left out, because they need the project's
    own database."""

    inlines = (ThingInline,)

    def log_change(self, *args: Any) -> Any:
        return None

    def response_change(self, request: Any, obj: Any) -> HttpResponse:
        return HttpResponse("saved")

    def render_change_form(self, request: Any, context: Any, *args: Any, **kwargs: Any) -> HttpResponse:
        return TemplateResponse(request, "unused.html", context)


class TestInline:
    """Rows of an inline carry versions of their own."""

    def ask(self, topic: Topic, sent: dict[str, Any] | None = None) -> Any:
        request = RequestFactory().post("/", sent) if sent else RequestFactory().get("/")
        request.user = User(is_superuser=True, is_active=True)
        request._dont_enforce_csrf_checks = True  # type: ignore[attr-defined]
        return TopicAdmin(Topic, admin.AdminSite()).changeform_view(request, str(topic.pk))

    def fields(self, page: Any) -> dict[str, Any]:
        (inline,) = page.context_data["inline_admin_formsets"]
        forms = [inline.formset.management_form, *inline.formset.initial_forms]
        return {bound.html_name: bound.value() for form in forms for bound in form if bound.value() is not None}

    def test_conflict(self, db: str) -> None:
        """The changed row shows the error, and the others wait for it. The second send saves all of them."""
        topic = Topic._base_manager.create(name="t")
        one, two = (Thing.objects.create(title=title, topic=topic) for title in "ab")
        sent = {**self.fields(self.ask(topic)), "name": "t"}
        assert sum(name.endswith("version_read") for name in sent) == 2
        number = {sent[f"things-{row}-title"]: row for row in range(2)}
        somebody_else(one, title="theirs")
        sent |= {f"things-{number['a']}-title": "mine", f"things-{number['b']}-count": 5}
        page = self.ask(topic, sent)
        (inline,) = page.context_data["inline_admin_formsets"]
        assert "Changed meanwhile: Title." in str(inline.formset.forms[number["a"]].errors)
        assert not inline.formset.forms[number["b"]].errors
        assert (again(one).title, again(two).count) == ("theirs", 0)
        assert self.ask(topic, {**self.fields(page), "name": "t"}).content == b"saved"
        assert (again(one).title, again(two).count) == ("mine", 5)

    def test_deleting(self, db: str) -> None:
        """A row that was changed meanwhile is not deleted unseen. The second send deletes it."""
        topic = Topic._base_manager.create(name="t")
        thing = Thing.objects.create(title="a", topic=topic)
        sent = {**self.fields(self.ask(topic)), "name": "t", "things-0-DELETE": "on"}
        somebody_else(thing, title="theirs")
        page = self.ask(topic, sent)
        (inline,) = page.context_data["inline_admin_formsets"]
        assert "Changed meanwhile: Title." in str(inline.formset.forms[0].errors)
        assert again(thing).title == "theirs"
        assert self.ask(topic, {**self.fields(page), "name": "t"}).content == b"saved"
        assert not Thing.objects.exists()


def test_the_form_of_an_admin_is_checked() -> None:
    """manage.py check finds a form that does not carry the version. Hand-made fieldsets are completed."""

    class PlainForm(forms.ModelForm):  # type: ignore[type-arg]
        class Meta:
            model = Rate
            fields = ("value",)

    class Plain(VersionedAdmin):
        form = PlainForm

    class Right(VersionedAdmin):
        fieldsets = ((None, {"fields": ("value", "version_read")}),)

    class Wrong(VersionedForms, admin.ModelAdmin):  # type: ignore[type-arg]
        form = PlainForm  # type: ignore[assignment]

    def ids(kind: Any) -> list[str | None]:
        return [found.id for found in kind(Rate, admin.site).check()]

    assert ids(Wrong) == ["mongolock.E072"]
    assert ids(Right) == ids(Plain) == ids(VersionedAdmin) == []
    assert issubclass(ThingInline.form, VersionedModelForm)


class JoiningManager(VersionedManager["Joined"]):
    """Joins a relation that a row may lack."""

    def get_queryset(self) -> Any:
        return super().get_queryset().select_related("topic")


class Joined(Thing):
    """A model with a base manager that joins, too."""

    objects = JoiningManager()

    class Meta(Shape.Meta):
        abstract = False
        proxy = True
        base_manager_name = "objects"


class OnePage(VersionedAdmin):
    """An admin without the log and the redirects, because they need the project's own database."""

    def log_change(self, *args: Any) -> Any:
        return None

    def log_deletions(self, *args: Any) -> Any:
        return None

    def response_change(self, request: Any, obj: Any) -> HttpResponse:
        return HttpResponse("saved")

    def render_change_form(self, request: Any, context: Any, *args: Any, **kwargs: Any) -> HttpResponse:
        return TemplateResponse(request, "unused.html", context)

    def response_delete(self, request: Any, *args: Any) -> HttpResponse:
        return HttpResponse("deleted")

    def get_deleted_objects(self, objs: Any, request: Any) -> Any:
        return [], {}, set(), []


class OtherDatabase(OnePage):
    """The `MultiDBModelAdmin` of Django's documentation, with an explicit database."""

    using = ""

    def get_queryset(self, request: Any) -> Any:
        return super().get_queryset(request).using(self.using)

    def save_model(self, request: Any, obj: Any, form: Any, change: bool) -> None:
        obj.save(using=self.using)

    def delete_model(self, request: Any, obj: Any) -> None:
        obj.delete(using=self.using)


@pytest.mark.parametrize("kind", ["joined", "other"])
def test_pages_of_other_managers_and_databases(
    db: str, settings: Settings, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """F207: A page is saved, and the object deleted, where a manager joins nullable relations, and in the database
    that the
    admin names."""
    model: Any = Joined if kind == "joined" else Named  # Django looks for a unique title in the default database
    thing: Any = model.objects.using(db).create(**({"title": "a"} if kind == "joined" else {"name": "a"}))
    base = OnePage if kind == "joined" else OtherDatabase
    monkeypatch.setattr(base, "fields", ("count",) if kind == "joined" else ("value",))
    if kind == "other":
        settings.DATABASE_ROUTERS = []
        monkeypatch.setattr(OtherDatabase, "using", db)
    view: Any = base(model, admin.AdminSite())

    def ask(method: str, path: str, data: Any, call: Any) -> Any:
        request = getattr(RequestFactory(), method)(path, data)
        request.user = User(is_superuser=True, is_active=True)
        request._dont_enforce_csrf_checks = True
        return call(request, str(thing.pk))

    page = ask("get", "/", {}, view.changeform_view)
    sent = sent_of(page.context_data["adminform"].form) | {"count": 5, "value": 5}
    assert ask("post", "/", sent, view.changeform_view).content == b"saved"
    thing.refresh_from_db()
    assert getattr(thing, "count" if kind == "joined" else "value") == 5
    address = ask("get", "/", {}, view.delete_view)["Location"]
    assert ask("post", address, {"post": "yes"}, view.delete_view).content == b"deleted"
    assert not model.objects.using(db).exists()


def test_rows_of_a_page_are_locked(db: str) -> None:
    """F212: If the database can lock rows, nobody writes to the rows of a page between their comparison and their
    save."""
    topic = Topic._base_manager.create(name="t")
    thing = Thing.objects.create(title="a", topic=topic)
    with all_or_nothing(db), CaptureQueriesContext(connections[db]) as queries:
        lock_rows(Thing.objects.using(db), topic=topic)
        assert locked_row(Thing, db, thing.pk) == thing
    locks = ["FOR UPDATE" in query["sql"] for query in queries.captured_queries]
    assert any(locks) == connections[db].features.has_select_for_update
