"""Lost answers, late commands, cancellation, signals and forks. No flow believes that it holds a document of another,
and every exit hands over its documents (F82 to F85, F88). A child holds nothing of its parent (F63)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from pymongo import helpers_shared
from pymongo.errors import OperationFailure

from django_mongolock.documents.steps import acquire
from django_mongolock.documents.updates import refusal_of
from django_mongolock.exceptions import DocumentChanged, DocumentHeld, DocumentLockLost, LockBackendFailed, LockMisused
from tests.documents.conftest import FINAL, PENDING, Ground
from tests.support.forking import FORKS, in_child
from tests.support.lock_fixtures import WITH_MONGO
from tests.support.programs import python
from tests.support.waiting import eventually

pytestmark = WITH_MONGO
Call = Callable[..., Any]
#: The arguments of each write.
GIVEN: dict[str, tuple[Any, ...]] = {"finish": ("exported", {"price": 9}), "update": ({"price": 9},)}


def states(ground: Ground, ids: list[Any]) -> list[tuple[Any, Any]]:
    return [ground.read(id_, "state", "holder") for id_ in ids]


class TestLostAnswers:
    """One read of token and version shows the outcome. The work is done once."""

    @pytest.mark.parametrize("lost", [True, False], ids=["not done", "done"])
    def test_acquire(self, ground: Ground, strike: Call, lost: bool) -> None:
        """The second sending gets the result of the first one, with the same version."""
        id_ = ground.add(1)
        strike(ground, 1, lost=lost)
        held = ground.lock.acquire((id_, 1), "exporting", changes={"price": 9})
        assert (held.version, ground.read(id_, "version", "price")) == (2, (2, 9))
        held.finish("exported")

    @pytest.mark.parametrize("how", ["acquire", "acquire_many"])
    def test_never_known(self, ground: Ground, strike: Call, do: Call, how: str) -> None:
        """An unknown outcome is not reported as held. A possible grant is released in the background."""
        ids = [ground.add(1) for _ in range(2)]
        strike(ground, 1, 2)
        with pytest.raises(LockBackendFailed):
            do(ground.lock, how, (ids[0], 1) if how == "acquire" else [(id_, 1) for id_ in ids], "exporting")
        taken = ids[:1] if how == "acquire" else ids
        assert eventually(lambda: states(ground, taken) == [("failed", None)] * len(taken))

    def test_two_runs_of_one_flow(self, plain: Ground, strike: Call) -> None:
        """A flow that finds its owner's name in the document does not take another run's grant for its own."""
        other = plain.lock.acquire((plain.add(1), 1), "exporting", owner="task")
        strike(plain, 1)
        with pytest.raises(DocumentChanged):
            plain.lock.acquire((other.id, 1), "exporting", owner="task")
        other.finish("exported")

    @pytest.mark.parametrize("lost", [True, False], ids=["not done", "done"])
    @pytest.mark.parametrize("name", ["finish", "update", "renew", "fail"])
    def test_held(self, ground: Ground, do: Call, strike: Call, name: str, lost: bool) -> None:
        """The write is done once, and known to be done. A failure is left to the background, and settled there."""
        held = ground.lock.acquire((ground.add(1), 1), "exporting")
        strike(ground, 1, lost=lost)
        with pytest.raises(LockBackendFailed) if name == "fail" else nullcontext():
            do(held, name, *GIVEN.get(name, ()))
        expected = {"finish": "exported", "fail": "failed"}.get(name, "exporting")
        assert held.ended == (None if expected == "exporting" else expected)
        assert eventually(lambda: ground.read(held.id, "state", "version") == (expected, 3))
        if name in ("update", "renew"):
            held.finish("exported")

    @pytest.mark.parametrize("lost", [True, False], ids=["not done", "done"])
    @pytest.mark.parametrize("name", ["update", "finish", "renew"])
    @pytest.mark.parametrize("then", ["update", "finish", "renew", "fail", "leave"])
    def test_an_unknown_outcome(self, plain: Ground, strike: Call, name: str, then: str, lost: bool) -> None:
        """F88: The holder's next write goes on from either outcome. A late copy of the first one changes nothing."""
        held = plain.lock.acquire((plain.add(1), 1), "exporting", final="withdrawn")
        sent = strike(plain, 1, 2, lost=lost)
        with pytest.raises(LockBackendFailed):
            getattr(held, name)(*GIVEN.get(name, ()))
        done = name == "finish" and not lost
        if then == "leave":
            held.__exit__(KeyError, KeyError(), None)
            assert eventually(lambda: plain.read(held.id, "state") == ("exported" if done else "failed"))
        elif done:
            if then == "fail":
                assert held.fail() is False
            else:
                with pytest.raises(DocumentLockLost, match="may have been done"):
                    getattr(held, then)(*{"update": ({"price": 8},), "finish": ("withdrawn",)}.get(then, ()))
        else:
            getattr(held, then)(*{"update": ({"price": 8},), "finish": ("withdrawn",)}.get(then, ()))
        before = plain.raw(held.id)
        for copy in sent[:2]:
            assert copy() is None
        assert plain.raw(held.id) == before
        if held.ended is None:
            held.finish()

    @pytest.mark.parametrize("raised", [False, True])
    def test_a_version_of_another_is_not_mine(self, plain: Ground, strike: Call, raised: bool) -> None:
        """Another writer raises the version by one just when an update is lost. The update does not count as done."""
        held = plain.lock.acquire((plain.add(1), 1), "exporting")
        strike(
            plain,
            1,
            lost=True,
            before=lambda number: plain.change(held.id, version=3) if raised and number == 2 else None,
        )
        if raised:
            with pytest.raises(DocumentChanged):
                held.update(price=9)
            assert plain.read(held.id, "price") == 5
        else:
            held.update(price=9)
        assert held.fail()

    def test_finished_and_acquired(self, ground: Ground, do: Call, strike: Call) -> None:
        """F85: The write was done before the next flow came. The error does not say that nothing was written."""
        held = ground.lock.acquire((ground.add(1), 1), "exporting")
        found: list[Any] = []
        strike(
            ground, 1, before=lambda n: found.append(ground.lock.acquire((held.id, 3), "exporting")) if n == 2 else None
        )
        with pytest.raises(DocumentLockLost, match="may have been done") as caught:
            do(held, "finish", "exported", {"price": 9})
        assert caught.value.maybe_written
        assert ground.read(held.id, "holder", "price") == (found[0].owner, 9)
        found[0].fail()

    def test_late_copies(self, ground: Ground, strike: Call) -> None:
        """A copy that the network held up changes no version under the holder's hands, and brings back nothing."""
        sent = strike(ground)
        held = ground.lock.acquire((ground.add(1), 1), "exporting")
        before = ground.raw(held.id)
        assert sent[0]() is None
        assert ground.raw(held.id) == before
        held.update({"price": 1})
        held.finish("exported")
        before = ground.raw(held.id)
        for copy in sent[:3]:
            assert copy() is None
        assert ground.raw(held.id) == before

    def test_many_and_sweep(self, ground: Ground, strike: Call) -> None:
        """Several documents can be acquired, ended, swept and forced in the same way."""
        ids = [ground.add(1) for _ in range(3)]
        sent = strike(ground, 1, 4, 8)
        with ground.lock.acquire_many([(id_, 1) for id_ in ids], "exporting", final="exported") as batch:
            assert [held.version for held in batch] == [2, 2, 2]
        assert states(ground, ids) == [("exported", None)] * 3
        with ground.lock.hold((ids[0], 3), "exporting") as held:
            ground.age(held.id, 90)
            first = len(sent)
            strike(ground, first + 2)
            swept = ground.lock.clear_stale()
            assert (swept.count, [seen.id for seen in swept.cleared]) == (1, [ids[0]])
            held._own.ended = "failed"

    @pytest.mark.long
    def test_one_that_arrives_later_still(self, plain: Ground, strike: Call) -> None:
        """A command that the network held up until after the first attempt to release is released by the next."""
        id_ = plain.add(1)
        tried: list[Any] = []

        def arrive(number: int) -> None:
            if number == 4:  # the second try of the background
                tried.append(sent[0]())

        sent = strike(plain, 1, 2, lost=True, before=arrive)
        with pytest.raises(LockBackendFailed):
            plain.lock.acquire((id_, 1), "exporting")
        assert eventually(lambda: plain.read(id_, "state", "version") == ("failed", 3))
        assert tried[0] is not None

    def test_a_refusal_says_nothing_of_the_first_copy(self, plain: Ground, strike: Call) -> None:
        """A grant to the unanswered copy is released."""
        id_ = plain.add(1)
        strike(plain, 1)
        strike(plain, 2, error=LockBackendFailed("it may not do this any more", passing=False), lost=True)
        with pytest.raises(LockBackendFailed, match="any more"):
            plain.lock.acquire((id_, 1), "exporting")
        assert eventually(lambda: plain.read(id_, "state", "holder") == ("failed", None))


class TestEveryExit:
    """F82, F84: The rest is released, with one wait for all documents."""

    @pytest.mark.parametrize("number", range(1, 6))
    @pytest.mark.parametrize("error", [LockBackendFailed("away"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
    def test_acquire_many(  # noqa: PLR0917
        self, plain: Ground, do: Call, strike: Call, monkeypatch: Any, number: int, error: BaseException
    ) -> None:
        """The acquisition may end at any command, such as that of an earlier 500 or the read of the refusals."""
        monkeypatch.setattr("django_mongolock.documents.hold.BATCH", 3)
        ids = [plain.add(1) for _ in range(4)]
        ids.insert(1, plain.add(1, holder="other", state="exporting"))
        strike(plain, *((number, number + 1) if isinstance(error, LockBackendFailed) else (number,)), error=error)
        with pytest.raises(type(error)):
            do(plain.lock, "acquire_many", [(id_, 1) for id_ in ids], "exporting")
        assert eventually(lambda: not any(holder not in (None, "other") for _, holder in states(plain, ids)), 15)
        assert plain.read(ids[1], "state", "holder") == ("exporting", "other")

    @pytest.mark.parametrize("lost", [True, False], ids=["not done", "done"])
    def test_batch_away(self, plain: Ground, do: Call, strike: Call, lost: bool) -> None:
        """MongoDB is away at the end of a batch. All documents together are sent twice, and then in the background. The
        background has one command for the sent document, and one for the rest."""
        ids = [plain.add(1) for _ in range(10)]
        batch = plain.lock.acquire_many([(id_, 1) for id_ in ids], "exporting", final="exported")
        sent = strike(plain, 1, 2, lost=lost)
        with pytest.raises(LockBackendFailed):
            do(batch, "__exit__", None, None, None)
        assert len(sent) <= 4
        first = "failed" if lost else "exported"
        assert eventually(lambda: states(plain, ids) == [(first, None), *[("failed", None)] * 9], 15)

    def test_batch_interrupted(self, plain: Ground, strike: Call) -> None:
        """Ctrl-C in the middle of the end does not keep the rest from being released."""
        ids = [plain.add(1) for _ in range(10)]
        batch = plain.lock.acquire_many([(id_, 1) for id_ in ids], "exporting", final="exported")
        strike(plain, 4, error=KeyboardInterrupt(), lost=True)
        with pytest.raises(KeyboardInterrupt), batch:
            pass
        assert eventually(lambda: sorted(states(plain, ids)) == [("exported", None)] * 3 + [("failed", None)] * 7)

    @pytest.mark.long
    @pytest.mark.parametrize("how", ["hold", "acquire_many"])
    def test_cancelled_at_the_end(self, plain: Ground, failpoint: Call, how: str) -> None:
        """A coroutine that is cancelled leaves nothing pending, though its last command was not carried out."""
        ids = [plain.add(1) for _ in range(3)]

        async def work() -> None:
            if how == "hold":
                block: Any = plain.lock.hold((ids[0], 1), "exporting", final="exported")
            else:
                block = await plain.lock.aacquire_many([(id_, 1) for id_ in ids], "exporting", final="exported")
            async with block:
                failpoint("findAndModify", "update", times=1, blockConnection=True, blockTimeMS=300, errorCode=112)

        async def cancel() -> None:
            task = asyncio.create_task(work())
            assert await asyncio.to_thread(eventually, lambda: plain.read(ids[0], "state") == "exporting")
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancel())
        taken = ids[:1] if how == "hold" else ids
        assert eventually(lambda: states(plain, taken) == [("failed", None)] * len(taken), 15)

    def test_between_two_lines_of_the_runner(self, plain: Ground) -> None:
        """A granted document is released, even if the answer never comes back to the steps."""
        plan = plain.lock._plan("exporting")
        request = plan.request((plain.add(1), 1))
        steps = acquire(context := plain.lock.context(), plan.owns([request])[request.id], request)
        command: Any = next(steps)
        assert context.courier.send(command) is not None
        steps.close()
        assert eventually(lambda: plain.read(request.id, "state", "holder") == ("failed", None))

    def test_commands_of_the_main_thread_are_sent_by_another(self, plain: Ground, strike: Call) -> None:
        """A driver's connection does not survive an error of a signal handler in the middle of a command."""
        threads: set[threading.Thread] = set()
        strike(plain, before=lambda _: threads.add(threading.current_thread()))
        with plain.lock.hold((plain.add(1), 1), "exporting", final="exported"):
            pass
        assert threads
        assert threading.main_thread() not in threads

    @pytest.mark.long
    def test_a_process_that_ends(self, plain: Ground) -> None:
        """The background work of a process is tried before the process ends."""
        id_ = plain.add(1)
        program = f"""
import django; django.setup()
import os
from pymongo import MongoClient
from django_mongolock.documents import DocumentLock
from django_mongolock.documents.held_document import abandon
raw = MongoClient(os.environ["MONGODB_URI"])[{plain.collection.database.name!r}][{plain.collection.name!r}]
lock = DocumentLock(raw, state="exportStatus", pending={PENDING!r}, final={FINAL!r}, stale_after=60)
held = lock.acquire(({id_!r}, 1), "exporting")
abandon(held._context, [held._own])
"""
        python("-c", program, DJANGO_SETTINGS_MODULE="testproject.settings")
        assert plain.read(id_, "state", "holder") == ("failed", None)


class TestServer:
    """The same errors from a real server."""

    @pytest.mark.parametrize(("code", "words"), [(13, "may not do this"), *[(n, str(n)) for n in (112, 365, 14031)]])
    def test_refused(self, plain: Ground, failpoint: Call, code: int, words: str) -> None:
        """F82: An error about the server is no refusal of the document. The error quotes no command."""
        id_ = plain.add(1)
        failpoint("findAndModify", errorCode=code)
        with pytest.raises(LockBackendFailed, match=words) as caught:
            plain.lock.acquire((id_, 1), "exporting", owner="a-secret-owner")
        assert "secret" not in str(caught.value.__cause__)
        assert plain.read(id_, "version") == 1

    def test_codes(self) -> None:
        """F82: Errors about the document concern a validator, a unique index, a path without fields, or its size."""
        others = {24, 50, 112, 290, 365, 462, 10058, 13388, 14031}
        for code in {*helpers_shared._RETRYABLE_ERROR_CODES, *others}:
            assert refusal_of(OperationFailure("", code)) is None, code
        for code in (2, 28, 121, 11000, 17419):
            found = refusal_of(OperationFailure("", code))
            assert found is not None
            assert f"(code {code}, " in found


class TestForks:
    """F63: A child does not end its parent's documents, does not write to them, and does not get them too."""

    pytestmark = FORKS

    @pytest.mark.parametrize("error", [None, RuntimeError("in the child")], ids=["well", "with an error"])
    def test_the_child_leaves_the_block(self, ground: Ground, do: Call, error: Exception | None) -> None:
        """However the child leaves the block, the document stays the parent's. The parent then ends its work, with its
        changes."""
        block = ground.lock.hold((ground.add(1), 1), "exporting", final="exported")
        with block as held:
            before = ground.raw(held.id)
            in_child(lambda: do(block, "__exit__", type(error) if error else None, error, None))
            assert ground.raw(held.id) == before
            held.finish("withdrawn", {"price": 9})
        assert ground.read(held.id, "state", "price", "version", "holder") == ("withdrawn", 9, 3, None)

    @pytest.mark.parametrize("name", ["finish", "update", "renew", "__enter__", "fail"])
    def test_the_child_goes_on(self, ground: Ground, do: Call, name: str) -> None:
        """The child holds nothing, and sends nothing."""
        held = ground.lock.acquire((ground.add(1), 1), "exporting")
        before = ground.raw(held.id)

        def go_on() -> None:
            held._turn[None] = object()  # another thread of the parent was writing just then
            assert (held.ended, held.remaining) == ("lost", 0)
            if name == "fail":
                assert do(held, "fail") is False
                return
            with pytest.raises(DocumentLockLost, match="forked child"):
                do(held, name, *GIVEN.get(name, ()))

        in_child(go_on)
        assert ground.raw(held.id) == before
        do(held, "finish", "exported", {"price": 8})
        assert ground.read(held.id, "state", "price", "version") == ("exported", 8, 3)

    def test_a_batch(self, ground: Ground, do: Call) -> None:
        """Several at once are the parent's as well."""
        ids = [ground.add(1) for _ in range(3)]
        with ground.lock.acquire_many([(id_, 1) for id_ in ids], "exporting", final="exported") as batch:
            before = [ground.raw(id_) for id_ in ids]
            in_child(lambda: do(batch, "__exit__", None, None, None))
            assert [ground.raw(id_) for id_ in ids] == before
        assert states(ground, ids) == [("exported", None)] * 3

    @pytest.mark.parametrize("owner", [None, "task-5"])
    def test_both_go_on_to_ask(self, ground: Ground, owner: str | None) -> None:
        """A block prepared before the fork is granted to one of the two. The child has threads of its own."""
        id_ = ground.add(1)
        block = ground.lock.hold((id_, 1), "exporting", final="exported", owner=owner)
        in_child(block.acquire)
        if owner is None:
            with pytest.raises((DocumentHeld, DocumentChanged)):
                block.acquire()
        in_child(lambda: ground.lock.acquire((ground.add(1), 1), "withdrawing").finish("withdrawn"))

    def test_steps_of_the_parent(self, plain: Ground) -> None:
        """A child cannot continue steps that its parent has begun."""
        plan = plain.lock._plan("exporting")
        request = plan.request(("x", 1))
        steps = acquire(context := plain.lock.context(), plan.owns([request])[request.id], request)

        def go_on() -> None:
            with pytest.raises(LockMisused):
                context.courier.run(steps)

        in_child(go_on)
