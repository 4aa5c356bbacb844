"""F82 to F88: every exit hands over what it leaves, within one bound; and what is not known is not denied."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from bson import Int64
from django.db import transaction
from pymongo import helpers_shared
from pymongo.errors import OperationFailure

from django_mongolock import (
    DocumentChanged,
    DocumentHeld,
    DocumentLockLost,
    DocumentRefused,
    LockBackendFailed,
)
from django_mongolock.backends import transactions
from django_mongolock.documents import sender
from django_mongolock.documents.commands import refusal_of
from django_mongolock.documents.sender import Sender
from tests.documents.conftest import Ground
from tests.documents.test_holding import awaiting, blocking
from tests.support.lock_fixtures import WITH_MONGO
from tests.support.waiting import eventually

pytestmark = WITH_MONGO
Call = Callable[..., Any]
PRICES = {"price": {"$gt": 0}}


@pytest.fixture(params=[blocking, awaiting])
def call(request: pytest.FixtureRequest) -> Call:
    """Each method in both of its faces."""
    face: Call = request.param
    return face


class Striking:
    """Raises an error in place of the answer to the commands of these numbers, or of these and all later ones; the
    commands are carried out, unless they are *lost*."""

    def __init__(
        self,
        ground: Ground,
        monkeypatch: pytest.MonkeyPatch,
        *numbers: int,
        error: BaseException | None = None,
        rest: bool = False,
        lost: bool = False,
    ) -> None:
        self.calls = 0
        self.over = False
        send = Sender.send

        def strike(sender: Sender, command: Any, *left: float) -> Any:
            if sender._collection.name != ground.collection.name:
                return send(sender, command, *left)  # what another test has left to the background
            self.calls += 1
            strikes = not self.over and (self.calls in numbers or (rest and self.calls >= max(numbers)))
            answer = None if strikes and lost else send(sender, command, *left)
            if strikes:
                raise error or LockBackendFailed("MongoDB did not answer")
            return answer

        monkeypatch.setattr(Sender, "send", strike)


def states(ground: Ground, ids: list[Any]) -> list[tuple[Any, Any]]:
    return [ground.read(id_, "state", "holder") for id_ in ids]


def check_prices(ground: Ground) -> None:
    """From now on, the server refuses documents whose price is not above 0."""
    database, name = ground.collection.database, ground.collection.name
    database.command("collMod", name, validator=PRICES, validationLevel="strict")


class TestAcquireMany:
    """What was granted when it ends early is put back."""

    @pytest.mark.parametrize("number", range(1, 6))
    @pytest.mark.parametrize(
        "error", [LockBackendFailed("away"), KeyboardInterrupt()], ids=lambda error: type(error).__name__
    )
    def test_every_step(
        self, plain: Ground, call: Call, monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException
    ) -> None:
        """F82: at whichever command it ends, that of an earlier 500 or the reading of why others were refused."""
        monkeypatch.setattr("django_mongolock.documents.acquiring.BATCH", 3)
        ids = [plain.add(1) for _ in range(4)]
        ids.insert(1, plain.add(1, holder="other", state="exporting"))
        striking = Striking(plain, monkeypatch, number, error=error, rest=isinstance(error, LockBackendFailed))
        with pytest.raises(type(error)):
            call(plain.lock, "acquire_many", [(id_, 1) for id_ in ids], "exporting")
        striking.over = True
        taken = [id_ for id_ in ids if plain.read(id_, "version") == 2]
        assert eventually(lambda: all(state == ("failed", None) for state in states(plain, taken)), 15)
        assert plain.read(ids[1], "state", "holder") == ("exporting", "other")
        assert eventually(lambda: not any(holder not in (None, "other") for _, holder in states(plain, ids)), 15)

    def test_one_that_is_refused(self, plain: Ground, call: Call) -> None:
        """F82: by a validator or a unique index: it has an error of its own, and the others are granted."""
        ids = [plain.add(1, price=number) for number in range(5)]
        check_prices(plain)
        batch = call(plain.lock, "acquire_many", [(id_, 1) for id_ in ids], "exporting", final="exported")
        assert {held.id for held in batch} == set(ids[1:])
        assert isinstance(batch.refused[ids[0]], DocumentRefused)
        assert "DocumentValidationFailure" in str(batch.refused[ids[0]])
        call(batch, "__exit__", None, None, None)
        assert states(plain, ids) == [(None, None), *[("exported", None)] * 4]
        plain.collection.create_index("code", unique=True, sparse=True)
        batch = call(plain.lock, "acquire_many", [(id_, 2) for id_ in ids[1:]], "exporting", changes={"code": 7})
        assert (len(batch), len(batch.refused)) == (1, 3)
        call(batch, "__exit__", KeyError, KeyError(), None)
        assert plain.collection.count_documents({"exportStatus": "exporting"}) == 0

    def test_one_document_that_is_refused(self, plain: Ground, call: Call) -> None:
        """The same error for a single document: acquired, updated or finished. It stays held, and can be failed."""
        id_ = plain.add(1, price=5)
        check_prices(plain)
        with pytest.raises(DocumentRefused, match="code 121"):
            call(plain.lock, "acquire", (id_, 1), "exporting", changes={"price": 0})
        held = call(plain.lock, "acquire", (id_, 1), "exporting")
        for name, arguments in (("update", ({"price": 0},)), ("finish", ("exported", {"price": 0}))):
            with pytest.raises(DocumentRefused):
                call(held, name, *arguments)
        call(held, "update", {"price": 6})
        assert call(held, "fail")
        assert plain.read(id_, "state", "version", "price") == ("failed", 3, 6)

    def test_a_refused_write_leaves_no_doubt(self, plain: Ground, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        """It was certainly not done: the end of the block is written at once, and not left to the background."""
        id_ = plain.add(1, price=5)
        check_prices(plain)
        held = call(plain.lock, "acquire", (id_, 1), "exporting")
        with pytest.raises(DocumentRefused):
            call(held, "update", {"price": 0})
        monkeypatch.setattr(Sender, "send_in_background", lambda *_: pytest.fail("left to the background"))
        call(held, "__exit__", KeyError, KeyError(), None)
        assert plain.read(id_, "state", "holder") == ("failed", None)


class TestCodes:
    """What the server says about a document is told from what it says about itself."""

    def test_of_the_server(self) -> None:
        """F82: all codes after which the driver tries again, and others of MongoDB's list that pass."""
        others = {24, 50, 112, 290, 365, 462, 10058, 13388, 14031}
        for code in {*helpers_shared._RETRYABLE_ERROR_CODES, *others}:
            assert refusal_of(OperationFailure("", code)) is None, code

    @pytest.mark.parametrize("code", [2, 28, 121, 11000, 17419])
    def test_of_the_document(self, code: int) -> None:
        """F82: a validator, a unique index, a path without fields, or a document that becomes too large."""
        found = refusal_of(OperationFailure("", code))
        assert found
        assert found.code == code

    @pytest.mark.parametrize("code", [112, 365, 14031])
    def test_nothing_is_refused(self, plain: Ground, failpoint: Call, code: int) -> None:
        """F82: a conflict, or a server without room, is no refusal of the document."""
        id_ = plain.add(1)
        failpoint("findAndModify", errorCode=code)
        with pytest.raises(LockBackendFailed, match=str(code)):
            plain.lock.acquire((id_, 1), "exporting")


class TestBatch:
    """The end of a batch is a few commands, however many documents are left; and is waited for once."""

    @pytest.mark.long
    @pytest.mark.parametrize(("error", "state"), [(None, "exported"), (KeyError(), "failed")], ids=["well", "failed"])
    def test_few_commands(
        self, plain: Ground, call: Call, monkeypatch: pytest.MonkeyPatch, error: Exception | None, state: str
    ) -> None:
        """F82, F84: one command for hundreds; here for 50."""
        monkeypatch.setattr("django_mongolock.documents.batch.BATCH", 50)
        ids = [plain.add(1) for _ in range(70)]
        batch = plain.lock.acquire_many([(id_, 1) for id_ in ids], "exporting", final="exported")
        striking = Striking(plain, monkeypatch)
        call(batch, "__exit__", type(error) if error else None, error, None)
        assert striking.calls == 2
        assert plain.collection.count_documents({"exportStatus": state, "lockedBy": None}) == 70

    @pytest.mark.parametrize("lost", [True, False], ids=["not done", "done"])
    def test_away(self, plain: Ground, call: Call, monkeypatch: pytest.MonkeyPatch, *, lost: bool) -> None:
        """F84: MongoDB is away: two sendings for all documents together, then the background."""
        ids = [plain.add(1) for _ in range(10)]
        batch = plain.lock.acquire_many([(id_, 1) for id_ in ids], "exporting", final="exported")
        striking = Striking(plain, monkeypatch, 1, rest=True, lost=lost)
        before = striking.calls
        with pytest.raises(LockBackendFailed):
            call(batch, "__exit__", None, None, None)
        striking.over = True
        assert striking.calls - before <= 3  # the third is the background's first
        expected = [("failed" if lost else "exported", None)] * 10
        assert eventually(lambda: states(plain, ids) == expected, 15)

    def test_interrupted(self, plain: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        """F82: Ctrl-C in the middle of the end: what is left is released all the same."""
        monkeypatch.setattr("django_mongolock.documents.batch.BATCH", 3)
        ids = [plain.add(1) for _ in range(10)]
        batch = plain.lock.acquire_many([(id_, 1) for id_ in ids], "exporting", final="exported")
        Striking(plain, monkeypatch, 2, error=KeyboardInterrupt(), lost=True)
        with pytest.raises(KeyboardInterrupt), batch:
            pass
        assert eventually(lambda: sorted(states(plain, ids)) == [("exported", None)] * 3 + [("failed", None)] * 7)

    def test_cancelled(self, plain: Ground, failpoint: Call) -> None:
        """F82: a coroutine that is cancelled at the end of its batch leaves nothing pending, though the command was not
        carried out."""
        ids = [plain.add(1) for _ in range(5)]

        async def work() -> None:
            async with await plain.lock.aacquire_many([(id_, 1) for id_ in ids], "exporting", final="exported"):
                failpoint("update", times=1, blockConnection=True, blockTimeMS=300, errorCode=112)

        async def cancel() -> None:
            task = asyncio.create_task(work())
            assert await asyncio.to_thread(eventually, lambda: plain.read(ids[0], "state") == "exporting")
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancel())
        assert eventually(lambda: states(plain, ids) == [("failed", None)] * 5, 15)

    def test_refused(self, plain: Ground, call: Call) -> None:
        """F82: a document that may not become final, fails; those after it are finished."""
        ids = [plain.add(1) for _ in range(3)]
        batch = plain.lock.acquire_many([(id_, 1) for id_ in ids], "exporting", final="exported")
        database, name = plain.collection.database, plain.collection.name
        no = {"$nor": [{"_id": ids[0], "exportStatus": "exported"}]}
        database.command("collMod", name, validator=no, validationLevel="strict")
        with pytest.raises(DocumentRefused):
            call(batch, "__exit__", None, None, None)
        assert states(plain, ids) == [("failed", None), ("exported", None), ("exported", None)]


class TestUnknownOutcomes:
    """A write whose answer was lost is recognised by its own id."""

    def test_finished_and_acquired(self, ground: Ground, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        """F85: it was written, then the next flow came: the error does not say that nothing was written."""
        id_ = ground.add(1)
        held = ground.lock.acquire((id_, 1), "exporting")
        send, calls = Sender.send, []

        def lose(sender: Sender, command: Any, *left: float) -> Any:
            calls.append(1)
            answer = send(sender, command, *left)
            if len(calls) == 1:
                ground.lock.acquire((id_, 3), "exporting", owner="next")
                raise LockBackendFailed("the answer was lost")
            return answer

        monkeypatch.setattr(Sender, "send", lose)
        with pytest.raises(DocumentLockLost, match="may have been done") as caught:
            call(held, "finish", "exported", {"price": 9})
        assert caught.value.maybe_written
        assert ground.read(id_, "holder", "price") == ("next", 9)

    def test_lost_for_certain(self, plain: Ground) -> None:
        """F85: where the first sending was answered, nothing was written, and the error says so."""
        held = plain.lock.acquire((plain.add(1), 1), "exporting")
        plain.change(held.id, holder="other")
        with pytest.raises(DocumentLockLost) as caught:
            held.finish("exported")
        assert not caught.value.maybe_written

    @pytest.mark.parametrize("lost", [True, False], ids=["not done", "done"])
    @pytest.mark.parametrize("then", ["update", "renew", "finish", "fail", "block"])
    def test_the_next_write(
        self, plain: Ground, call: Call, monkeypatch: pytest.MonkeyPatch, then: str, *, lost: bool
    ) -> None:
        """F88: after an update of unknown outcome the holder goes on, whether it was done or not."""
        held = plain.lock.acquire((plain.add(Int64(1)), 1), "exporting", final="exported")
        striking = Striking(plain, monkeypatch, 1, 2, lost=lost)
        with pytest.raises(LockBackendFailed):
            call(held, "update", {"price": 7})
        assert striking.calls == 2
        version = 2 if lost else 3
        arguments = {"update": ({"price": 8},), "finish": ("exported", {"price": 8})}.get(then, ())
        if then == "block":
            call(held, "__exit__", None, None, None)
        else:
            call(held, then, *arguments)
        written = bool(arguments)
        assert plain.read(held.id, "version") == version + written
        assert plain.read(held.id, "price") == (8 if written else 5 if lost else 7)
        if then in ("update", "renew"):
            assert held.version == version + written
            held.finish("exported")

    def test_a_copy_that_comes_late(self, plain: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        """F88: an update of unknown outcome does not take effect after the holder's next write."""
        held = plain.lock.acquire((plain.add(1), 1), "exporting")
        copies: list[Any] = []
        send = Sender.send

        def hold_up(sender: Sender, command: Any, *left: float) -> Any:
            copies.append(lambda: send(sender, command, *left))
            if len(copies) <= 2:
                raise LockBackendFailed("it is on its way")
            return send(sender, command, *left)

        monkeypatch.setattr(Sender, "send", hold_up)
        with pytest.raises(LockBackendFailed):
            held.update({"price": 7})
        held.update({"price": 8})
        assert copies[0]() is None
        held.finish("exported")
        before = plain.raw(held.id)
        for copy in copies:
            copy()
        assert plain.raw(held.id) == before

    def test_another_writer(self, plain: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        """F88: a writer without the lock is still noticed, though one's own version is uncertain."""
        held = plain.lock.acquire((plain.add(1), 1), "exporting")
        Striking(plain, monkeypatch, 1, 2, lost=True)
        with pytest.raises(LockBackendFailed):
            held.update({"price": 7})
        plain.change(held.id, version=3)  # as the update would have left it
        with pytest.raises(DocumentChanged):
            held.update({"price": 8})

    @pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
    def test_a_late_copy_after_a_refusal(self, plain: Ground, monkeypatch: pytest.MonkeyPatch, *, many: bool) -> None:
        """F82: an acquisition of which one copy was not answered, and another was refused, is put back, too."""
        id_ = plain.add(1, holder="other", state="exporting")
        copies: list[Any] = []
        send = Sender.send

        def hold_up(sender: Sender, command: Any, *left: float) -> Any:
            if not copies:
                copies.append(lambda: send(sender, command, *left))
                raise LockBackendFailed("it is on its way")
            return send(sender, command, *left)

        monkeypatch.setattr(Sender, "send", hold_up)
        if many:
            assert isinstance(plain.lock.acquire_many([(id_, 1)], "exporting").refused[id_], DocumentHeld)
        else:
            with pytest.raises(DocumentHeld):
                plain.lock.acquire((id_, 1), "exporting")
        plain.change(id_, holder=None, state="exported")
        copies[0]()
        assert plain.read(id_, "version") == 2
        assert eventually(lambda: plain.read(id_, "state", "holder") == ("failed", None), 15)


SCRIPT = """
import os, signal, sys, threading
from pymongo import MongoClient
import django
django.setup()
signal.signal(signal.SIGINT, signal.default_int_handler)
from django_mongolock import DocumentLock
collection = MongoClient(os.environ["MONGODB_URI"], appname=sys.argv[3])[sys.argv[1]][sys.argv[2]]
lock = DocumentLock(collection, state="exportStatus", pending={"exporting": "failed"}, final=["exported"],
                    stale_after=600)
documents = list(collection.find())
print(len(documents), flush=True)
sys.stdin.readline()
with lock.acquire_many(documents, "exporting") as batch:
    print("granted", flush=True)
    threading.Event().wait(60)
"""


@pytest.mark.long
@pytest.mark.parametrize("acquiring", [False, True], ids=["in the block", "while it acquires"])
def test_interrupted_process(plain: Ground, appname: str, failpoint: Call, *, acquiring: bool) -> None:
    """F82: Ctrl-C ends the program in the block of a batch, or before it knows what it was granted: when it is gone,
    the documents are released."""
    ids = [plain.add(1) for _ in range(40)]
    place = plain.collection.database.name, plain.collection.name, appname
    env = {**os.environ, "DJANGO_SETTINGS_MODULE": "testproject.settings"}
    argv = [sys.executable, "-c", SCRIPT, *place]
    program = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    assert program.stdin is not None
    assert program.stdout.readline() == "40\n"
    if acquiring:
        failpoint("find", times=1, blockConnection=True, blockTimeMS=3000)
    program.stdin.write("\n")
    program.stdin.flush()
    if acquiring:
        assert eventually(lambda: {state for state, _ in states(plain, ids)} == {"exporting"}, 30)
    else:
        assert program.stdout.readline() == "granted\n"
    program.send_signal(signal.SIGINT)
    program.communicate(timeout=30)
    assert states(plain, ids) == [("failed", None)] * 40


class TestOpenTransaction:
    """F90: a document that is released before the commit of what was written under it."""

    @pytest.fixture(autouse=True)
    def _again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(transactions, "_reported", set())

    @pytest.mark.django_db(databases=["default", "mongo"], transaction=True)
    def test_warning(self, plain: Ground) -> None:
        """A warning, once for each line, as for named locks; it names the line, and the cure."""
        ids = [plain.add(1) for _ in range(3)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for id_ in ids[:2]:
                with transaction.atomic(), plain.lock.hold((id_, 1), "exporting", final="exported"):
                    pass
            with plain.lock.hold((ids[2], 1), "exporting", final="exported"), transaction.atomic():
                pass
        (warning,) = [each for each in caught if each.category is RuntimeWarning]
        assert "transaction that is open on 'default'" in str(warning.message)
        assert "Open the transaction inside the block" in str(warning.message)
        assert warning.filename == __file__


def test_a_stuck_document_delays_no_other() -> None:
    """Rule 3: what is left to the background waits for nothing that does not end."""
    background, ends, done = sender.Background(), threading.Event(), threading.Event()

    def stuck() -> bool:
        return ends.wait(60)

    def free() -> bool:
        done.set()
        return True

    for attempt in (*[stuck] * 15, free):
        background.add(sender.Task("ads", attempt, (0.0, 0.1)))
    assert done.wait(20)
    ends.set()
    background.flush(20)
