"""F63: what a process holds is its own. A child that it forks neither ends it, nor writes to it, nor gets it too."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from django_mongolock import DocumentChanged, DocumentLockLost, LockBackendFailed, LockMisused
from django_mongolock.documents.sender import Sender
from django_mongolock.documents.steps import send
from tests.documents.conftest import Ground
from tests.documents.test_holding import awaiting, blocking
from tests.documents.test_lost_answers import Lossy
from tests.support.forking import FORKS, in_child
from tests.support.lock_fixtures import WITH_MONGO
from tests.support.waiting import eventually

pytestmark = [WITH_MONGO, *FORKS]
Call = Callable[..., Any]


@pytest.fixture(params=[blocking, awaiting])
def call(request: pytest.FixtureRequest) -> Call:
    """Each method in both of its faces."""
    face: Call = request.param
    return face


class TestHeld:
    """A document that is held when its process forks."""

    @pytest.mark.long
    @pytest.mark.parametrize("error", [None, RuntimeError("in the child")], ids=["well", "with an error"])
    def test_the_child_leaves_the_block(self, ground: Ground, call: Call, error: Exception | None) -> None:
        """F63: however it leaves, the document stays the parent's, who then ends its work, changes and all."""
        block = ground.lock.hold((ground.add(1), 1), "exporting", final="exported")
        with block as held:
            before = ground.raw(held.id)
            in_child(lambda: call(block, "__exit__", type(error) if error else None, error, None))
            assert ground.raw(held.id) == before
            held.finish("withdrawn", {"price": 9})
        assert ground.read(held.id, "state", "price", "version", "holder") == ("withdrawn", 9, 3, None)

    @pytest.mark.parametrize("name", ["finish", "update", "renew", "__enter__"])
    def test_the_child_goes_on(self, ground: Ground, call: Call, name: str) -> None:
        """F63: it is told that it holds nothing, and nothing is sent."""
        held = ground.lock.acquire((ground.add(1), 1), "exporting")
        before = ground.raw(held.id)
        arguments: tuple[Any, ...] = {"finish": ("exported", {"price": 7}), "update": ({"price": 7},)}.get(name, ())

        def go_on() -> None:
            assert (held.ended, held.remaining) == ("lost", 0)
            with pytest.raises(DocumentLockLost, match="forked child"):
                call(held, name, *arguments)

        in_child(go_on)
        assert ground.raw(held.id) == before
        call(held, "update", {"price": 8})
        call(held, "renew")
        call(held, "finish", "exported", {"price": 9})
        assert ground.read(held.id, "state", "price", "version") == ("exported", 9, 4)

    @pytest.mark.long
    def test_the_child_fails(self, ground: Ground, call: Call) -> None:
        """F63: it was not its own, so nothing has failed."""
        held = ground.lock.acquire((ground.add(1), 1), "exporting")

        def fail() -> None:
            assert call(held, "fail") is False

        in_child(fail)
        assert ground.read(held.id, "state") == "exporting"
        assert call(held, "fail") is True

    def test_a_batch(self, ground: Ground, call: Call) -> None:
        """F63: several at once are the parent's as well."""
        ids = [ground.add(1) for _ in range(3)]
        with ground.lock.acquire_many([(id_, 1) for id_ in ids], "exporting", final="exported") as batch:
            first = batch.held[0].id
            before = [ground.raw(id_) for id_ in ids]

            def leave() -> None:
                call(batch.held[0], "__exit__", None, None, None)
                call(batch, "__exit__", None, None, None)

            in_child(leave)
            assert [ground.raw(id_) for id_ in ids] == before
            batch.held[0].finish(changes={"price": 9})
        assert [ground.read(id_, "state", "price") for id_ in ids] == [
            ("exported", 9 if id_ == first else 5) for id_ in ids
        ]

    def test_the_child_has_locks_of_its_own(self, ground: Ground) -> None:
        """F63: another document, and the parent's once it is free, with the child's own threads."""
        mine, other = ground.add(1), ground.add(1)
        held = ground.lock.acquire((mine, 1), "exporting")

        def lock() -> None:
            with ground.lock.hold((other, 1), "exporting", final="exported"):
                pass

        in_child(lock)
        assert ground.read(other, "state") == "exported"
        held.finish("exported")
        in_child(lambda: ground.lock.acquire((mine, 2), "withdrawing").finish("withdrawn"))
        assert ground.read(mine, "state") == "withdrawn"


class TestAskedFor:
    """A document that is asked for when the process forks."""

    @pytest.mark.parametrize("owner", [None, "task-5"])
    def test_both_go_on_to_ask(self, ground: Ground, owner: str | None) -> None:
        """F63: what was prepared before the fork is granted to one of the two."""
        id_ = ground.add(1)
        block = ground.lock.hold((id_, 1), "exporting", final="exported", owner=owner)
        in_child(block.acquire)
        before = ground.raw(id_)
        with pytest.raises(DocumentChanged):
            block.acquire()
        assert ground.raw(id_) == before

    @pytest.mark.long
    def test_the_child_cancels_the_coroutine(self, plain: Ground) -> None:
        """F63: whoever asks in the parent gets what was granted, though nobody in the child wants it any more."""
        id_ = plain.add(1)

        async def ask() -> None:
            task = asyncio.create_task(plain.lock.aacquire((id_, 1), "exporting"))
            await asyncio.sleep(0)
            # The answer comes while the loop is kept busy, so it is not delivered when the process forks.
            assert eventually(lambda: plain.read(id_, "state") == "exporting")
            time.sleep(0.5)  # noqa: ASYNC251

            def cancel() -> None:
                coroutine: Any = task.get_coro()
                with pytest.raises(asyncio.CancelledError):
                    coroutine.throw(asyncio.CancelledError())
                time.sleep(0.3)  # time for a thread that would release it

            in_child(cancel)
            held = await task
            await held.afinish("exported", {"price": 9})

        asyncio.run(ask())
        assert plain.read(id_, "state", "price", "version") == ("exported", 9, 3)

    def test_steps_of_the_parent_are_not_sent(self, plain: Ground) -> None:
        """F63: whatever goes on in a child of what its parent began sends nothing more."""
        sender = Sender(plain.collection, 5)
        sent: list[Any] = []

        def go_on() -> None:
            with pytest.raises(LockMisused, match="forked"):
                sender.run(send(sent.append))
            assert not sent

        in_child(go_on)
        sender.run(send(sent.append))
        assert sent

    @pytest.mark.long
    def test_in_the_background(self, plain: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        """F63: each process lets go of what it never knew to have, in a thread of its own, and of nothing else."""
        mine, childs = plain.add(1), plain.add(1)

        def ask(id_: Any) -> None:
            Lossy(monkeypatch, 2)
            with pytest.raises(LockBackendFailed):
                plain.lock.acquire((id_, 1), "exporting")

        ask(mine)
        assert eventually(lambda: plain.read(mine, "state") == "failed")
        held = plain.lock.acquire((mine, 2), "exporting")

        def ask_and_wait() -> None:
            ask(childs)
            assert eventually(lambda: plain.read(childs, "state") == "failed")

        in_child(ask_and_wait)
        held.finish("exported")
        assert plain.read(mine, "state") == "exported"


class TestClones:
    """A copy of the process that takes itself for the first: of a machine that was cloned while it ran."""

    @pytest.fixture(autouse=True)
    def _same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """No process can be told from another."""
        monkeypatch.setattr(Sender, "forked", False, raising=False)

    @pytest.mark.long
    @pytest.mark.parametrize("name", ["fail", "finish", "update", "renew"])
    def test_the_copy_was_quicker(self, plain: Ground, call: Call, name: str) -> None:
        """F63: what it wrote is not taken for one's own: whoever comes second is told, and writes nothing."""
        held = plain.lock.acquire((plain.add(1), 1), "exporting")
        arguments: tuple[Any, ...] = {"finish": ("exported",), "update": ({"price": 7},)}.get(name, ())
        in_child(lambda: call(held, name, *arguments))
        before = plain.raw(held.id)
        with pytest.raises(DocumentLockLost):
            call(held, "finish", "withdrawn", {"price": 9})
        assert plain.raw(held.id) == before


@pytest.mark.long
def test_names_have_the_process_in_them(plain: Ground) -> None:
    """F63: the id of what the lock did last says which process did it, and is another one each time."""
    held = plain.lock.acquire((plain.add(1), 1), "exporting")
    seen = {plain.read(held.id, "attempt")}
    for _ in range(3):
        held.renew()
        seen.add(plain.read(held.id, "attempt"))
    held.fail()
    seen.add(plain.read(held.id, "attempt"))
    assert len(seen) == 5
    assert {each.split(".")[0] for each in seen} == {str(os.getpid())}
