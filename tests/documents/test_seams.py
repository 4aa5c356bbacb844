"""The seams to Django, such as instances, fields, and primary keys. F132 to F138, each as it was found."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core.management import call_command
from django.db import DatabaseError
from django.forms import modelform_factory

from django_mongolock.documents import DocumentLock
from django_mongolock.exceptions import DocumentChanged, DocumentLockLost, LockMisused, VersionConflict
from django_mongolock.transactions import mongo_atomic
from tests.documents.conftest import FINAL, PENDING, Ground
from tests.documents.models import Advert, CodedAdvert, EmbeddingAdvert, Locked, LongAdvert, Proxied, ProxyAdvert
from tests.support.lock_fixtures import WITH_MONGO

pytestmark = WITH_MONGO


def rows(model: type[Locked] = Advert) -> Any:
    return model._default_manager.using("mongo")


class TestTheDocumentAsItWillBe:
    """F132: `pending=` and `final=` see the changes that are written with them."""

    @staticmethod
    def work_on(ad: Any) -> str:
        return "exporting" if (ad["opted_in"] if isinstance(ad, dict) else ad.opted_in) else "withdrawing"

    @pytest.mark.parametrize("many", [False, True])
    def test_pending(self, ground: Ground, many: bool) -> None:
        """The how-to's own example: an ad that is opted out is withdrawn, not exported. The read instance is
        unchanged."""
        id_ = ground.add(1, opted_in=True)
        read = ground.lock._source.instance(ground.raw(id_))
        options: dict[str, Any] = {"changes": {"opted_in": False}, "final": "withdrawn"}
        if many:
            (held,) = ground.lock.acquire_many([read], self.work_on, **options)
        else:
            held = ground.lock.acquire(read, self.work_on, **options)
        assert held.pending == "withdrawing"
        assert self.work_on(read) == "exporting"
        held.finish()

    @pytest.mark.parametrize(
        ("change", "look"),
        [
            ({"settings.in": False}, lambda ad: ad.settings.opted_in),
            ({"several.0.in": False}, lambda ad: ad.several[0].opted_in),
            ({"empty.in": False}, lambda ad: ad.empty.opted_in),
        ],
        ids=["embedded", "in an array", "missing"],
    )
    def test_inside_of_embedded_models(self, make: Callable[..., Ground], change: Any, look: Any) -> None:
        """Embedded fields are named as in the documents. The read instance stays as it was."""
        ground = make(EmbeddingAdvert)
        ground.add(1, settings={"in": True}, several=[{"in": True}])
        read, seen = rows(EmbeddingAdvert).get(), list[Any]()

        def work_on(ad: Any) -> str:
            seen.append(look(ad))
            return "exporting"

        held = ground.lock.acquire(read, work_on, changes=change)
        assert (seen, look(held.instance), read.settings.opted_in) == ([False], False, True)
        held.fail()

    def test_relations(self, make: Callable[..., Ground]) -> None:
        """An object that a change relates to is written as its key, as `QuerySet.update()` does."""
        ground, seen = make(EmbeddingAdvert), list[Any]()
        other = rows(EmbeddingAdvert).create()
        ground.add(1)
        read = rows(EmbeddingAdvert).get(version=1, title=None)

        def work_on(ad: Any) -> str:
            seen.append(ad.other_id)
            return "exporting"

        held = ground.lock.acquire(read, work_on, changes={"other": other})
        assert (seen, held.instance.other_id) == ([other.pk], other.pk)
        assert held.update(other=None).other_id is None
        held.finish("exported", {"other": other})
        assert ground.read(held.id, "other_id") == other.pk

    def test_final(self, ground: Ground) -> None:
        """The final state is chosen with the changes of `finish`, and inside of arrays."""

        def end(ad: Any) -> str:
            return "exported" if (ad["tags"] if isinstance(ad, dict) else ad.tags)[0] == "in" else "withdrawn"

        held = ground.lock.acquire((ground.add(1, tags=["in"]), 1), "exporting")
        held.finish(end, {"tags.0": "out"})
        assert held.ended == "withdrawn"


class TestPrimaryKeys:
    """F133: Documents are found by the column of the primary key."""

    @pytest.mark.parametrize(("model", "key"), [(LongAdvert, 2**40), (CodedAdvert, "A")])
    def test_any_column(self, make: Callable[..., Ground], model: type[Locked], key: Any) -> None:
        """A document is acquired alone and in a batch, written, failed, listed, forced and swept by any column."""
        ground = make(model, ids=lambda: key)
        id_ = ground.add(1)
        assert (id_, rows(model).get().pk) == (key, key)
        with pytest.raises(ValueError, match="cannot be"):  # nobody would find the held document
            ground.lock.acquire((id_, 1), "exporting", changes={"pk": key})
        with ground.lock.hold(rows(model).get(), "exporting", final="exported") as held:
            held.update(price=6)
            held.instance.price = 7
            held.instance.save()
        with ground.lock.acquire_many(rows(model).all(), "exporting", final="exported") as batch:
            assert [held.id for held in batch] == [key]
            assert [seen.id for seen in ground.lock.snapshots(ids=[key])] == [key]
            assert list(rows(model).filter(ground.lock.held())) == [rows(model).get()]
            assert ground.lock.force_release(ground.lock.snapshots())
            with pytest.raises(DocumentLockLost):
                batch.held[0].finish()
        held = ground.lock.acquire(rows(model).get(), "exporting")
        ground.age(key, 61)
        assert [seen.id for seen in ground.lock.clear_stale().cleared] == [key]
        assert ground.read(key, "price", "state") == (7, "failed")


class TestTwoLocks:
    """F134: Two locks of the same documents share no field, and are therefore independent."""

    def declare(self, place: Any, **options: Any) -> DocumentLock[Any]:
        given = {"state": "other", "holder": "by", "version": "v", "time": "at", "name": "second", **options}
        return DocumentLock(place, pending=PENDING, final=FINAL, stale_after=60, **given)

    @pytest.mark.parametrize(
        ("role", "name"),
        [
            ("state", "exportStatus"),
            ("holder", "lockedBy"),
            ("version", "documentVersion"),
            ("time", "lockedByToken"),
            ("time", "lockTimestamp.x"),
        ],
    )
    def test_refused(self, plain: Ground, role: str, name: str) -> None:
        """Shared fields are refused at declaration, or at the first use if the place is a function."""
        with pytest.raises(ValueError, match="share"):
            self.declare(plain.lock._source._place, **{role: name})
        late = self.declare(plain.lock._source.collection, **{role: name})
        with pytest.raises(ValueError, match="share"):
            late.acquire(("x", 1), "exporting")

    def test_independent(self, plain: Ground) -> None:
        """Both may hold one document, and neither fails the other's work."""
        second, id_ = self.declare(plain.lock._source._place), plain.add(1)
        with plain.lock.hold((id_, 1), "exporting", final="exported") as one:
            with second.hold((id_, 0), "withdrawing", final="withdrawn"):
                one.renew()
            assert plain.raw(id_)["other"] == "withdrawn"
        assert plain.read(id_, "state") == "exported"

    def test_of_a_model(self, adverts: Ground) -> None:
        """The rule applies if one of the locks is declared on the collection of the model."""
        late = self.declare(adverts.lock._source.collection, holder="lockedBy")
        adverts.lock.snapshots()
        with pytest.raises(ValueError, match="share"):
            late.acquire(("x", 1), "exporting")


class TestSaving:
    """F135: No instance writes the lock's fields, and no outdated instance writes anything."""

    def outdated(self, adverts: Ground) -> tuple[Any, Any]:
        """Return an instance that was read before a flow took its document, and the held document."""
        id_ = adverts.add(1, state="new")
        ad = rows().get(pk=id_)
        return ad, adverts.lock.acquire(ad, "exporting", owner="flow")

    @pytest.mark.parametrize(
        "save",
        [
            lambda ad: ad.save(),
            lambda ad: ad.save(update_fields=["price", "state"]),
            lambda ad: modelform_factory(Advert, fields=["price"])({"price": 9}, instance=ad).save(),
            lambda ad: rows().bulk_update([ad], ["price", "state", "holder", "version"]),
            lambda ad: ad.delete(),
        ],
        ids=["save", "update_fields", "form", "bulk_update", "delete"],
    )
    def test_outdated(self, adverts: Ground, save: Any) -> None:
        """An outdated save is refused. The flow keeps its document, and ends undisturbed."""
        ad, held = self.outdated(adverts)
        ad.price = 9
        with pytest.raises(VersionConflict) as caught:
            save(ad)
        assert adverts.read(ad.pk, "holder", "state", "version", "price") == ("flow", "exporting", 2, 5)
        held.finish("exported")
        assert set(caught.value.changed) <= {"price"}  # the fields of the lock are not among the user's changes

    def test_up_to_date(self, adverts: Ground) -> None:
        """An instance read during a flow saves the other fields. The flow's end is refused once, and repeated."""
        ad, held = self.outdated(adverts)
        saves: list[Any] = [lambda one: one.save(), lambda one: rows().bulk_update([one], ["price", "state"])]
        for number, save in enumerate(saves):
            ad = rows().get(pk=held.id)
            ad.price, ad.state, ad.holder, ad.time = 7 + number, "new", None, None
            save(ad)
            assert adverts.read(ad.pk, "holder", "state", "price") == ("flow", "exporting", 7 + number)
        with pytest.raises(DocumentChanged):
            held.finish("exported")
        assert held.fail()

    def test_insert_and_update(self, adverts: Ground) -> None:
        """A new document has its given state. `QuerySet.update` writes the given values."""
        made = Advert(state="exporting", holder="a test")
        made.save(using="mongo")
        assert adverts.read(made.pk, "state", "holder", "version") == ("exporting", "a test", 1)
        rows().filter(pk=made.pk).update(state="new")
        assert adverts.read(made.pk, "state", "version") == ("new", 2)

    @pytest.mark.parametrize("options", [{}, {"update_fields": ["price"]}], ids=str)
    def test_in_the_block(self, adverts: Ground, options: Any) -> None:
        """F138: `held.instance.save()` goes through the lock, and the work ends well. After a loss, the save is
        refused."""
        with adverts.lock.hold((adverts.add(1), 1), "exporting", final="exported") as held:
            ad = held.instance
            ad.price = 9
            ad.save(**options)
            assert (ad.version, held.version, held.instance.price) == (3, 3, 9)
            held.update(title="x")
            ad.price = 1
            with pytest.raises(VersionConflict):  # older than the flow's own write
                ad.save()
            asyncio.run(held.instance.asave())
            state = pickle.loads(pickle.dumps(held.instance.__getstate__()))  # noqa: S301
            assert state["_document_held"] is None  # elsewhere it holds nothing
        assert adverts.read(held.id, "state", "price", "title") == ("exported", 9, "x")
        with pytest.raises(VersionConflict):
            ad.save()
        held.instance.save()  # as the flow has left it

    def test_in_a_transaction(self, adverts: Ground) -> None:
        """The flow owns the document whatever the outcome of a transaction. A rollback takes nothing back."""
        with adverts.lock.hold((adverts.add(1), 1), "exporting", final="exported") as held:
            with contextlib.suppress(KeyError), mongo_atomic("mongo"):
                held.instance.price = 9
                held.instance.save()
                raise KeyError
            assert adverts.read(held.id, "price", "version") == (9, held.version)

    def test_lost_in_the_block(self, adverts: Ground) -> None:
        """A document that was taken away is not written."""
        with pytest.raises(DocumentLockLost), adverts.lock.hold((adverts.add(1), 1), "exporting") as held:  # noqa: PT012
            adverts.change(held.id, holder="other")
            held.instance.price = 9
            held.instance.save()
        assert adverts.raw(held.id)["price"] == 5

    @pytest.mark.parametrize("way", ["held", "instance", "async"])
    def test_deleted_by_its_holder(self, adverts: Ground, way: str) -> None:
        """F214: The block ends well, and the rest of a batch goes on."""
        ids = [adverts.add(1, title=f"ad {number}", body="", tags=[], opted_in=True) for number in range(2)]
        with adverts.lock.acquire_many([(id_, 1) for id_ in ids], "exporting", final="exported") as batch:
            first, second = batch
            with first:
                if way == "async":
                    async_to_sync(first.adelete)()
                else:
                    first.delete() if way == "held" else first.instance.delete()
                assert first.ended == "deleted"
                with pytest.raises(LockMisused):
                    first.update(price=1)
            with second:
                second.update(price=9)
        assert not rows().filter(pk=ids[0]).exists()
        assert adverts.read(ids[1], "price", "state") == (9, "exported")

    def test_deleted_by_who_has_lost_it(self, adverts: Ground) -> None:
        """F214: No document that another flow holds is deleted."""
        held = adverts.lock.acquire((adverts.add(1), 1), "exporting")
        adverts.change(held.id, holder="other")
        with pytest.raises(DocumentLockLost):
            held.delete()
        assert (held.ended, rows().filter(pk=held.id).exists()) == ("lost", True)

    def test_an_attribute_of_any_name(self, adverts: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        """The model may have the lock as its `document_lock`."""
        monkeypatch.setattr(Advert, "document_lock", adverts.lock, raising=False)
        made = rows().create(title="a")
        assert adverts.read(made.pk, "state") == "new"

    def test_a_copy_of_what_is_held(self, adverts: Ground) -> None:
        """A copy with its own key is another document without a holder. Saving the copy leaves the held one alone."""
        id_ = adverts.add(1, title="original", body="", tags=[], opted_in=True)
        with adverts.lock.hold((id_, 1), "exporting", final="exported") as held:
            copied = held.instance
            copied.pk, copied.holder, copied.state, copied.time = None, None, "new", None
            copied.save()
            copied.title = "copy"
            copied.save()
            assert (adverts.raw(held.id)["title"], adverts.raw(copied.pk)["title"]) == ("original", "copy")
            assert adverts.read(copied.pk, "holder", "state", "time") == (None, "new", None)
            adverts.lock.acquire(rows().get(pk=copied.pk), "exporting").fail()
        assert adverts.read(held.id, "state") == "exported"

    @pytest.mark.parametrize(("using", "error"), [("mongo", VersionConflict), ("default", DatabaseError)])
    def test_a_held_instance_elsewhere(self, adverts: Ground, using: str, error: type[Exception]) -> None:
        """The held instance is saved under another key with another version, or in another database without such a
        table. The instance is saved there, if at all, and the held document stays as it is."""
        other = adverts.add(5)
        with adverts.lock.hold((adverts.add(1), 1), "exporting", final="exported") as held:
            ad = held.instance
            ad.pk, ad.price = other if using == "mongo" else ad.pk, 9
            with pytest.raises(error):
                ad.save(using=using)
        assert adverts.read(held.id, "price", "state") == (5, "exported")

    def test_through_the_model_of_a_proxy(self, make: Callable[..., Ground]) -> None:
        """A lock that is declared on a proxy protects the documents, whichever model saves them."""
        ground = make(ProxyAdvert)
        held = ground.lock.acquire((ground.add(1), 1), "exporting", owner="flow")
        ad = rows(Proxied).get()
        ad.state, ad.holder, ad.price = "new", None, 9
        ad.save()
        assert ground.read(held.id, "holder", "state", "price") == ("flow", "exporting", 9)
        held.fail()


class TestDeferred:
    """F137: An instance that was read without its version is refused. Other instances are judged by the read
    version."""

    def test_without_the_version(self, adverts: Ground) -> None:
        """The instance is refused before any command, in a coroutine, too."""
        from django.db import models

        id_ = adverts.add(1)
        plain: Any = models.QuerySet(Advert).using("mongo").only("title").get()
        adverts.change(id_, version=7)
        for many in (False, True):
            with pytest.raises(ValueError, match=r"defer\(\)"):  # noqa: PT012
                if many:
                    adverts.lock.acquire_many([plain], "exporting")
                else:
                    adverts.lock.acquire(plain, "exporting")
        assert adverts.read(id_, "holder") is None

    def test_with_it(self, adverts: Ground) -> None:
        """`only()` of a VersionedManager reads the version. The read version counts."""
        id_ = adverts.add(1)
        outdated, ad = rows().only("title").get(), rows().only("title")
        adverts.change(id_, version=7)
        with pytest.raises(DocumentChanged):
            adverts.lock.acquire(outdated, "exporting")
        held = adverts.lock.acquire(ad.get(), "exporting")
        assert "price" in vars(held.instance)
        held.fail()


def test_no_other_state_is_lost(plain: Ground) -> None:
    """F136: An operator resets a document to `new` while a flow holds it. The document stays held, is listed, is stale
    in time, and is swept."""
    held = plain.lock.acquire((plain.add(1), 1), "exporting", owner="flow")
    plain.change(held.id, state="new")
    assert [seen.work for seen in plain.lock.snapshots("held")] == ["new"]
    assert plain.collection.count_documents(plain.lock.held()) == 1
    plain.age(held.id, 61)
    assert [seen.holder for seen in plain.lock.snapshots("stale", owner="flow")] == ["flow"]
    swept = plain.lock.clear_stale()
    assert [(seen.id, seen.failed) for seen in swept.cleared] == [(held.id, None)]
    assert plain.read(held.id, "state", "holder", "time") == ("new", None, None)
    held = plain.lock.acquire((held.id, plain.read(held.id, "version")), "exporting")
    plain.change(held.id, state="new")
    assert len(plain.lock.force_release(plain.lock.snapshots())) == 1
    assert plain.read(held.id, "state", "holder") == ("new", None)


def test_documents_of_the_project_are_as_declared() -> None:
    """The demo's own model has no pending migration."""
    call_command("makemigrations", "shop", check=True, dry_run=True, verbosity=0)
