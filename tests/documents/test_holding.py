"""What a flow may do with a document that it holds, blocking and awaited; and how a block ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from django_mongolock import (
    DocumentChanged,
    DocumentHeld,
    DocumentLock,
    DocumentLockLost,
    DocumentNotFound,
    LockMisused,
)
from django_mongolock.documents import HeldDocument
from django_mongolock.engine import clock
from testproject.shop.models import Ad
from tests.documents.conftest import Ground
from tests.support.lock_fixtures import WITH_MONGO

pytestmark = WITH_MONGO


def blocking(thing: Any, name: str, *arguments: Any, **options: Any) -> Any:
    return getattr(thing, name)(*arguments, **options)


def awaiting(thing: Any, name: str, *arguments: Any, **options: Any) -> Any:
    twin = name.replace("__e", "__ae") if name.startswith("__") else f"a{name}"

    async def call() -> Any:
        return await getattr(thing, twin)(*arguments, **options)

    return asyncio.run(call())


@pytest.fixture(params=[blocking, awaiting])
def call(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Each method in both of its faces."""
    face: Callable[..., Any] = request.param
    return face


class TestMethods:
    """finish, fail, update, renew."""

    @pytest.fixture
    def held(self, ground: Ground, call: Callable[..., Any]) -> Any:
        return call(ground.lock, "acquire", (ground.add(1), 1), "withdrawing", owner="me")

    @pytest.mark.long
    def test_finish(self, ground: Ground, call: Callable[..., Any], held: Any) -> None:
        """Final state, nobody holds it; the version stays, since nothing else changed."""
        call(held, "finish", "withdrawn")
        assert ground.read(held.id, "state", "holder", "time", "version") == ("withdrawn", None, None, 2)
        assert held.ended == "withdrawn"
        assert held.remaining == 0
        assert "withdrawn" in repr(held)
        for name in ("finish", "fail", "renew"):
            with pytest.raises(LockMisused):
                call(held, name)

    def test_finish_with_changes(self, ground: Ground, call: Callable[..., Any], held: Any) -> None:
        """Whatever changes the content raises the version."""
        call(held, "finish", "withdrawn", {"price": 9})
        assert ground.read(held.id, "state", "version", "price") == ("withdrawn", 3, 9)
        assert held.version == 3

    @pytest.mark.long
    def test_fail(self, ground: Ground, call: Callable[..., Any], held: Any) -> None:
        """The failed state of this very work."""
        assert call(held, "fail")
        assert ground.read(held.id, "state", "holder", "version") == ("withdraw_failed", None, 2)

    def test_update(self, ground: Ground, call: Callable[..., Any], held: Any) -> None:
        """Written, and read again; the lock goes on."""
        after = call(held, "update", {"price": 7}, title="x")
        assert (after["price"] if isinstance(after, dict) else after.price) == 7
        assert ground.read(held.id, "price", "title", "version", "holder") == (7, "x", 3, "me")
        with pytest.raises(TypeError):
            call(held, "update")
        call(held, "update", {"price": 8})
        call(held, "finish", "withdrawn")
        assert ground.read(held.id, "price", "version", "state") == (8, 4, "withdrawn")

    def test_renew(self, ground: Ground, call: Callable[..., Any], held: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """The time begins anew; the version stays."""
        before = ground.read(held.id, "time")
        now = clock.now()
        monkeypatch.setattr(clock, "now", lambda: now + 61)
        assert held.remaining == 0
        call(held, "renew")
        assert ground.read(held.id, "time") >= before
        assert ground.read(held.id, "version") == 2
        assert held.remaining > 50

    @pytest.mark.parametrize("name", ["finish", "renew", "update"])
    def test_version_was_raised(self, ground: Ground, call: Callable[..., Any], held: Any, name: str) -> None:
        """Somebody who goes by no lock changed it: nothing is written, and the work can still fail."""
        arguments: tuple[Any, ...] = {"finish": ("withdrawn",), "renew": (), "update": ({"price": 9},)}[name]
        ground.change(held.id, version=5)
        with pytest.raises(DocumentChanged) as caught:
            call(held, name, *arguments)
        assert (caught.value.given, caught.value.found) == (2, 5)
        assert ground.read(held.id, "state", "price") == ("withdrawing", 5)
        assert call(held, "fail")
        assert ground.read(held.id, "state", "holder", "version") == ("withdraw_failed", None, 5)

    @pytest.mark.parametrize("name", ["finish", "renew", "update"])
    def test_taken_away(self, ground: Ground, call: Callable[..., Any], held: Any, name: str) -> None:
        """Whoever lost it is told who has it now, and writes nothing."""
        arguments: tuple[Any, ...] = {"finish": ("withdrawn",), "renew": (), "update": ({"price": 9},)}[name]
        ground.change(held.id, holder=None, state="withdraw_failed")
        ground.lock.acquire((held.id, 2), "exporting", owner="other")
        before = ground.raw(held.id)
        with pytest.raises(DocumentLockLost) as caught:
            call(held, name, *arguments)
        assert (caught.value.found_holder, caught.value.found_state) == ("other", "exporting")
        assert ground.raw(held.id) == before
        assert held.ended == "lost"

    def test_failing_what_was_taken_away(self, ground: Ground, call: Callable[..., Any], held: Any) -> None:
        """It leaves alone what another holds."""
        ground.change(held.id, holder="other", attempt="another")
        before = ground.raw(held.id)
        assert not call(held, "fail")
        assert ground.raw(held.id) == before

    @pytest.mark.parametrize(("role", "value"), [("holder", "other"), ("attempt", "another"), ("version", 9)])
    def test_what_a_finish_goes_by(self, ground: Ground, held: Any, role: str, value: Any) -> None:
        """Holder, acquisition and version, each by itself."""
        ground.change(held.id, **{role: value})
        before = ground.raw(held.id)
        with pytest.raises((DocumentLockLost, DocumentChanged)):
            held.finish("withdrawn")
        assert ground.raw(held.id) == before

    def test_deleted(self, ground: Ground, call: Callable[..., Any], held: Any) -> None:
        """A document that is gone is told of."""
        ground.collection.delete_one({"_id": held.id})
        with pytest.raises(DocumentNotFound):
            call(held, "finish", "withdrawn")


class TestBlock:
    """Pending on entry, final on success, failed on error."""

    def enter(self, call: Callable[..., Any], hold: Any, body: Callable[[Any], object]) -> None:
        """A `with` or an `async with` block."""
        held = call(hold, "__enter__")
        try:
            body(held)
        except BaseException as error:
            call(hold, "__exit__", type(error), error, error.__traceback__)
            raise
        else:
            call(hold, "__exit__", None, None, None)

    @pytest.mark.long
    def test_success(self, ground: Ground, call: Callable[..., Any]) -> None:
        """It ends in the final state that was named."""
        id_ = ground.add(1)
        states: list[Any] = []
        hold = ground.lock.hold((id_, 1), "exporting", final="exported")
        self.enter(call, hold, lambda held: states.append(ground.read(id_, "state")))
        assert states == ["exporting"]
        assert ground.read(id_, "state", "holder") == ("exported", None)

    def test_error(self, ground: Ground, call: Callable[..., Any]) -> None:
        """It ends in the failed state, and the error goes on."""
        id_ = ground.add(1)

        def body(held: Any) -> None:
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            self.enter(call, ground.lock.hold((id_, 1), "exporting", final="exported"), body)
        assert ground.read(id_, "state", "holder") == ("failed", None)

    @pytest.mark.parametrize("name", ["finish", "fail"])
    def test_ended_inside(self, ground: Ground, call: Callable[..., Any], name: str) -> None:
        """What the block says itself, counts."""
        id_ = ground.add(1)
        arguments = ("withdrawn",) if name == "finish" else ()

        def body(held: Any) -> None:
            getattr(held, name)(*arguments)

        self.enter(call, ground.lock.hold((id_, 1), "exporting", final="exported"), body)
        assert ground.read(id_, "state") == ("withdrawn" if name == "finish" else "failed")

    def test_no_final_state_was_named(self, ground: Ground, call: Callable[..., Any]) -> None:
        """Several final states, and none was named: failed, and told."""
        id_ = ground.add(1)
        with pytest.raises(TypeError, match="name the final"):
            self.enter(call, ground.lock.hold((id_, 1), "exporting"), lambda held: None)
        assert ground.read(id_, "state", "holder") == ("failed", None)

    def test_changed_meanwhile(self, ground: Ground, call: Callable[..., Any]) -> None:
        """What was done is of an older version: failed, so that it is done again."""
        id_ = ground.add(1)
        with pytest.raises(DocumentChanged):
            self.enter(
                call,
                ground.lock.hold((id_, 1), "exporting", final="exported"),
                lambda held: ground.change(id_, version=9, price=1),
            )
        assert ground.read(id_, "state", "holder", "price") == ("failed", None, 1)

    def test_lost_meanwhile(self, ground: Ground, call: Callable[..., Any]) -> None:
        """Told at the end of a block that went well; never in place of the block's own error."""
        first, second = ground.add(1), ground.add(1)

        def lose(held: Any) -> None:
            ground.change(held.id, holder="other")

        def lose_and_fail(held: Any) -> None:
            lose(held)
            raise KeyError("mine")

        with pytest.raises(DocumentLockLost):
            self.enter(call, ground.lock.hold((first, 1), "exporting", final="exported"), lose)
        with pytest.raises(KeyError):
            self.enter(call, ground.lock.hold((second, 1), "exporting", final="exported"), lose_and_fail)
        assert ground.read(first, "holder", "state") == ("other", "exporting")
        assert ground.read(second, "holder", "state") == ("other", "exporting")

    @pytest.mark.long
    def test_nothing_to_choose(self, make: Callable[..., Ground]) -> None:
        """With one pending and one final state neither need be named."""
        ground = make(pending={"exporting": "failed"}, final=["exported"])
        with ground.lock.hold((ground.add(1), 1)) as held:
            assert held.pending == "exporting"
        assert held.ended == "exported"


class TestReadAgain:
    """Inside, the document is as it is under the lock, not as it was read before."""

    def test_model(self, make: Callable[..., Ground]) -> None:
        """An instance, with the values that the ORM would read."""
        ground = make("model")
        made = Ad.objects.create(user_id="7", title="A lamp", price=5)
        old = Ad.objects.get(pk=made.pk)
        Ad.objects.filter(pk=made.pk).update(title="A better lamp")  # by somebody who does not raise the version
        with ground.lock.hold(old, "exporting", final="exported") as held:
            ad = held.instance
            stored = Ad.objects.get(pk=made.pk)
            assert {field.attname: getattr(ad, field.attname) for field in Ad._meta.concrete_fields} == {
                field.attname: getattr(stored, field.attname) for field in Ad._meta.concrete_fields
            }
            assert ad is held.instance
            assert ad.title == "A better lamp"
            assert ad.updated_at.tzinfo is not None
            assert (ad.export_status, ad.document_version) == ("exporting", 2)
            assert ad._state.db == "mongo"
            assert not ad._state.adding

    def test_collection(self, plain: Ground) -> None:
        """The document itself."""
        id_ = plain.add(1)
        old = plain.raw(id_)
        plain.change(id_, price=6)
        with plain.lock.hold(old, "exporting", final="exported") as held:
            assert held.instance["price"] == 6
            assert held.instance is held.document
            held.update({"price": 7})
            assert held.instance["price"] == 7

    def test_model_by_key(self, make: Callable[..., Ground]) -> None:
        """The text of an ObjectId will do, as everywhere in the ORM; values are stored as the ORM stores them."""
        ground = make("model")
        made = Ad.objects.create(user_id="7", title="A lamp", price=5)
        with ground.lock.hold((str(made.pk), 1), "exporting", changes={"price": "7"}, final="exported") as held:
            assert ground.raw(made.pk)["price"] == 7
            assert held.id == made.pk

    def test_wrong_model(self, make: Callable[..., Ground]) -> None:
        """Another model's instance, a field that is not there, and an expression are refused."""
        from django.db.models import F

        from testproject.shop.models import Seller

        lock = make("model").lock
        ad = Ad.objects.create(user_id="7", title="A lamp", price=5)
        with pytest.raises(TypeError, match=r"pass an instance of shop\.Ad"):
            lock.hold(Seller(user_id="7"), "exporting")
        with pytest.raises(ValueError, match="no field 'prize'"):
            lock.hold(ad, "exporting", changes={"prize": 1})
        with pytest.raises(TypeError, match="plain values"):
            lock.hold(ad, "exporting", changes={"price": F("price") + 1})
        with pytest.raises(ValueError, match="at most 64"):
            lock.hold(ad, "exporting", owner="x" * 65)
        with pytest.raises(TypeError, match="save it first"):
            lock.hold(Ad(user_id="7"), "exporting")


class TestBatch:
    """Several documents of one owner at once."""

    def test_some_are_refused(self, ground: Ground, call: Callable[..., Any]) -> None:
        """Those that could be locked, and those that could not, each with its own error."""
        good, also = ground.add(1), ground.add(4)
        busy = ground.add(1, holder="other", state="exporting")
        old, gone = ground.add(2), ground.add(1)
        ground.collection.delete_one({"_id": gone})
        wanted = [(good, 1), (also, 4), (busy, 1), (old, 1), (gone, 1)]
        options = {"owner": "me", "final": "exported", "changes": {"price": 9}}
        batch = call(ground.lock, "acquire_many", wanted, "exporting", **options)
        assert {held.id: held.version for held in batch} == {good: 2, also: 5}
        refused = {id_: type(error) for id_, error in batch.refused.items()}
        assert refused == {busy: DocumentHeld, old: DocumentChanged, gone: DocumentNotFound}
        assert len(batch) == 2
        assert "2 held, 3 refused" in repr(batch)
        assert [ground.read(id_, "holder", "price") for id_ in (good, also)] == [("me", 9)] * 2
        assert ground.raw(old)["price"] == 5
        call(batch, "__exit__", None, None, None)
        assert [ground.read(id_, "state", "holder") for id_ in (good, also)] == [("exported", None)] * 2

    @pytest.mark.long
    def test_each_by_itself(self, ground: Ground) -> None:
        """One that fails does not fail the others; what is left when the batch's block fails, fails."""
        ids = [ground.add(1) for _ in range(4)]
        batch = ground.lock.acquire_many([(id_, 1) for id_ in ids], "exporting", final="exported")
        first, second, third, _ = batch

        def leave_each() -> None:
            with batch:
                with first:
                    pass
                with pytest.raises(ValueError, match="only mine"), second:
                    raise ValueError("only mine")
                third.finish("withdrawn")
                raise KeyError

        with pytest.raises(KeyError):
            leave_each()
        states = {held.id: ground.read(held.id, "state") for held in batch}
        assert list(states.values()) == ["exported", "failed", "withdrawn", "failed"]

    def test_all_are_ended(self, ground: Ground) -> None:
        """One that cannot be finished keeps no other one pending; all problems are told."""
        ids = [ground.add(1) for _ in range(3)]
        batch = ground.lock.acquire_many([(id_, 1) for id_ in ids], "exporting", final="exported")
        for held in batch.held[:2]:
            ground.change(held.id, holder="other")
        with pytest.raises(DocumentLockLost) as caught, batch:
            pass
        assert len(caught.value.__notes__) == 1
        assert ground.read(batch.held[2].id, "state") == "exported"

    def test_one_that_waited_for_too_long(self, plain: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        """The work on a document whose time is over does not begin, unless it is renewed: it may be another flow's."""
        ids = [plain.add(1) for _ in range(2)]
        first, second = plain.lock.acquire_many([(id_, 1) for id_ in ids], "exporting", final="exported").held
        later = clock.now() + 61
        monkeypatch.setattr("django_mongolock.documents.holding.clock.now", lambda: later)
        with pytest.raises(DocumentLockLost, match=r"renew\(\)"), first:
            pass
        second.renew()
        with second:
            pass
        assert second.ended == "exported"

    def test_a_wrong_final_state(self, plain: Ground) -> None:
        """Told before anything is locked."""
        id_ = plain.add(1)
        with pytest.raises(ValueError, match="not declared as a final"):
            plain.lock.acquire_many([(id_, 1)], "exporting", final="gone")
        assert plain.read(id_, "version") == 1

    @pytest.mark.long
    def test_many(self, plain: Ground) -> None:
        """More than fit into one command; and none at all."""
        ids = [plain.add(number % 3) for number in range(1_203)]
        plain.change(ids[700], holder="other", state="exporting")
        batch = plain.lock.acquire_many(list(plain.collection.find()), "exporting", final="exported")
        assert len(batch) == 1_202
        assert list(batch.refused) == [ids[700]]
        assert not plain.lock.acquire_many([], "exporting").held

    def test_same_owner_at_once(self, plain: Ground) -> None:
        """What another run of the same flow holds is not taken for granted to this call."""
        id_ = plain.add(1)
        plain.lock.acquire((id_, 1), "exporting", owner="me")
        batch = plain.lock.acquire_many([(id_, 1)], "exporting", owner="me")
        assert not batch.held
        assert isinstance(batch.refused[id_], DocumentChanged)

    def test_all_ads_of_a_user(self, make: Callable[..., Ground]) -> None:
        """A queryset will do."""
        lock: DocumentLock[Ad] = make("model").lock
        for user in "778":
            Ad.objects.create(user_id=user, title="x", price=1)
        with lock.acquire_many(Ad.objects.filter(user_id="7"), "withdrawing", final="withdrawn") as batch:
            assert [held.instance.user_id for held in batch] == ["7", "7"]
        assert Ad.objects.filter(export_status="withdrawn").count() == 2


def test_repr(plain: Ground) -> None:
    """It answers the question of the night: which document, what is under way, for how long."""
    held: HeldDocument[Any] = plain.lock.acquire((plain.add(1), 1), "exporting")
    assert f"{held.id!r}, version 2, exporting, " in repr(held)
    assert repr(plain.lock) == "<DocumentLock 'test'>"
