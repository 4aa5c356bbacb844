"""The functions that retry_on_conflict runs again, and the functions that it refuses."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest
from asgiref.sync import async_to_sync, iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.contrib.auth.models import User
from django.db import DatabaseError, OperationalError, connections, transaction
from django.db.transaction import TransactionManagementError

from django_mongolock.exceptions import VersionConflict
from django_mongolock.versions import retry_on_conflict
from django_mongolock.versions.checking import all_or_nothing
from tests.support.programs import python
from tests.test_versions_databases import at_once
from tests.versioned.databases import db, home, postgres
from tests.versioned.shapes import Thing

__all__ = ["db", "home", "postgres"]

CONFLICT = VersionConflict("thing", 1, 1, 2)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the longest possible length of each pause. The pauses do not really wait."""
    limits: list[float] = []

    def most(low: float, high: float) -> float:
        assert low == 0
        limits.append(high)
        return 0.0

    monkeypatch.setattr("random.uniform", most)
    return limits


def failing(times: int, error: BaseException = CONFLICT) -> tuple[Callable[[], str], list[int]]:
    """Return a function that fails at first, and the list of its calls."""
    calls: list[int] = []

    def function() -> str:
        calls.append(1)
        if len(calls) <= times:
            raise error
        return "done"

    return function, calls


def test_it_runs_again_until_it_works(pauses: list[float]) -> None:
    """Pauses have a random length, up to a limit that doubles and is capped."""
    function, calls = failing(4)
    assert retry_on_conflict(function, backoff=0.1, longest=0.5)() == "done"
    assert len(calls) == 5
    assert pauses == [0.1, 0.2, 0.4, 0.5]


@pytest.mark.parametrize("error", [CONFLICT, OperationalError(1213, "Deadlock found")], ids=["version", "database"])
def test_it_gives_up(pauses: list[float], error: BaseException) -> None:
    """The last conflict, or error of the database, is raised as it is, with a note."""
    function, calls = failing(9, error)
    with pytest.raises(type(error)) as caught:
        retry_on_conflict(function, attempts=3)()
    assert len(calls) == 3
    assert caught.value.__notes__[-1] == "gave up after 3 attempts"


@pytest.mark.parametrize("error", [ValueError("no"), DatabaseError("no"), KeyboardInterrupt()])
@pytest.mark.parametrize("in_a_group", [False, True])
def test_other_errors_are_not_its_business(error: BaseException, in_a_group: bool) -> None:
    """Other errors are raised at once, also in a group with a conflict, because the other error may be the important
    one."""
    if in_a_group:
        error = BaseExceptionGroup("both", [CONFLICT, BaseExceptionGroup("in", [error])])
    function, calls = failing(9, error)
    with pytest.raises(type(error)):
        retry_on_conflict(function)()
    assert len(calls) == 1


async def test_coroutine_functions(pauses: list[float]) -> None:
    """`async def` works the same. The result stays a coroutine function, with its name and docstring."""
    function, calls = failing(2)

    @retry_on_conflict(attempts=3)
    async def work(word: str) -> str:
        """Doc."""
        return word + function()

    assert asyncio.iscoroutinefunction(work)
    assert (work.__name__, work.__doc__) == ("work", "Doc.")
    assert await work("all ") == "all done"
    assert len(calls) == 3
    with pytest.raises(VersionConflict):
        await retry_on_conflict(functools.partial(_raise), attempts=2)()


async def _raise() -> None:
    raise CONFLICT


async def test_what_is_marked_as_a_coroutine_function(pauses: list[float]) -> None:
    """A callable may be marked as a coroutine function, as asgiref and Django do. The attempt ends with the coroutine,
    not with the call."""
    function, calls = failing(2)

    class Work:
        async def __call__(self) -> str:
            return function()

    marked = markcoroutinefunction(Work())
    assert await retry_on_conflict(marked)() == "done"
    assert iscoroutinefunction(retry_on_conflict(marked))
    function, _ = failing(2)
    assert await retry_on_conflict(sync_to_async(function, thread_sensitive=False))() == "done"
    assert len(calls) == 3


def returns_a_coroutine() -> Coroutine[Any, Any, None]:
    return _raise()


def test_a_function_that_returns_a_coroutine_is_refused() -> None:
    """The conflicts of such a coroutine would come after the attempt."""
    with pytest.raises(TypeError, match="put retry_on_conflict on `async def`"):
        retry_on_conflict(returns_a_coroutine)()  # type: ignore[unused-coroutine]


async def test_conflicts_in_a_task_group(pauses: list[float]) -> None:
    """A TaskGroup raises a group. The group is retried if it has only conflicts, however deep."""
    calls = []

    @retry_on_conflict(attempts=3)
    async def work() -> str:
        calls.append(1)
        if len(calls) < 3:
            async with asyncio.TaskGroup() as outer:
                outer.create_task(in_a_group())
        return "done"

    async def in_a_group() -> None:
        async with asyncio.TaskGroup() as inner:
            inner.create_task(_raise())

    assert await work() == "done"
    assert len(calls) == 3


async def test_a_cancelled_pause() -> None:
    """Cancelling ends the wait between two attempts."""
    task = asyncio.create_task(retry_on_conflict(_raise, backoff=60, longest=60)())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_generators_are_refused() -> None:
    """Yielded values cannot be taken back. Generators are refused at decoration."""

    def numbers() -> Iterator[int]:
        yield 1

    async def anumbers() -> AsyncIterator[int]:
        yield 1

    for function in (numbers, anumbers, functools.partial(numbers)):
        with pytest.raises(TypeError, match=r"cannot run .*numbers.* again: what a generator has yielded"):
            retry_on_conflict(function)
    with pytest.raises(TypeError, match="needs a function, not 5"):
        retry_on_conflict(5)  # type: ignore[call-overload]


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"backoff": -1}, {"longest": -0.1}])
def test_wrong_numbers(wrong: dict[str, Any]) -> None:
    """A wrong number is a clear error at decoration."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        retry_on_conflict(**wrong)
    with pytest.raises(TypeError, match=r"'retries'.* Known: attempts, backoff, longest, using"):
        retry_on_conflict(retries=3)  # type: ignore[call-overload]


class TestTransactions:
    """Inside of an open transaction a second run is useless."""

    @pytest.mark.long
    def test_refused(self, db: str) -> None:
        """The refusal comes at once, not at the first conflict, on each database."""
        function, calls = failing(0)
        with all_or_nothing(db):
            Thing.objects.exists()
            with pytest.raises(TransactionManagementError, match=f"open on '{db}'.*inside the retried code"):
                retry_on_conflict(function)()
            with pytest.raises(TransactionManagementError):
                retry_on_conflict(function, using=db)()
            assert not calls
            assert retry_on_conflict(function, using="default")() == "done"
        assert retry_on_conflict(function)() == "done"

    @pytest.mark.parametrize("home", ["mongo"], indirect=True)
    def test_what_is_none(self, db: str) -> None:
        """Django's atomic() does nothing on MongoDB, and a second run sees the cause of the conflict."""
        function, calls = failing(1)
        with transaction.atomic(using=db):
            assert retry_on_conflict(function, using=db)() == "done"
        assert len(calls) == 2

    def test_refused_in_coroutines(self, db: str) -> None:
        """A coroutine called inside of a transaction is refused, too."""

        async def work() -> None: ...

        with all_or_nothing(db):
            Thing.objects.exists()
            with pytest.raises(TransactionManagementError):
                async_to_sync(retry_on_conflict(work))()
        async_to_sync(retry_on_conflict(work))()

    def test_a_transaction_inside(self, db: str) -> None:
        """Each attempt has its own transaction. The writes of the lost one are gone."""
        made = Thing.objects.create(title="a")
        calls: list[int] = []

        @retry_on_conflict
        def work() -> None:
            late = Thing.objects.get(pk=made.pk)
            if not calls:
                Thing.objects.get(pk=made.pk).save()
            calls.append(1)
            with all_or_nothing(db):
                Thing.objects.create(title="b")
                late.save()

        work()
        assert (len(calls), Thing.objects.count()) == (2, 2)

    @pytest.mark.parametrize("in_a_group", [False, True])
    def test_an_error_after_the_commit(self, db: str, in_a_group: bool) -> None:
        """F124: A committed function is not repeated after an error of an `on_commit` function."""

        @retry_on_conflict
        def work() -> None:
            with all_or_nothing(db):
                Thing.objects.create(title="a")
                connections[db].on_commit(fail)

        def fail() -> None:
            conflict = VersionConflict("thing", 1, 1, 2)
            raise ExceptionGroup("tasks", [conflict]) if in_a_group else conflict

        with pytest.raises((VersionConflict, ExceptionGroup)):
            work()
        assert Thing.objects.count() == 1

    def test_a_conflict_in_a_function_of_on_commit(self, db: str) -> None:
        """F124: A function of `on_commit` may itself be retried, like any other function."""
        function, calls = failing(1, VersionConflict("thing", 1, 1, 2))
        with all_or_nothing(db):
            connections[db].on_commit(retry_on_conflict(function))
        assert len(calls) == 2

    @pytest.mark.django_db
    def test_the_transaction_around_a_test_does_not_count(self) -> None:
        """As for durable atomic blocks, the transaction around a test does not count. A block inside of it does."""
        function, _ = failing(1)
        assert connections["default"].in_atomic_block
        User.objects.create_user("somebody")
        assert retry_on_conflict(function)() == "done"
        with transaction.atomic(), pytest.raises(TransactionManagementError):
            retry_on_conflict(function)()


class TestIsolation:
    """If the database itself detects a faster writer, the error is a VersionConflict as well."""

    def test_repeatable_read(self, db: str) -> None:
        """PostgreSQL reports 40001, SQLite BUSY_SNAPSHOT, and MongoDB WriteConflict, each after a read in the
        transaction."""
        made = Thing.objects.create(title="a")

        def overtaken(write: Callable[[Thing], Any]) -> None:
            with all_or_nothing(db):
                if connections[db].vendor == "postgresql":
                    connections[db].cursor().execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                late = Thing.objects.get(pk=made.pk)
                at_once(lambda: Thing.objects.get(pk=made.pk).save())
                write(late)

        with pytest.raises(VersionConflict, match="another transaction was faster: read in version 1") as caught:
            overtaken(Thing.save)
        assert caught.value.__cause__ is not None
        with pytest.raises(VersionConflict):
            overtaken(Thing.delete)
        assert Thing.objects.get().version == 3


@pytest.mark.long
def test_versions_need_neither_the_app_nor_its_settings() -> None:
    """A project without MongoDB may use them: VersionedModel on SQLite, without MONGOLOCK."""
    script = """
import django
from django.conf import settings
settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}})
django.setup()
from django.db import connection, models
from django_mongolock.versions import VersionConflict, VersionedModel, retry_on_conflict

class Rate(VersionedModel):
    value = models.IntegerField()
    class Meta(VersionedModel.Meta):
        app_label = "mine"

with connection.schema_editor() as editor:
    editor.create_model(Rate)
rate, late = Rate.objects.create(value=1), Rate.objects.get()
rate.save()
try:
    late.save()
except VersionConflict as error:
    print(error)
"""
    said = "mine.Rate 1 was not written, it was changed meanwhile: read in version 1, stored in version 2\n"
    assert python("-c", script) == said


def test_an_alias_that_there_is_not_is_told() -> None:
    """A mistyped using= would switch off the guard against open transactions."""

    @retry_on_conflict(using="nope")
    def work() -> None: ...

    with pytest.raises(ValueError, match="'nope' is no alias of DATABASES"):
        work()
