"""F70: one meaning of `owner`, that of named locks; and waiting for a document."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from django_mongolock import DocumentChanged, DocumentHeld, DocumentLockLost, DocumentNotFound
from django_mongolock.documents.holding import HeldDocument
from django_mongolock.documents.sender import Sender
from django_mongolock.versions import retry_on_conflict, retrying_on_conflict
from testproject.shop.models import Ad
from tests.documents.conftest import Document, Ground
from tests.documents.test_holding import awaiting, blocking
from tests.support.forking import FORKS, in_child
from tests.support.lock_fixtures import WITH_MONGO
from tests.support.waiting import eventually

pytestmark = WITH_MONGO


@pytest.fixture(params=[blocking, awaiting])
def call(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Each method in both of its faces."""
    face: Callable[..., Any] = request.param
    return face


class TestOwner:
    """The owner resumes what a run of its own has left, if that run has certainly ended; a living one is a holder."""

    def test_a_living_run(self, ground: Ground) -> None:
        """F70: it keeps the document, one by one and in batches: two runs never work on one document."""
        id_ = ground.add(1)
        former = ground.lock.acquire((id_, 1), "exporting", owner="task-5")
        with pytest.raises(DocumentHeld) as caught:
            ground.lock.acquire((id_, 2), "exporting", owner="task-5")
        assert caught.value.holder == "task-5"
        batch = ground.lock.acquire_many([(id_, 2)], "exporting", owner="task-5")
        assert isinstance(batch.refused[id_], DocumentHeld)
        former.finish("exported")
        assert ground.read(id_, "state", "version") == ("exported", 2)

    @pytest.mark.parametrize("attempt", [None, "", "of an old program", 5], ids=str)
    def test_a_run_of_which_nothing_is_known(self, ground: Ground, attempt: object) -> None:
        """F70: on another machine, or of another program: it may live."""
        id_ = ground.add(7, holder="me", state="exporting", attempt=attempt)
        with pytest.raises(DocumentHeld):
            ground.lock.acquire((id_, 7), "exporting", owner="me")

    def test_a_stale_run(self, ground: Ground) -> None:
        """F70: it is resumed at once, without a sweep; by its owner alone. What it writes afterwards is refused."""
        id_ = ground.add(1)
        former = ground.lock.acquire((id_, 1), "exporting", owner="task-5")
        ground.change(id_, time=datetime.now(UTC) - timedelta(seconds=90))
        with pytest.raises(DocumentHeld):
            ground.lock.acquire((id_, 2), "exporting", owner="task-6")
        held = ground.lock.acquire((id_, 2), "exporting", owner="task-5")
        with pytest.raises(DocumentLockLost):
            former.update({"price": 9})
        held.finish("exported")
        assert ground.read(id_, "state", "version", "price") == ("exported", 3, 5)


class TestDeadRun:
    """A run whose process is gone."""

    pytestmark = FORKS

    def test_is_resumed(self, ground: Ground, call: Callable[..., Any]) -> None:
        """F70: at once, by its owner alone, one by one and in batches."""
        ids = [ground.add(1) for _ in range(2)]

        def acquire() -> None:
            held = [ground.lock.acquire((id_, 1), "exporting", owner="task-5") for id_ in ids]
            held[0].renew()

        in_child(acquire)
        with pytest.raises(DocumentHeld):
            call(ground.lock, "acquire", (ids[0], 2), "exporting", owner="task-6")
        held = call(ground.lock, "acquire", (ids[0], 2), "exporting", owner="task-5", final="exported")
        batch = call(ground.lock, "acquire_many", [(ids[1], 2)], "exporting", owner="task-5", final="exported")
        assert (held.version, [one.version for one in batch]) == (3, [3])
        call(held, "__exit__", None, None, None)
        call(batch, "__exit__", None, None, None)
        assert [ground.read(id_, "state") for id_ in ids] == ["exported"] * 2

    def test_is_resumed_by_one(self, plain: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        """F70: of two runs that find the same dead one, the second finds the first one alive."""
        id_ = plain.add(1)
        in_child(lambda: plain.lock.acquire((id_, 1), "exporting", owner="me"))
        send, calls = Sender.send, []
        first: list[Any] = []

        def overtake(sender: Sender, command: Any, *left: float) -> Any:
            calls.append(1)
            if len(calls) == 3:  # refused, read; the next one takes over
                first.append(plain.lock.acquire((id_, 2), "exporting", owner="me"))
            return send(sender, command, *left)

        monkeypatch.setattr(Sender, "send", overtake)
        with pytest.raises((DocumentChanged, DocumentHeld)):
            plain.lock.acquire((id_, 2), "exporting", owner="me")
        first[0].finish("exported")


class TestWait:
    """`wait=` tries again while the document is held, and reads it again if it has changed."""

    def test_for_the_holder(self, ground: Ground, call: Callable[..., Any]) -> None:
        """It is granted after the holder has finished, whatever version it has then."""
        id_ = ground.add(1)
        holder = ground.lock.acquire((id_, 1), "exporting")
        timer = threading.Timer(0.2, lambda: holder.finish("exported", {"price": 8}))
        timer.start()
        held = call(ground.lock, "acquire", (id_, 2), "withdrawing", wait=20, changes={"title": "x"})
        timer.join()
        assert (held.version, ground.read(id_, "price", "title", "state")) == (4, (8, "x", "withdrawing"))
        call(held, "fail")

    def test_changed(self, make: Callable[..., Ground]) -> None:
        """An outdated document is read again at once, and a function decides again which work it needs."""
        ground = make("model")
        old = Ad.objects.create(user_id="7", title="x", price=5)
        ground.change(old.pk, version=7, optedIn=False)
        seen: list[Ad] = []

        def choose(ad: Ad) -> str:
            seen.append(ad)
            return "exporting" if ad.opted_in else "withdrawing"

        with ground.lock.hold(old, choose, final=lambda ad: ad.export_status[:8] + "n", wait=5) as held:
            assert (held.pending, held.version) == ("withdrawing", 8)
        assert [ad.document_version for ad in seen] == [1, 7]
        assert ground.read(old.pk, "state") == "withdrawn"

    @pytest.mark.parametrize("wait", [0, 0.2])
    def test_in_vain(self, plain: Ground, call: Callable[..., Any], wait: float) -> None:
        """The last refusal is raised; with 0 the first one is."""
        id_ = plain.add(1)
        plain.lock.acquire((id_, 1), "exporting", owner="other")
        with pytest.raises(DocumentHeld if wait else DocumentChanged):
            call(plain.lock, "acquire", (id_, 1), "exporting", wait=wait)

    def test_changed_when_the_time_is_over(self, plain: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is read once more: the end of the time is no reason to name a version that nobody asked for."""
        id_ = plain.add(1)
        monkeypatch.setattr("django_mongolock.documents.hold.clock.now", iter(range(0, 10_000, 100)).__next__)
        with plain.lock.hold((id_, 7), "exporting", final="exported", wait=0.1) as held:
            assert held.version == 2

    def test_deleted_meanwhile(self, plain: Ground) -> None:
        """That ends the wait."""
        id_ = plain.add(1, holder="other", state="exporting")
        timer = threading.Timer(0.1, lambda: plain.collection.delete_one({"_id": id_}))
        timer.start()
        with pytest.raises(DocumentNotFound):
            plain.lock.acquire((id_, 1), "exporting", wait=None)
        timer.join()

    def test_cancelled(self, plain: Ground) -> None:
        """A coroutine that waits is cancelled at once, and holds nothing."""
        id_ = plain.add(1, holder="other", state="exporting")

        async def cancel() -> None:
            task = asyncio.create_task(plain.lock.aacquire((id_, 1), "exporting", wait=60))
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancel())
        plain.change(id_, holder=None)
        with plain.lock.hold((id_, 1), "exporting", final="exported"):
            pass

    @pytest.mark.parametrize("wait", [-1, "5", True])
    def test_wrong(self, plain: Ground, wait: Any) -> None:
        """Refused before anything is sent."""
        with pytest.raises((TypeError, ValueError), match="wait"):
            plain.lock.hold((1, 1), "exporting", wait=wait)

    def test_many_flows(self, plain: Ground) -> None:
        """Eight flows that wait for one document all get it, one after the other."""
        id_ = plain.add(1)
        work: list[str] = []

        def flow() -> None:
            with plain.lock.hold((id_, 1), "exporting", final="exported", wait=30):
                work.append("begin")
                work.append("end")

        threads = [threading.Thread(target=flow) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert work == ["begin", "end"] * 8
        assert plain.read(id_, "version") == 9


class TestFunctions:
    """`pending=` and `final=` may be functions of the document."""

    def test_batch(self, make: Callable[..., Ground], call: Callable[..., Any]) -> None:
        """One batch holds documents in different states."""
        ground = make("model")
        for opted_in in (True, False, True):
            Ad.objects.create(user_id="7", title="x", price=1, opted_in=opted_in)

        def pending(ad: Ad) -> str:
            return "exporting" if ad.opted_in else "withdrawing"

        def final(ad: Ad) -> str:
            return "exported" if ad.opted_in else "withdrawn"

        batch = call(ground.lock, "acquire_many", list(Ad.objects.order_by("pk")), pending, final=final)
        assert [held.pending for held in batch] == ["exporting", "withdrawing", "exporting"]
        call(batch, "__exit__", None, None, None)
        states = Ad.objects.order_by("pk").values_list("export_status", flat=True)
        assert list(states) == ["exported", "withdrawn", "exported"]

    def test_wrong_state(self, plain: Ground) -> None:
        """What the function returns is checked: before anything is sent, or before the final state is written."""
        id_ = plain.add(1)
        with pytest.raises(ValueError, match="not declared as a pending"):
            plain.lock.acquire(plain.raw(id_), lambda document: "exported")
        with pytest.raises(TypeError, match="as you have read it"):
            plain.lock.acquire((id_, 1), lambda document: "exporting")
        with (
            pytest.raises(ValueError, match="not declared as a final"),
            plain.lock.hold((id_, 1), "exporting", final=lambda document: "gone"),
        ):
            pass
        assert plain.read(id_, "state", "holder") == ("failed", None)

    def test_one_that_fails_in_a_batch(self, plain: Ground) -> None:
        """Its document fails; the others are finished."""
        ids = [plain.add(1, price=price) for price in (1, 0, 2)]
        batch = plain.lock.acquire_many(
            list(plain.collection.find().sort("price")),
            "exporting",
            final=lambda document: {1: "exported", 2: "withdrawn"}[document["price"]],
        )
        with pytest.raises(KeyError), batch:
            pass
        assert [plain.read(id_, "state") for id_ in ids] == ["exported", "failed", "withdrawn"]


class TestIsolate:
    """The work on one document of a batch fails, and does not fail the others."""

    def test_isolate(self, plain: Ground) -> None:
        """The others are still tried; the error is in `failed`."""
        ids = [plain.add(1) for _ in range(4)]
        tried = []
        with plain.lock.acquire_many([(id_, 1) for id_ in ids], "exporting", final="exported") as batch:
            for held in batch:
                with batch.isolate(held) as same:
                    assert same is held
                    tried.append(held.id)
                    if held.id == ids[1]:
                        raise KeyError("mine")
                    if held.id == ids[2]:
                        plain.change(held.id, holder="other")
        assert sorted(tried) == sorted(ids)
        assert {id_: type(error) for id_, error in batch.failed.items()} == {ids[1]: KeyError, ids[2]: DocumentLockLost}
        assert [plain.read(id_, "state") for id_ in ids] == ["exported", "failed", "exporting", "exported"]
        assert "2 failed" in repr(batch)

    def test_async(self, plain: Ground) -> None:
        """The same in a coroutine; a cancellation goes on, and leaves nothing pending."""
        ids = [plain.add(1) for _ in range(3)]

        failed = []

        async def work() -> None:
            batch = await plain.lock.aacquire_many([(id_, 1) for id_ in ids], "exporting", final="exported")
            failed.append(batch.failed)
            async with batch:
                async with batch.isolate(batch.held[0]):
                    raise KeyError
                async with batch.isolate(batch.held[1]):
                    raise asyncio.CancelledError

        with pytest.raises(asyncio.CancelledError):
            asyncio.run(work())
        assert [type(error) for error in failed[0].values()] == [KeyError]
        assert eventually(lambda: [plain.read(id_, "state") for id_ in ids] == ["failed"] * 3)

    def test_what_strikes_at_its_end(self, plain: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        """A signal while a document is finished is no error of its work: it ends the batch, which leaves nothing."""
        ids = [plain.add(1) for _ in range(3)]
        finished = []

        def strike(held: HeldDocument[Any], final: object) -> str:
            finished.append(held.id)
            raise KeyboardInterrupt

        def work() -> None:
            with batch:
                for held in batch:
                    with batch.isolate(held):
                        pass

        batch = plain.lock.acquire_many([(id_, 1) for id_ in ids], "exporting", final="exported")
        monkeypatch.setattr(HeldDocument, "final_state", strike)
        with pytest.raises(KeyboardInterrupt):
            work()
        assert (len(finished), batch.failed) == (1, {})
        assert eventually(lambda: [plain.read(id_, "state") for id_ in ids] == ["failed"] * 3)


class TestRetry:
    """`@retry_on_conflict` runs a function again that a document lock refused."""

    @pytest.mark.parametrize("face", ["blocking", "async"])
    def test_retry(self, plain: Ground, face: str) -> None:
        """It was changed, then it was held; then it is free."""
        id_ = plain.add(1, holder="other", state="exporting")
        versions = iter([0, 1, 1])

        def prepare(version: int, runs: list[int]) -> int:
            runs.append(version)
            if len(runs) == 3:
                plain.change(id_, holder=None)
            return version

        runs: list[int] = []

        @retry_on_conflict(backoff=0.01, longest=0.01)
        def export() -> int:
            with plain.lock.hold((id_, prepare(next(versions), runs)), "exporting", final="exported") as held:
                return held.version

        @retry_on_conflict(backoff=0.01, longest=0.01)
        async def aexport() -> int:
            version = prepare(next(versions), runs)
            async with plain.lock.hold((id_, version), "exporting", final="exported") as held:
                return held.version

        assert (asyncio.run(aexport()) if face == "async" else export()) == 2
        assert len(runs) == 3

    def test_pause(self) -> None:
        """After a refusal by a holder it waits as long as that makes sense, within its own bound."""
        held = DocumentHeld("ads", 5, "other", retry_after=7.0)
        assert retrying_on_conflict(longest=30).pause(1, held) == 7
        assert retrying_on_conflict(longest=2).pause(1, held) == 2


def test_ids(plain: Ground) -> None:
    """F90: moments with a zone, or with microseconds, are the same ids as the server's; Decimal128 is refused."""
    from bson import Decimal128

    moment = datetime(2030, 1, 1, 12, 30, 0, 123_456, tzinfo=UTC)
    plain.collection.insert_one({"_id": moment, "documentVersion": 1})
    for version, id_ in enumerate((moment, moment.astimezone(), moment.replace(tzinfo=None)), 1):
        batch = plain.lock.acquire_many([(id_, version)], "exporting", final="exported")
        assert (len(batch), batch.refused) == (1, {})
        with batch:
            pass
    document: Document = {"_id": Decimal128("1"), "documentVersion": 1}
    plain.collection.insert_one(document)
    with pytest.raises(TypeError, match="an id of type Decimal128 cannot be locked"):
        plain.lock.hold(document, "exporting")
