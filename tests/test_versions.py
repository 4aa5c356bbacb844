"""A save never overwrites a change made since the read. These tests run on SQLite, PostgreSQL and MongoDB."""

from __future__ import annotations

import contextlib
import json
import pickle
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.core.serializers.base import DeserializedObject
from django.db import DatabaseError, IntegrityError, connections, models, transaction
from django.db.models import F, ProtectedError
from django.db.transaction import TransactionManagementError
from django.forms.models import model_to_dict
from pymongo import MongoClient
from pytest_django import DjangoDbBlocker

from bench import rates
from django_mongolock import LockError
from django_mongolock.exceptions import VersionConflict
from django_mongolock.versions import VersionField
from django_mongolock.versions.checking import all_or_nothing
from testproject.servers import Mongod
from tests.support.programs import python
from tests.versioned.databases import added, db, failing_hook, home, mariadb, on_sql, postgres
from tests.versioned.shapes import (
    Bare,
    Base,
    Child,
    Guard,
    Named,
    Pair,
    Part,
    Renamed,
    SoftThing,
    Thing,
    ThingProxy,
    Topic,
)

__all__ = ["db", "home", "mariadb", "postgres"]

ROOT = Path(__file__).resolve().parent.parent


def make(db: str, **values: Any) -> Thing:
    return Thing.objects.using(db).create(**{"title": "a", **values})


def two(db: str, model: Any = Thing, **values: Any) -> tuple[Any, Any]:
    """Return the same row, read twice."""
    made = model._base_manager.using(db).create(**values) if values or model is not Thing else make(db)
    read = model._base_manager.using(db)
    return read.get(pk=made.pk), read.get(pk=made.pk)


def refused(call: Callable[..., Any], *arguments: Any, **options: Any) -> VersionConflict:
    """Return the conflict that refuses a call."""
    with pytest.raises(VersionConflict) as caught:
        call(*arguments, **options)
    return caught.value


def stored(one: models.Model, db: str) -> Any:
    return type(one)._base_manager.using(db).get(pk=one.pk)


class TestSave:
    """Model.save() in all its forms."""

    def test_the_second_of_two_is_refused(self, db: str) -> None:
        """The refused save writes nothing. The error has both versions and the differences."""
        first, second = two(db)
        first.count, second.count, second.title = 1, 2, "b"
        first.save()
        error = refused(second.save)
        assert isinstance(error, LockError)
        assert (error.what, error.pk, error.read, error.stored) == ("versioned.Thing", first.pk, 1, 2)
        assert error.changed == {"title": ("b", "a"), "count": (2, 1)}
        now = stored(first, db)
        assert (now.title, now.count, now.version) == ("a", 1, 2)
        assert second.version == 1, "the instance says what was read, so that a second try is refused as well"
        refused(second.save)

    def test_the_error_survives_pickling(self, db: str) -> None:
        """Celery pickles the error. An expression in it does no harm, and values stay out of the message."""
        first, second = two(db)
        first.save()
        second.count, second.title = F("count") + 1, "secret"
        error = refused(second.save)
        again = pickle.loads(pickle.dumps(error))  # noqa: S301
        assert vars(again) == vars(error)
        assert str(again) == str(error)
        assert "read in version 1, stored in version 2; different: title, count" in str(again)
        assert "secret" not in str(again)
        assert again.changed["count"] == ("<CombinedExpression: F(count) + Value(1)>", 0)

    def test_update_fields(self, db: str) -> None:
        """The version is checked and raised, even if update_fields does not name it."""
        first, second = two(db)
        first.count = 1
        first.save(update_fields=["count"])
        assert (first.version, stored(first, db).version) == (2, 2)
        second.title, second.count = "b", 9
        error = refused(second.save, update_fields=["title"])
        assert set(error.changed) == {"title"}
        second.refresh_from_db()
        second.title = "b"
        second.save(update_fields={"title", "version"})
        assert (stored(first, db).title, stored(first, db).count, stored(first, db).version) == ("b", 1, 3)

    def test_deleted_meanwhile(self, db: str) -> None:
        """A save does not bring back a deleted row."""
        first, second = two(db)
        first.delete()
        for options in ({}, {"force_update": True}, {"update_fields": ["count"]}):
            error = refused(second.save, **options)
            assert str(error).endswith("deleted meanwhile: read in version 1")
            assert error.stored is None
        assert not Thing.objects.using(db).exists()
        second.version = 7
        second.save(force_insert=True)
        assert second.version == stored(second, db).version == 1

    def test_what_was_never_read_is_not_written_over(self, db: str) -> None:
        """Django would overwrite an existing row for an instance with its key that was never read."""
        Named.objects.using(db).create(pk="a", value=1)
        error = refused(Named(pk="a", value=2).save, using=db)
        assert "there before, and not read: stored in version 1" in str(error)
        assert (error.read, error.changed) == (None, {"value": (2, 1)})
        refused(Named(pk="a", value=2).save, using=db, force_update=True)
        refused(Named(pk="a", value=2, version=1).save, using=db, update_fields=["value"])
        assert "not read before" in str(refused(Named(pk="a", version=1).delete, using=db))
        assert Named.objects.using(db).get().value == 1
        Named(pk="b").save(using=db)
        assert Named.objects.using(db).count() == 2

    def test_a_new_row_with_a_key_of_its_own(self, db: str) -> None:
        """A forced update of a missing row raises the usual error."""
        with pytest.raises(DatabaseError) as caught:
            Thing(title="x").save(using=db, force_update=True)
        assert not isinstance(caught.value, VersionConflict)

    def test_expressions(self, db: str) -> None:
        """F() works, once per save. The version itself must not be set by the user."""
        first, second = two(db)
        first.count = F("count") + 3
        first.save()
        assert stored(first, db).count == 3
        second.count = F("count") + 4
        refused(second.save)
        again = stored(first, db)
        for wrong in (F("version") + 1, "2", True, 2.5):
            again.version = wrong
            with pytest.raises(ValueError, match=r"version of versioned\.Thing counts by itself"):
                again.save()

    def test_deferred_version(self, db: str) -> None:
        """A row that was read without its version cannot be saved or deleted. Reading the version later does not
        help."""
        made = make(db)
        partly = models.QuerySet[Thing](Thing, using=db).only("title").get(pk=made.pk)
        assert partly.version == 1
        made.save()
        partly.title = "b"
        with pytest.raises(ValueError, match=r"read without its version.*add 'version' to only\(\)"):
            partly.save()
        with pytest.raises(ValueError, match="read without its version"):
            partly.delete()
        assert stored(made, db).title == "a"

    def test_only_and_defer_keep_the_version(self, db: str) -> None:
        """With the manager of versions, the version is always read. Other deferred fields stay deferred."""
        made = make(db, count=7)
        for read in (Thing.objects.using(db).only("title"), Thing.objects.using(db).defer("version", "count")):
            thing = read.get(pk=made.pk)
            assert thing.get_deferred_fields() >= {"count"}
            thing.title = f"{thing.title}b"
            thing.save()
            assert thing.version == stored(made, db).version
        assert (stored(made, db).title, stored(made, db).count, stored(made, db).version) == ("abb", 7, 3)
        assert not Thing.objects.using(db).defer("count").defer(None).get(pk=made.pk).get_deferred_fields()
        assert not Thing.objects.using(db).defer("version").get(pk=made.pk).get_deferred_fields()

    def test_a_deferred_field_that_is_loaded_later(self, db: str) -> None:
        """A field that is loaded later may be newer than the rest. The rest stays as it was read, and is not saved over
        a change."""
        made = make(db, count=1)
        for read in (Thing.objects.using(db), models.QuerySet[Thing](Thing, using=db)):
            thing = read.defer("count").get(pk=made.pk)
            version = thing.version
            made.count += 1
            made.save()
            assert thing.count == made.count
            assert thing.version == version
            refused(thing.save)

    def test_refresh(self, db: str) -> None:
        """After refresh_from_db() the version is new. A partial refresh keeps the older version."""
        first, second = two(db)
        first.count = 5
        first.save()
        for options in ({}, {"from_queryset": Thing.objects.using(db)}):
            second.refresh_from_db(fields=["count"], **options)
            assert (second.count, second.version) == (5, 1)
            refused(second.save)
        second.refresh_from_db(fields=["version"])
        assert second.version == 2, "who asks for it gets it: I have seen it, and write over it"
        second.refresh_from_db()
        second.save()
        assert second.version == 3

    def test_copies(self, db: str) -> None:
        """A copy without its key, made by the usual two lines, starts again at 1. The original stays as it is."""
        original = make(db)
        original.save()
        for adding in (True, False):
            copy = stored(original, db)
            copy.pk, copy.title = uuid.uuid4() if adding else None, f"copy {adding}"
            copy._state.adding = adding
            copy.save(using=db)
            assert copy.pk != original.pk
            assert (copy.version, stored(copy, db).version, stored(original, db).version) == (1, 1, 2)
            copy.save()
        (copy,) = Thing.objects.using(db).bulk_create([Thing(**{**model_to_dict(original), "title": "bulk"})])
        copy.save()
        assert (copy.version, stored(copy, db).version) == (2, 2)

    def test_fixtures(self, db: str) -> None:
        """F209: loaddata writes the fixture over the stored row, but raises the version. Saving an older copy is
        refused. A new row has the version of the fixture, or none."""
        thing = make(db)
        thing.save()
        for given in (1, 9):
            fixture = Thing(pk=thing.pk, title="fixture", version=given, changed_at=thing.changed_at)
            job = stored(thing, db)
            DeserializedObject(fixture).save(using=db)
            assert (stored(thing, db).title, stored(thing, db).version) == ("fixture", max(given, job.version) + 1)
            assert fixture.version == stored(thing, db).version
            refused(job.save)
        made = Bare.objects.using(db).create(title="a")
        DeserializedObject(Bare(pk=made.pk, title="b", revision=None)).save(using=db)
        assert [stored(made, db).title, stored(made, db).revision] == ["b", 2], "a fixture without a version"
        new = Named(pk="old")
        new.save_base(raw=True, using=db)
        assert (new.version, stored(new, db).version) == (0, 0), "a new row, as it is stored"
        new.save()
        assert stored(new, db).version == 1

    def test_rows_from_before_the_field(self, db: str) -> None:
        """A row with version null (or a document without one) is checked as well, and gets its first number."""
        made = Bare.objects.using(db).create(title="a")
        models.QuerySet(Bare, using=db).update(revision=None)
        if connections[db].vendor == "mongodb":
            connection: Any = connections[db]
            connection.get_collection(Bare._meta.db_table).update_one({}, {"$unset": {"documentVersion": 1}})
        first, second = stored(made, db), stored(made, db)
        assert first.revision is None
        first.save()
        assert [first.revision, stored(made, db).revision] == [1, 1]
        refused(second.save)
        models.QuerySet(Bare, using=db).update(revision=None)
        assert Bare.objects.using(db).update(title="b") == 1
        assert stored(made, db).revision == 1

    @pytest.mark.parametrize(("model", "name"), [(Bare, "revision"), (Renamed, "revision"), (ThingProxy, "version")])
    def test_kinds_of_models(self, db: str, model: Any, name: str) -> None:
        """The field alone is enough, whatever its name and whatever the manager hides. A model may read before it
        updates, or have another field called version. A proxy has the version of its model."""
        first, second = two(db, model, title="hidden")
        first.save()
        assert getattr(first, name) == getattr(stored(first, db), name) == 2
        for fail in (second.save, second.delete):
            error = refused(fail)
            assert (error.read, error.stored) == (1, 2)
        assert model is not Renamed or first.version is None

    def test_a_failed_insert_does_not_count_as_read(self, db: str) -> None:
        """After an IntegrityError a second save() does not take another row for its own."""
        there = Named.objects.using(db).create(pk="a", value=1)
        late = Named(pk="a", value=2)
        with pytest.raises(IntegrityError):
            late.save(using=db, force_insert=True)
        refused(late.save, using=db)
        assert stored(there, db).value == 1


class TestDelete:
    """Model.delete() deletes only a row that is unchanged since its read, with everything that Django does about
    relations."""

    def test_only_the_version_that_was_read(self, db: str) -> None:
        """A row that was changed meanwhile stays."""
        first, second = two(db)
        first.count = 5
        first.save()
        error = refused(second.delete)
        assert (error.read, error.stored, second.version) == (1, 2, 1)
        assert error.changed == {"count": (0, 5)}
        assert stored(first, db).version == 2
        assert first.delete() == (1, {"versioned.Thing": 1})
        assert "deleted meanwhile" in str(refused(second.delete))

    def test_relations(self, db: str) -> None:
        """Cascades delete related rows. A protected row stays, with its version."""
        thing = make(db)
        Part._base_manager.using(db).create(thing=thing)
        guard = Guard._base_manager.using(db).create(thing=thing)
        with pytest.raises(ProtectedError):
            thing.delete()
        assert thing.version == 1
        assert stored(thing, db).version == 1, "rolled back: the MongoDB of the test run is a replica set"
        with all_or_nothing(db):  # MongoDB rolls no part of it back
            with pytest.raises(ProtectedError):
                thing.delete()
            thing.save()
        guard.delete()
        assert thing.delete() == (2, {"versioned.Part": 1, "versioned.Thing": 1})

    def test_set_null_raises_the_version(self, db: str) -> None:
        """A change by Django itself raises the version."""
        topic = Topic._base_manager.using(db).create(name="t")
        first = stored(make(db, topic=topic), db)
        topic.delete()
        refused(first.save)
        assert (stored(first, db).version, stored(first, db).topic_id) == (2, None)

    def test_a_soft_delete_stays_soft(self, db: str) -> None:
        """A delete() of the user below a bare field is not undercut."""
        made = SoftThing._base_manager.using(db).create()
        late = stored(made, db)
        made.delete()
        assert stored(made, db).deleted
        refused(late.delete)


class TestInheritance:
    """A version in the parent's table guards the child's as well."""

    def test_child(self, db: str) -> None:
        """The version is checked first and raised, whichever table is written."""
        made = Child.objects.using(db).create(name="n", extra="e")
        kinds: list[Any] = [Child, Child, Base]
        child, late, parent = (model.objects.using(db).get(pk=made.pk) for model in kinds)
        child.extra = "f"
        child.save(update_fields=["extra"])
        assert (child.version, stored(child, db).version) == (2, 2)
        refused(parent.save)
        late.name, late.extra = "x", "y"
        error = refused(late.save)
        assert error.changed == {"name": ("x", "n"), "extra": ("y", "f")}
        assert (stored(child, db).name, stored(child, db).extra) == ("n", "f")
        refused(late.delete)
        parent = stored(parent, db)
        parent.save()
        refused(child.save)
        assert stored(child, db).delete()[0] == 2
        assert not Base.objects.using(db).exists()

    def test_a_child_that_is_refused(self, db: str) -> None:
        """If the parent is rolled back with the child, the instance has the stored version, and can be corrected and
        saved."""
        Child.objects.using(db).create(name="n", extra="taken")
        child = Child.objects.using(db).create(name="n", extra="e")
        child.extra = "taken"
        with pytest.raises(IntegrityError):
            child.save()
        assert child.version == stored(child, db).version
        child.extra = "f"
        child.save()

    def test_a_child_for_a_parent_that_is_there(self, db: str) -> None:
        """A child made from a read parent, as in Django's documentation, counts as a change of the parent."""
        parent = Base.objects.using(db).create(name="n")
        child = Child(base_ptr=parent, extra="e")
        child.__dict__.update({**parent.__dict__})
        child.save(using=db)
        assert (stored(child, db).version, stored(child, db).extra) == (2, "e")
        refused(parent.save)


class TestQuerySet:
    """Methods that write many rows at once."""

    def test_update_raises_the_version(self, db: str) -> None:
        """Saving an earlier copy is refused. An explicit version is taken. An update without a change changes
        nothing."""
        first, second = two(db)
        assert Thing.objects.using(db).filter(title="a").update(count=F("count") + 5) == 1
        assert (stored(first, db).count, stored(first, db).version) == (5, 2)
        refused(first.save)
        refused(second.delete)
        Thing.objects.using(db).update(version=40)
        assert Thing.objects.using(db).update() == 0
        assert stored(first, db).version == 40

    def test_bulk_update(self, db: str) -> None:
        """All rows are written or none, each in the version that was read."""
        made = [make(db, title=f"t{number}") for number in range(4)]
        made[1].save()
        things = list(Thing.objects.using(db).order_by("title"))
        for number, thing in enumerate(things):
            thing.count, thing.title = number + 10, f"{thing.title}x"
        assert Thing.objects.using(db).bulk_update(things, ["count", "version"], batch_size=3) == 4
        assert [thing.version for thing in things] == [2, 3, 2, 2]
        now = list(Thing.objects.using(db).order_by("title").values_list("title", "count", "version"))
        assert now == [("t0", 10, 2), ("t1", 11, 3), ("t2", 12, 2), ("t3", 13, 2)]
        made[2].refresh_from_db()
        made[2].save()
        for thing in things:
            thing.count = 99
        error = refused(Thing.objects.using(db).bulk_update, things, ["count"])
        assert (error.pk, error.read, error.stored) == (made[2].pk, 2, 3)
        assert [thing.version for thing in things] == [2, 3, 2, 2]
        assert not Thing.objects.using(db).filter(count=99).exists()
        assert [thing.version for thing in Thing.objects.using(db).order_by("title")] == [2, 3, 3, 2]
        with pytest.raises(ValueError, match="primary key set"):
            Thing.objects.using(db).bulk_update([*things, Thing(pk=None)], ["count"])
        assert Thing.objects.using(db).bulk_update([], ["count"]) == 0

    def test_bulk_update_by_a_manager_that_hides_some(self, db: str) -> None:
        """All given rows are written, as by save()."""
        hidden = Bare(title="hidden")
        hidden.save(using=db)
        hidden.title = "seen"
        assert Bare.objects.using(db).bulk_update([hidden], ["title"]) == 1
        assert (stored(hidden, db).title, stored(hidden, db).revision) == ("seen", 2)

    def test_bulk_update_of_two_copies(self, db: str) -> None:
        """If two copies of one row were written, one would be lost silently. The same instance twice is harmless."""
        one, other = two(db)
        one.count, other.title = 5, "b"
        with pytest.raises(ValueError, match=r"in the list twice.*Read each row once"):
            Thing.objects.using(db).bulk_update([one, other], ["count", "title"])
        assert (stored(one, db).count, stored(one, db).version) == (0, 1)
        Thing.objects.using(db).bulk_update([one, one], ["count"])
        assert (stored(one, db).count, stored(one, db).version) == (5, 2)

    @pytest.mark.long
    def test_bulk_update_of_more_than_a_batch(self, db: str) -> None:
        """The number of parameters of a database is no limit."""
        things = Thing.objects.using(db).bulk_create([Thing(title=f"{number}") for number in range(1200)])
        assert all(thing.version == 1 for thing in things)
        for thing in things:
            thing.count = 1
        assert Thing.objects.using(db).bulk_update(things, ["count"]) == 1200
        assert Thing.objects.using(db).filter(count=1, version=2).count() == 1200

    def test_bulk_update_of_children(self, db: str) -> None:
        """Both tables are written."""
        made = Child.objects.using(db).create(name="n", extra="e")
        late = stored(made, db)
        made.extra = "f"
        assert Child.objects.using(db).bulk_update([made], ["extra"]) == 1
        assert (stored(made, db).extra, stored(made, db).version) == ("f", 2)
        late.extra = "g"
        refused(Child.objects.using(db).bulk_update, [late], ["extra"])

    @on_sql
    def test_a_key_of_several_columns(self, db: str) -> None:
        """A conflict of delete() and bulk_update() is reported for such a key as well."""
        with connections[db].schema_editor() as editor:
            editor.create_model(Pair)
        first, second = two(db, Pair, left=1, right=2)
        first.save()
        for fail in (second.delete, lambda: Pair.objects.using(db).bulk_update([second], ["value"])):
            error = refused(fail)
            assert (error.pk, error.read, error.stored) == ((1, 2), 1, 2)
        with connections[db].schema_editor() as editor:
            editor.delete_model(Pair)

    def test_upserts_are_refused(self, db: str) -> None:
        """Upserts would overwrite rows that the caller has not read."""
        with pytest.raises(ValueError, match=r"update_conflicts=True.*use bulk_update"):
            Thing.objects.using(db).bulk_create(
                [Thing(title="a")], update_conflicts=True, update_fields=["count"], unique_fields=["title"]
            )

    @on_sql  # the backend for MongoDB has no ignore_conflicts
    def test_what_bulk_create_may_not_have_made(self, db: str) -> None:
        """With ignore_conflicts, the origin of the row is unknown. The row has to be read before it is saved."""
        Named.objects.using(db).create(pk="a", value=1)
        (ignored,) = Named.objects.using(db).bulk_create([Named(pk="a", value=2)], ignore_conflicts=True)
        with pytest.raises(ValueError, match="read without its version"):
            ignored.save(using=db)
        assert Named.objects.using(db).get().value == 1

    def test_update_or_create_tries_again(self, db: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without row locks, another writer may come between its read and its write. The method retries, because it
        wants to set values."""
        made = make(db)
        asked: list[int] = []

        def value() -> int:
            if not asked and connections[db].vendor == "mongodb":  # others lock the row, or the table
                Thing.objects.using(db).update(count=100)
            asked.append(1)
            return 7

        thing, _ = Thing.objects.using(db).update_or_create(title="a", defaults={"count": value})
        assert stored(made, db).count == 7
        assert thing.version == stored(made, db).version == (3 if connections[db].vendor == "mongodb" else 2)


class TestTransactions:
    """The effects of a surrounding transaction."""

    @on_sql
    def test_a_savepoint_keeps_the_rest(self, db: str) -> None:
        """As for IntegrityError, the conflict can be caught in an atomic() of its own."""
        first, second = two(db)
        first.save()
        with transaction.atomic(using=db):
            make(db, title="b")
            for fail in (second.save, second.delete):
                with pytest.raises(VersionConflict), transaction.atomic(using=db):
                    fail()
            assert Thing.objects.using(db).count() == 2
        assert Thing.objects.using(db).count() == 2

    @pytest.mark.parametrize(
        "write",
        [lambda one, _: one.delete(), lambda one, rows: rows.bulk_update([one], ["count"])],
        ids=["delete", "bulk"],
    )
    def test_inside_that_of_django(self, db: str, write: Callable[..., Any]) -> None:
        """Django's atomic() does nothing on MongoDB, and prevents no writes there."""
        thing, ran = make(db), list[str]()
        with transaction.atomic(using=db), transaction.atomic(using=db):
            thing.count = 5
            write(thing, Thing.objects.using(db))
            transaction.on_commit(lambda: ran.append("hook"), using=db)
        assert ran == ["hook"]
        assert not Thing.objects.using(db).filter(version=1).exists()
        with pytest.raises(TransactionManagementError), transaction.atomic(using=db):
            connections[db].validate_no_atomic_block()

    @on_sql
    def test_an_error_after_the_commit(self, db: str) -> None:
        """The instance has the committed version."""
        soft = SoftThing(pk=uuid.uuid4())
        soft.save(using=db)
        with failing_hook(SoftThing, db):
            soft.delete()
        assert (soft.version, stored(soft, db).version) == (3, 3)
        soft.save()

    @pytest.mark.long
    def test_a_standalone_server(self, django_db_blocker: DjangoDbBlocker) -> None:
        """A MongoDB without transactions is checked as well, but not in one transaction with further commands."""
        with Mongod() as server, django_db_blocker.unblock(), added("mongo", server.uri, "standalone") as alias:
            first, second = two(alias)
            first.save()
            for fail in (
                second.save,
                second.delete,
                lambda: Thing.objects.using(alias).bulk_update([second], ["count"]),
            ):
                refused(fail)
            assert Thing.objects.using(alias).bulk_update([first], ["count"]) == 1
            assert first.delete()[0] == 1


class TestField:
    """The field, apart from any database."""

    def test_unfit_options(self) -> None:
        """A version counts, and cannot be a key."""
        with pytest.raises(TypeError, match="VersionField cannot be primary_key, unique"):
            VersionField(primary_key=True, unique=True)

    def test_migrations_show_what_was_said(self) -> None:
        """Migrations show the chosen options, without the constant ones."""
        field = VersionField("revision", db_column="documentVersion")
        assert field.deconstruct()[1:] == (
            "django_mongolock.versions.VersionField",
            [],
            {"verbose_name": "revision", "db_column": "documentVersion"},
        )
        assert not field.editable
        assert field.default == 0
        assert not field.clone().editable

    def test_without_a_version(self, db: str) -> None:
        """A queryset of versions for a model without one raises an error."""
        from django_mongolock.versions import VersionedQuerySet

        with pytest.raises(TypeError, match=r"versioned\.Topic has no VersionField"):
            VersionedQuerySet(Topic, using=db).update(name="x")

    def test_checks(self) -> None:
        """Each rule has its id. The cases are two versions, Django's order, managers without versions, and a version
        below a parent."""
        from django.apps.registry import Apps

        from django_mongolock.versions import VersionedManager, VersionedModel

        class Here:
            apps = Apps(["tests.versioned"])
            app_label = "versioned"

        class Parent(models.Model):  # noqa: DJ008 - never shown
            Meta = Here

        class Lower(Parent):  # noqa: DJ008 - never shown
            version = VersionField()
            Meta = Here

        class Twice(VersionedModel):
            other = VersionField()
            Meta: Any = Here

        def ids(model: type[models.Model]) -> set[str | None]:
            return {found.id for field in model._meta.local_fields for found in field.check() if found.obj is field}

        assert ids(Thing) == ids(Bare) == ids(Renamed) == ids(Child) == ids(Base) == set()

        class Alone(models.Model):  # noqa: DJ008 - never shown
            version = VersionField()
            objects = VersionedManager()
            Meta = Here

        class Ordered(VersionedModel):
            parent = models.ForeignKey(Parent, models.CASCADE)

            class Meta(VersionedModel.Meta, Here):
                order_with_respect_to = "parent"

        assert ids(Ordered) == {"mongolock.E074"}
        assert ids(Lower) == {"mongolock.W071", "mongolock.W072"}
        assert ids(Alone) == {"mongolock.W071"}, "Django's own base manager writes SET_NULL"
        assert ids(Twice) == {"mongolock.E071"}


class TestRace:
    """The two-table example: five processes replace the latest rate at once, and append the replaced one.

    Each process does both in one transaction, with the defaults of Django and of the database. A longer race is `python
    -m bench.rates --runs 100`.
    """

    @pytest.mark.long
    @pytest.mark.parametrize("kind", rates.KINDS)
    def test_nothing_is_missing_from_the_history(
        self, kind: str, tmp_path: Path, mongo: MongoClient[dict[str, Any]], request: pytest.FixtureRequest
    ) -> None:
        """F71: Plain saves lose values. With versions and retries every value is found, and no writer dies."""
        name = f"versions_race_{uuid.uuid4().hex[:8]}"
        with contextlib.ExitStack() as servers:
            if kind in ("PostgreSQL", "MariaDB"):
                uri = request.getfixturevalue(kind.lower().replace("postgresql", "postgres"))
            else:
                uri = rates.uri_of(kind, tmp_path, servers)
        options = ["--database", "rates" if uri else "mongo", "--runs", "2"]
        said = python("-m", "testproject.rates", *options, folder=ROOT, MONGODB_NAME=name, RATES_URI=uri)
        mongo.drop_database(name)
        report = json.loads(said)
        assert report["versioned"]["missing"] == 0
        assert report["plain"]["missing"] > 0, "no race: the test proves nothing"
        assert report["plain"]["written"] == report["versioned"]["written"] == 2 * 20
