"""The methods of a held document, blocking and awaited, the ends of a block, and batches."""

from __future__ import annotations

import asyncio
import gc
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any

import pytest
from bson import CodecOptions, Int64
from django.db import transaction

from django_mongolock import transactions
from django_mongolock.documents import DocumentLock, held_document
from django_mongolock.documents.held_document import abandon
from django_mongolock.documents.updates import Own, write_one
from django_mongolock.engine import clock
from django_mongolock.exceptions import (
    DocumentChanged,
    DocumentDamaged,
    DocumentHeld,
    DocumentLockLost,
    DocumentNotFound,
    DocumentRefused,
    LockBackendFailed,
    LockMisused,
)
from django_mongolock.other_collections.courier import Courier
from tests.documents.conftest import FINAL, OTHERS, PENDING, Document, Ground
from tests.engine.faces import ASYNC
from tests.support.lock_fixtures import WITH_MONGO
from tests.support.waiting import eventually

pytestmark = WITH_MONGO
#: The writes, each with its arguments.
WRITES: dict[str, tuple[Any, ...]] = {"finish": ("withdrawn",), "renew": (), "update": ({"price": 9},)}


@pytest.fixture
def held(ground: Ground) -> Any:
    return ground.lock.acquire((ground.add(1), 1), "withdrawing", owner="me")


def test_awaited(ground: Ground) -> None:
    """Each method has an awaited twin, and `async with` does the same as `with`."""
    lock, awaiting = ground.lock, ASYNC.call
    (taken,) = awaiting(lock, "acquire_many", [(ground.add(1), 1)], "exporting")
    (seen,) = awaiting(lock, "snapshots")
    assert (seen.id, seen.version) == (taken.id, 2)
    assert [each.id for each in awaiting(lock, "force_release", [seen])] == [taken.id]
    left = awaiting(lock.hold((taken.id, 3), "exporting"), "acquire")
    ground.age(left.id, 100)
    assert awaiting(lock, "clear_stale").count == 1

    async def in_block() -> None:
        async with lock.hold((taken.id, 5), "exporting", final="exported") as held:
            await held.arenew()

    asyncio.run(in_block())
    assert ground.read(taken.id, "state", "version") == ("exported", 8)


class TestMethods:
    """finish, fail, update and renew raise the version. Each is refused to a flow that has lost the document."""

    @pytest.mark.parametrize(
        ("name", "arguments", "state", "price"),
        [
            ("finish", ("withdrawn",), "withdrawn", 5),
            ("finish", ("withdrawn", {"price": 9}), "withdrawn", 9),
            ("fail", (), "withdraw_failed", 5),
        ],
    )
    def test_ends(  # noqa: PLR0917
        self, ground: Ground, held: Any, name: str, arguments: tuple[Any, ...], state: str, price: int
    ) -> None:
        """The document has the intended state, no holder, and a new version. No further write is possible."""
        getattr(held, name)(*arguments)
        found = ground.read(held.id, "state", "holder", "time", "version", "price")
        assert found == (state, None, None, 3, price)
        assert (held.ended, held.remaining) == (state, 0)
        assert state in repr(held)
        for other in ("finish", "fail", "renew"):
            with pytest.raises(LockMisused):
                getattr(held, other)()

    def test_update(self, ground: Ground, held: Any) -> None:
        """An update is written and read again, and the lock goes on."""
        after = held.update({"price": 7}, title="x")
        assert (after["price"] if isinstance(after, dict) else after.price) == 7
        assert ground.read(held.id, "price", "title", "version", "holder") == (7, "x", 3, "me")
        with pytest.raises(TypeError):
            held.update()
        held.finish("withdrawn")

    def test_renew(self, ground: Ground, held: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """The time of the lock begins again."""
        ground.age(held.id, 50)
        before, now = ground.read(held.id, "time"), clock.now()
        monkeypatch.setattr(clock, "now", lambda: now + 61)
        assert held.remaining == 0
        held.renew()
        assert ground.read(held.id, "time") > before
        assert held.remaining > 50

    def test_several_writers(self, ground: Ground, held: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Concurrent writes of tasks in a flow, including a renewal, run one after the other. A failure waits for none
        of them."""

        async def write() -> None:
            await asyncio.gather(*(held.aupdate({"price": number}) for number in range(5)), held.arenew())

        asyncio.run(write())
        assert (held.version, ground.read(held.id, "version")) == (8, 8)
        held._turn[None] = object()
        monkeypatch.setattr(held._context.courier, "timeout", 0.01)
        with pytest.raises(LockBackendFailed, match="no answer yet"):
            held.renew()
        monkeypatch.undo()
        assert held.fail()

    def test_given_up_while_a_thread_writes(self, plain: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        """A document that is given up knows every write that has begun, and begins no other. The document is
        released."""
        writing, failing, given_up = Own.writing, Own.failing, list[Any]()
        monkeypatch.setattr(Courier, "send_in_background", lambda _, command: given_up.append(command))
        one, two = (plain.lock.acquire((plain.add(1), 1), "exporting") for _ in range(2))

        def after_the_end(*values: Any, **options: Any) -> Any:
            abandon(one._context, [one._own])
            return writing(*values, **options)

        def before_the_end(own: Own, *values: Any) -> Any:
            statement = failing(own, *values)
            if own is two._own:
                with pytest.raises(LockMisused):
                    two.renew()
            return statement

        monkeypatch.setattr(Own, "failing", before_the_end)
        monkeypatch.setattr(Own, "writing", after_the_end)
        with pytest.raises(LockMisused):
            one.renew()
        monkeypatch.setattr(Own, "writing", writing)
        abandon(two._context, [two._own])
        for held, command in zip((one, two), given_up, strict=True):
            assert held._context.courier.send(command)
            assert plain.read(held.id, "state", "holder") == ("failed", None)

    def test_ended_while_a_thread_writes(self, plain: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        """A write after the flow's own end is told of that end, and of no loss."""
        held = plain.lock.acquire((plain.add(1), 1), "exporting")
        write = write_one

        def after_the_end(statement: Any) -> Any:
            monkeypatch.setattr(held_document, "write_one", write)
            assert held.fail()
            return write(statement)

        monkeypatch.setattr(held_document, "write_one", after_the_end)
        with pytest.raises(LockMisused, match="has ended"):
            held.renew()
        assert held.ended == "failed"

    @pytest.mark.parametrize("name", WRITES)
    def test_version_was_raised(self, ground: Ground, held: Any, name: str) -> None:
        """Another program that knows no lock has raised the version. Nothing is written, and the work can still
        fail."""
        ground.change(held.id, version=3, price=6)
        with pytest.raises(DocumentChanged) as caught:
            getattr(held, name)(*WRITES[name])
        assert (caught.value.given, caught.value.found) == (2, 3)
        assert ground.read(held.id, "state", "price") == ("withdrawing", 6)
        assert held.fail()
        assert ground.read(held.id, "state", "holder", "version") == ("withdraw_failed", None, 4)

    @pytest.mark.parametrize("name", WRITES)
    def test_taken_away(self, ground: Ground, held: Any, name: str) -> None:
        """A flow that lost its document is told the new holder, and writes nothing."""
        ground.change(held.id, holder=None, state="withdraw_failed")
        other = ground.lock.acquire((held.id, 2), "exporting", owner="other")
        before = ground.raw(held.id)
        with pytest.raises(DocumentLockLost) as caught:
            getattr(held, name)(*WRITES[name])
        assert (caught.value.found_holder, caught.value.found_state) == ("other", "exporting")
        assert not caught.value.maybe_written
        assert ground.raw(held.id) == before
        assert (held.ended, other.ended) == ("lost", None)

    @pytest.mark.parametrize(("role", "value"), [("holder", "other"), ("holder", None), ("token", "x"), ("version", 9)])
    @pytest.mark.parametrize("name", ["finish", "fail"])
    def test_what_a_write_goes_by(self, ground: Ground, held: Any, role: str, value: Any, name: str) -> None:
        """A write checks holder, token and version, each by itself. A failure checks the first two."""
        ground.change(held.id, **{role: value})
        before = ground.raw(held.id)
        if name == "fail":
            assert held.fail() is (role == "version")
            assert held.ended == ("withdraw_failed" if role == "version" else "lost")
        else:
            with pytest.raises((DocumentLockLost, DocumentChanged)):
                held.finish("withdrawn")
        assert (ground.raw(held.id) == before) is (name == "finish" or role != "version")

    def test_deleted_or_damaged(self, ground: Ground, held: Any) -> None:
        """Each has its error."""
        ground.change(held.id, version="x")
        with pytest.raises(DocumentDamaged):
            held.finish("withdrawn")
        ground.collection.delete_one({"_id": held.id})
        with pytest.raises(DocumentNotFound):
            held.finish("withdrawn")

    def test_refused_by_mongodb(self, plain: Ground) -> None:
        """F82: A validator refuses a write, or its path leads nowhere. Nothing is written, and the document is still
        held."""
        id_ = plain.add(1, price=5)
        database, name = plain.collection.database, plain.collection.name
        database.command("collMod", name, validator={"price": {"$gt": 0}}, validationLevel="strict")
        with pytest.raises(DocumentRefused, match="code 121"):
            plain.lock.acquire((id_, 1), "exporting", changes={"price": 0})
        held = plain.lock.acquire((id_, 1), "exporting", final="exported")
        for changes in ({"price": 0}, {"price.x": 0}):
            with pytest.raises(DocumentRefused):
                held.update(changes)
        with pytest.raises(DocumentRefused):
            held.finish("exported", {"price": 0})
        held.update({"price": 6})
        assert held.fail()
        assert plain.read(id_, "state", "version", "price") == ("failed", 4, 6)

    def test_the_last_version(self, plain: Ground) -> None:
        """A version that cannot be raised any more is damage."""
        held = plain.lock.acquire((plain.add(Int64(2**62 - 2)), 2**62 - 2), "exporting")
        with pytest.raises(DocumentDamaged, match="too large"):
            held.update(price=1)

    @pytest.mark.parametrize(
        ("changes", "found"),
        [
            ({"tags.1": "Y"}, ["x", "Y"]),
            ({"tags": []}, []),
            ({"tags.3": "z"}, ["x", "y", None, "z"]),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("how", ["acquire", "update", "finish", "many"])
    def test_paths(self, ground: Ground, changes: Any, found: Any, how: str) -> None:
        """F81, F138: Changes have the meaning of MongoDB's own `$set`, also for a model."""
        id_ = ground.add(1, tags=["x", "y"])
        made = {"changes": changes} if how in ("acquire", "many") else {}
        if how == "many":
            (held,) = ground.lock.acquire_many([(id_, 1)], "exporting", **made)
        else:
            held = ground.lock.acquire((id_, 1), "exporting", **made)
        if how == "update":
            held.update(changes)
        held.finish("exported", changes if how == "finish" else None)
        assert ground.raw(id_)["tags"] == found


class TestBlock:
    """Pending on entry, final on success, failed on error."""

    @pytest.mark.parametrize(
        ("body", "options", "state", "error"),
        [
            (lambda _: None, {"final": "exported"}, "exported", None),
            (lambda _: dict[str, str]()["mine"], {"final": "exported"}, "failed", KeyError),
            (lambda held: held.finish("withdrawn"), {}, "withdrawn", None),
            (lambda held: held.fail(), {}, "failed", None),
            (lambda _: None, {}, "failed", TypeError),
            (lambda _: None, {"final": lambda document: {}[document]}, "failed", (KeyError, TypeError)),
            (lambda _: None, {"final": lambda _: "unheard of"}, "failed", ValueError),
        ],
    )
    def test_end(self, ground: Ground, body: Any, options: Any, state: str, error: Any) -> None:
        """The document ends as the block said. After any error, the document has failed, and the error goes on."""
        id_ = ground.add(1)
        block = ground.lock.hold((id_, 1), "exporting", **options)
        with pytest.raises(error) if error else nullcontext(), block as held:
            assert ground.read(id_, "state") == "exporting"
            body(held)
        assert ground.read(id_, "state", "holder") == (state, None)

    def test_changed_or_lost_meanwhile(self, ground: Ground) -> None:
        """A changed document fails, so that the work is repeated. For a lost one nothing is written. Both errors are
        raised."""
        id_ = ground.add(1)
        with pytest.raises(DocumentChanged), ground.lock.hold((id_, 1), "exporting", final="exported"):
            ground.change(id_, version=9, price=1)
        assert ground.read(id_, "state", "holder", "price") == ("failed", None, 1)
        with pytest.raises(DocumentLockLost), ground.lock.hold((id_, 10), "exporting", final="exported"):
            ground.change(id_, holder="other", token="another")
        with pytest.raises(KeyError), ground.lock.hold((ground.add(1), 1), "exporting") as held:  # noqa: PT012
            ground.change(held.id, holder="other", token="another")
            raise KeyError
        assert ground.read(held.id, "holder") == "other"

    def test_a_loss_that_another_thread_was_told(self, plain: Ground) -> None:
        """The block reports the loss as well, because its own thread may not know of it."""
        with pytest.raises(DocumentLockLost), plain.lock.hold((plain.add(1), 1), "exporting") as held:  # noqa: PT012
            plain.change(held.id, holder="other")
            with ThreadPoolExecutor(1) as pool:
                assert isinstance(pool.submit(held.renew).exception(), DocumentLockLost)

    def test_inside_a_transaction(self, plain: Ground, settings: Any) -> None:
        """F90: A release before the commit of another database's transaction causes a warning, once for each place."""
        transactions._reported.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                with transaction.atomic(), plain.lock.hold((plain.add(1), 1), "exporting", final="exported"):
                    pass
        assert transactions.open_transactions() == [], "the test's own transaction counts nowhere"
        assert [str(each.message)[:12] for each in caught if each.category is RuntimeWarning] == ["the document"]

    @pytest.mark.parametrize("error", [None, KeyError])
    def test_warnings_that_are_errors(self, plain: Ground, error: type[KeyError] | None) -> None:
        """The document is released all the same, and the error of the block is raised."""
        transactions._reported.clear()
        held = plain.lock.acquire((plain.add(1), 1), "exporting", final="exported")
        with transaction.atomic(), warnings.catch_warnings(), pytest.raises(error or RuntimeWarning):  # noqa: PT012
            warnings.simplefilter("error")
            with held:
                if error:
                    raise error
        assert plain.read(held.id, "state", "holder") == ("failed" if error else "exported", None)

    def test_forgotten(self, ground: Ground) -> None:
        """An object that is dropped, even of a batch, is released with a warning that names the place."""
        place = "test_holding.py"
        for acquire in (
            lambda id_: ground.lock.acquire((id_, 1), "exporting"),
            lambda id_: ground.lock.acquire_many([(id_, 1)], "exporting"),
        ):
            id_ = ground.add(1)
            with pytest.warns(ResourceWarning, match=place):  # noqa: PT031
                acquire(id_)
                gc.collect()
            assert eventually(lambda id_=id_: ground.read(id_, "state", "holder") == ("failed", None))  # type: ignore[misc]


class TestBatch:
    """Several documents, each by itself."""

    def test_in_the_order_asked(self, ground: Ground) -> None:
        """F138: A batch is in the order of the request, not of the ids, and has each document once."""
        ids = [ground.add(1) for _ in range(5)]
        asked = [ids[number] for number in (3, 0, 4, 0, 2)]
        with ground.lock.acquire_many([(id_, 1) for id_ in asked], "exporting", final="exported") as batch:
            assert [held.id for held in batch] == [ids[number] for number in (3, 0, 4, 2)]

    def test_ids_that_are_alike(self, plain: Ground) -> None:
        """F138: 1 and True are two documents of MongoDB, but one key of a dict. Both are refused."""
        for id_ in (1, True):
            plain.collection.insert_one({"_id": id_, "documentVersion": 1})
        with pytest.raises(ValueError, match="two ids"):
            plain.lock.acquire_many([(1, 1), (True, 1)], "exporting")
        with plain.lock.acquire_many([(True, 1)], "exporting", final="exported") as batch:
            assert [held.id for held in batch] == [True]

    def test_moments_with_a_zone(self, plain: Ground) -> None:
        """Moments are valid ids, also if the client returns them with their zone."""
        place = plain.collection.with_options(CodecOptions[Document](tz_aware=True))
        lock: DocumentLock[Any] = DocumentLock(place, **OTHERS, pending=PENDING, final=FINAL, stale_after=60)
        place.insert_many([{"_id": datetime(2030, 1, day, tzinfo=UTC)} for day in (1, 2)])
        with lock.acquire_many(place.find(), "exporting", final="exported") as batch:
            assert len(lock.force_release(lock.snapshots(ids=[held.id for held in batch]))) == 2
            assert not [held for held in batch if held.fail()]

    def test_each_by_itself(self, ground: Ground) -> None:
        """A refused document has its error. A failed one does not fail the others. The rest is ended at the end."""
        ids = [ground.add(1), ground.add(2), ground.add(1, holder="other", state="exporting")]
        ids += [ground.add(1) for _ in range(3)]
        with ground.lock.acquire_many([(id_, 1) for id_ in ids], "withdrawing", final="withdrawn") as batch:
            assert [type(batch.refused[id_]) for id_ in ids[1:3]] == [DocumentChanged, DocumentHeld]
            assert len(batch) == 4
            for held in list(batch)[:2]:
                with pytest.raises(KeyError), held:
                    raise KeyError
        states = [ground.read(id_, "state") for id_ in ids]
        assert states == ["withdraw_failed", None, "exporting", "withdraw_failed", "withdrawn", "withdrawn"]

    def test_too_late(self, plain: Ground) -> None:
        """A document without a begun block fails, even if the loop goes on, because no one has worked on it."""
        late = plain.add(1)
        with plain.lock.acquire_many([(late, 1)], "exporting", final="exported") as batch:
            batch.held[0]._deadline = 0
            with pytest.raises(DocumentLockLost, match="renew"), batch.held[0]:
                pass
        assert eventually(lambda: plain.read(late, "state", "holder") == ("failed", None))

    def test_an_error(self, plain: Ground) -> None:
        """All remaining documents fail with the block."""
        ids = [plain.add(1) for _ in range(3)]
        batch = plain.lock.acquire_many([(id_, 1) for id_ in ids], "exporting", final="exported")
        with pytest.raises(KeyError), batch:  # noqa: PT012
            batch.held[0].finish()
            raise KeyError
        assert [plain.read(id_, "state", "holder") for id_ in ids] == [("exported", None), *[("failed", None)] * 2]

    def test_refused_by_mongodb(self, plain: Ground) -> None:
        """F82: Documents that a validator refuses are left out. A document that may not become final fails, and the
        others end."""
        ids = [plain.add(1, price=number) for number in range(4)]
        database, name = plain.collection.database, plain.collection.name
        no = {"$nor": [{"price": 0}, {"_id": ids[1], "exportStatus": "exported"}]}
        database.command("collMod", name, validator=no, validationLevel="strict")
        batch = plain.lock.acquire_many([(id_, 1) for id_ in ids], "exporting", final="exported")
        assert isinstance(batch.refused.pop(ids[0]), DocumentRefused)
        assert not batch.refused
        with pytest.raises(DocumentRefused), batch:
            pass
        assert [plain.read(id_, "state") for id_ in ids] == [None, "failed", "exported", "exported"]
