"""Lost answers, late commands, cancellation and signals: no flow believes to hold what it does not hold."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from django_mongolock import DocumentChanged, DocumentLock, LockBackendFailed
from django_mongolock.documents.acquiring import acquire
from django_mongolock.documents.lock_context import Context
from django_mongolock.documents.sender import Sender
from django_mongolock.documents.source import make_source
from django_mongolock.documents.steps import Pause
from django_mongolock.documents.updates import Acquisition, Request, new_attempt
from tests.documents.conftest import FINAL, PENDING, USUAL, Document, Ground
from tests.support.lock_fixtures import NOBODY, WITH_MONGO
from tests.support.waiting import eventually

pytestmark = WITH_MONGO
Failpoint = Callable[..., None]


class Lossy:
    """Has commands of a name carried out, and their answers lost: so many times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self.times = times
        self.calls = 0
        send = Sender.send

        def lose(sender: Sender, command: Any, *left: float) -> Any:
            answer = send(sender, command, *left)
            self.calls += 1
            if self.calls <= self.times:
                raise LockBackendFailed("the answer was lost")
            return answer

        monkeypatch.setattr(Sender, "send", lose)


class TestLostAnswers:
    """Each attempt has an id of its own: what was done is found out, and done once."""

    def test_acquire(self, ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        """The second sending is granted what the first one got, with the same version."""
        id_ = ground.add(1)
        Lossy(monkeypatch, 1)
        held = ground.lock.acquire((id_, 1), "exporting", changes={"price": 9})
        assert (held.version, ground.read(id_, "version", "price")) == (2, (2, 9))
        held.finish("exported")

    def test_acquire_never_known(self, ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        """Not reported as held; what it may have been granted is released in the background."""
        id_ = ground.add(1)
        Lossy(monkeypatch, 2)
        with pytest.raises(LockBackendFailed):
            ground.lock.acquire((id_, 1), "exporting")
        assert eventually(lambda: ground.read(id_, "state", "holder") == ("failed", None))

    def test_two_runs_of_one_flow(self, plain: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whoever finds his owner's name in the document does not take another run's grant for his own."""
        id_ = plain.add(1)
        other = plain.lock.acquire((id_, 1), "exporting", owner="task")
        Lossy(monkeypatch, 1)  # so it looks whether the copy that was not answered was granted
        with pytest.raises(DocumentChanged):
            plain.lock.acquire((id_, 1), "exporting", owner="task")
        other.finish("exported")

    def test_a_late_copy(self, ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        """A copy of the acquisition that the network held up changes no version under the holder's hands, and brings
        back nothing when it is over."""
        copies: list[Any] = []
        send = Sender.send

        def keep(sender: Sender, command: Any, *left: float) -> Any:
            copies.append(lambda: send(sender, command, *left))
            return send(sender, command, *left)

        monkeypatch.setattr(Sender, "send", keep)
        id_ = ground.add(1)
        held = ground.lock.acquire((id_, 1), "exporting")
        since = ground.read(id_, "time")
        (acquire,) = copies
        assert acquire() is None
        assert ground.read(id_, "version", "time") == (2, since)
        held.update({"price": 1})
        assert acquire() is None
        held.finish("exported")
        before = ground.raw(id_)
        for copy in copies:
            copy()
        assert ground.raw(id_) == before

    @pytest.mark.parametrize("name", ["finish", "update", "renew", "fail"])
    def test_held(self, ground: Ground, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        """Done once, and known to be done."""
        id_ = ground.add(1)
        held = ground.lock.acquire((id_, 1), "exporting")
        lossy = Lossy(monkeypatch, 1)
        arguments = {"finish": ("exported", {"price": 9}), "update": ({"price": 9},)}.get(name, ())
        if name == "fail":
            with pytest.raises(LockBackendFailed):
                held.fail()
            assert eventually(lambda: lossy.calls > 1)
        else:
            getattr(held, name)(*arguments)
        states = {"finish": "exported", "fail": "failed"}
        assert ground.read(id_, "state") == states.get(name, "exporting")
        assert ground.read(id_, "version") == (3 if arguments else 2)
        if name in ("update", "renew"):
            held.finish("exported")

    def test_many(self, ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        """The same for several at once."""
        ids = [ground.add(1) for _ in range(3)]
        Lossy(monkeypatch, 1)
        batch = ground.lock.acquire_many([(id_, 1) for id_ in ids], "exporting", final="exported")
        assert [held.version for held in batch] == [2, 2, 2]
        with batch:
            pass
        Lossy(monkeypatch, 2)
        with pytest.raises(LockBackendFailed):
            ground.lock.acquire_many([(id_, 2) for id_ in ids], "exporting")
        assert eventually(lambda: {ground.read(id_, "state") for id_ in ids} == {"failed"})

    def test_sweep(self, ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        """What a sweep freed is counted, also where its answer was lost."""
        id_ = ground.add(1, holder="dead", state="exporting")
        ground.lock.clear_stale()
        ground.collection.update_one({"_id": id_}, [{"$set": {ground.names["time"]: {"$subtract": ["$$NOW", 90_000]}}}])
        send, lost = Sender.send, []

        def lose_second(sender: Sender, command: Any, *left: float) -> Any:
            answer = send(sender, command, *left)
            lost.append(1)
            if len(lost) == 2:
                raise LockBackendFailed("the answer was lost")
            return answer

        monkeypatch.setattr(Sender, "send", lose_second)
        swept = ground.lock.clear_stale()
        assert (swept.count, [seen.id for seen in swept.cleared]) == (1, [id_])


class TestLateCommands:
    """What nobody waits for any more is tried again and again."""

    def test_one_that_arrives_later_still(self, plain: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        """A command that the network held up until after the first try to release is released by the next."""
        copies: list[Any] = []
        tried: list[Any] = []
        send = Sender.send

        def hold_up(sender: Sender, command: Any, *left: float) -> Any:
            if len(copies) < 2:
                copies.append(lambda: send(sender, command, *left))
                raise LockBackendFailed("the command is on its way")
            tried.append(send(sender, command, *left))
            if len(tried) == 1:
                copies[0]()
            return tried[-1]

        id_ = plain.add(1)
        monkeypatch.setattr(Sender, "send", hold_up)
        with pytest.raises(LockBackendFailed):
            plain.lock.acquire((id_, 1), "exporting")
        assert eventually(lambda: plain.read(id_, "state", "version") == ("failed", 2))
        assert not tried[0]

    def test_doubt_remains(self, plain: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        """A refusal of the second sending says nothing of what the first one did."""
        send, calls = Sender.send, []

        def lose_then_refuse(sender: Sender, command: Any, *left: float) -> Any:
            calls.append(1)
            if len(calls) == 2:
                raise LockBackendFailed("it may not do this any more", passing=False)
            answer = send(sender, command, *left)
            if len(calls) == 1:
                raise LockBackendFailed("the answer was lost")
            return answer

        monkeypatch.setattr(Sender, "send", lose_then_refuse)
        id_ = plain.add(1)
        with pytest.raises(LockBackendFailed, match="any more"):
            plain.lock.acquire((id_, 1), "exporting")
        assert eventually(lambda: plain.read(id_, "state", "holder") == ("failed", None))


class TestServer:
    """The same with a server that really does it."""

    @pytest.mark.long
    @pytest.mark.parametrize(
        "failure",
        [
            {"closeConnection": True, "times": 3},
            {"errorCode": 91, "times": 1},
            {"writeConcernError": {"code": 64, "errmsg": "waiting for replication timed out"}, "times": 1},
        ],
        ids=["connection lost", "shutdown in progress", "no majority in time"],
    )
    def test_passing(self, plain: Ground, failpoint: Failpoint, failure: dict[str, Any]) -> None:
        """Sent again; granted once."""
        id_ = plain.add(1)
        failpoint("findAndModify", **failure)
        held = plain.lock.acquire((id_, 1), "exporting")
        assert plain.read(id_, "version") == held.version == 2

    def test_refused(self, plain: Ground, failpoint: Failpoint) -> None:
        """A refusal is raised at once, in our own words, and quotes no command."""
        id_ = plain.add(1)
        failpoint("findAndModify", errorCode=13)
        with pytest.raises(LockBackendFailed, match="may not do this") as caught:
            plain.lock.acquire((id_, 1), "exporting", owner="a-secret-owner")
        assert not caught.value.passing
        assert "secret" not in str(caught.value.__cause__)
        assert plain.read(id_, "version") == 1

    @pytest.mark.long
    def test_held_up(self, make: Callable[..., Ground], failpoint: Failpoint) -> None:
        """A server that is too slow is waited for twice, each time for `timeout`; and nothing is held afterwards."""
        ground = make(timeout=0.3)
        id_ = ground.add(1)
        failpoint("findAndModify", times=2, blockConnection=True, blockTimeMS=700)
        started = time.monotonic()
        with pytest.raises(LockBackendFailed, match="did not answer"):
            ground.lock.acquire((id_, 1), "exporting")
        assert time.monotonic() - started < 20
        assert eventually(lambda: ground.read(id_, "holder") is None and _settles(ground, id_), 15)

    @pytest.mark.long
    def test_away(self, forget: None) -> None:
        """Bounded, and without the password."""
        from pymongo import MongoClient

        client: MongoClient[Document] = MongoClient(NOBODY)
        lock = DocumentLock[Document](
            client["x"]["y"], **USUAL, pending=PENDING, final=FINAL, stale_after=1, name="away", timeout=0.2
        )
        with pytest.raises(LockBackendFailed, match="did not answer") as caught:
            lock.acquire(("x", 1), "exporting")
        assert "hunter2" not in str(caught.value)
        client.close()


def _settles(ground: Ground, id_: Any) -> bool:
    """Is nothing on its way any more that would take it?"""
    time.sleep(0.2)
    return ground.read(id_, "state") in (None, "failed")


class TestInterrupted:
    """Cancelled or struck by a signal while the command is under way: released in the background."""

    @pytest.mark.long
    def test_cancelled(self, plain: Ground, failpoint: Failpoint) -> None:
        """A coroutine that is cancelled holds nothing, although its command goes on."""
        id_ = plain.add(1)
        failpoint("findAndModify", times=1, blockConnection=True, blockTimeMS=400)

        async def cancel() -> None:
            task = asyncio.create_task(plain.lock.aacquire((id_, 1), "exporting"))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancel())
        assert eventually(lambda: plain.read(id_, "state", "holder", "version") == ("failed", None, 2))

    @pytest.mark.long
    def test_signal(self, plain: Ground, failpoint: Failpoint) -> None:
        """What a signal handler raises in the main thread does not strike inside the driver."""
        assert threading.current_thread() is threading.main_thread()

        class StruckError(Exception):
            pass

        def strike(*arguments: object) -> None:
            raise StruckError

        id_ = plain.add(1)
        failpoint("findAndModify", times=1, blockConnection=True, blockTimeMS=400)
        before = signal.signal(signal.SIGALRM, strike)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.15)
            with pytest.raises(StruckError):
                plain.lock.acquire((id_, 1), "exporting")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert eventually(lambda: plain.read(id_, "state", "holder", "version") == ("failed", None, 2))

    def test_between_two_lines_of_the_runner(self, plain: Ground) -> None:
        """What was granted is released, too, if the answer never comes back to the steps."""
        id_ = plain.add(1)
        sender = Sender(plain.collection, 5)
        context = Context(make_source(plain.collection, None), plain.lock.rules, sender)
        steps = acquire(context, Acquisition("me", new_attempt()), Request(id_, 1, "exporting"))
        command = next(steps)
        assert not isinstance(command, Pause)
        assert sender.send(command) is not None
        assert plain.read(id_, "state", "holder") == ("exporting", "me")
        steps.close()
        assert eventually(lambda: plain.read(id_, "state", "holder") == ("failed", None))

    def test_commands_of_the_main_thread_are_sent_by_another(
        self, plain: Ground, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The connections of the driver do not survive what a signal handler raises in the middle of a command."""
        threads: set[threading.Thread] = set()
        send = Sender.send

        def note(sender: Sender, command: Any, *left: float) -> Any:
            threads.add(threading.current_thread())
            return send(sender, command, *left)

        monkeypatch.setattr(Sender, "send", note)
        with plain.lock.hold((plain.add(1), 1), "exporting", final="exported"):
            pass
        assert threads
        assert threading.main_thread() not in threads

    def test_cancelled_while_it_finishes(self, plain: Ground, failpoint: Failpoint) -> None:
        """Nothing stays pending, though the command was not carried out, and no coroutine is there to hear that."""
        id_ = plain.add(1)

        async def cancel() -> None:
            async def work() -> None:
                async with plain.lock.hold((id_, 1), "exporting", final="exported"):
                    failpoint("findAndModify", times=1, blockConnection=True, blockTimeMS=400, errorCode=112)

            task = asyncio.create_task(work())
            assert await asyncio.to_thread(eventually, lambda: plain.read(id_, "state") == "exporting")
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancel())
        assert eventually(lambda: plain.read(id_, "state", "holder") == ("failed", None))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own(make: Callable[..., Ground]) -> None:
    """The sending threads of the parent do not exist in the child, which would wait for them for ever."""
    ground = make("model")
    with ground.lock.hold((ground.add(1), 1), "exporting", final="exported"):
        pass
    id_ = ground.add(1)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # whatever the test runner has there: a child that hangs ends
        signal.alarm(20)
        try:
            with ground.lock.hold((id_, 1), "exporting", final="withdrawn"):
                pass
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert ground.read(id_, "state") == "withdrawn"
