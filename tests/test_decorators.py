"""`mongo_locked` on every kind of callable except views and tasks. Views are in test_views, and tasks are in
tests/celery."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import inspect
import logging
import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from django_mongolock import SKIPPED, LockNotAcquired, mongo_lock, mongo_locked
from django_mongolock.exceptions import LockReentry
from testproject.shop.models import Order
from tests.support.looking import held_elsewhere, holder, holders


@mongo_locked("plain:{name}")
def plain(name: str, extra: int = 0) -> tuple[str, int]:
    """Its own docstring."""
    return name, extra


@mongo_locked("coroutine:{name}")
async def coroutine(name: str) -> None: ...


@mongo_locked("generator:{name}")
def generator(name: str) -> Iterator[str]:
    yield name


@mongo_locked("agenerator:{name}")
async def agenerator(name: str) -> AsyncIterator[str]:
    yield name


class Till:
    def __init__(self, number: str) -> None:
        self.number = number

    @mongo_locked("till:{self.number}")
    def method(self) -> int:
        return len(holders(f"till:{self.number}"))

    @staticmethod
    @mongo_locked("static:{name}")
    def static(name: str) -> None: ...

    def where(self) -> list[dict[str, Any]]:
        return holders(f"{__name__}.Till.where")


class TestCallables:
    """Cases that are no cell of tests/test_contention_policies.py. The body of every kind runs there under its lock."""

    def test_generator_is_still_one(self, name: str) -> None:
        """Sent, thrown and returned values go through, and @contextmanager works on top."""

        @mongo_locked("echo:{name}")
        def echo(name: str) -> Any:
            try:
                sent = yield "first"
            except KeyError as error:
                sent = error
            yield sent
            return "returned"

        items = echo(name)
        next(items)
        assert items.send("there") == "there"
        with pytest.raises(StopIteration, match="returned"):
            next(items)
        with pytest.raises(RuntimeError, match="didn't stop after throw"), contextlib.contextmanager(echo)(name):
            raise KeyError(name)
        assert holders(f"echo:{name}") == []

    async def test_async_generator_is_still_one(self, name: str) -> None:
        """An async generator stays one as well. If it is closed early, its own cleanup runs under the lock."""
        cleaned: list[int] = []

        @mongo_locked("aecho:{name}")
        async def echo(name: str) -> Any:
            try:
                yield (yield "first")
            except KeyError as error:
                yield error
            finally:
                cleaned.append(len(holders(f"aecho:{name}")))

        items = echo(name)
        await anext(items)
        assert await items.asend("there") == "there"
        assert isinstance(await items.athrow(KeyError(name)), KeyError)
        await items.aclose()
        assert (cleaned, holders(f"aecho:{name}")) == ([1], [])

    def test_bound_method_and_partial(self, name: str) -> None:
        """Bound methods and partials can be decorated where they are used. Their names make keys, too."""
        locked = mongo_locked("bound:{extra}")(functools.partial(plain, name))
        assert locked(extra=2)[1] == 2
        where: Any = mongo_locked()(functools.partial(Till(name).where))()
        assert len(where) == 1
        assert where[0]["label"] == f"{__name__}.Till.where"

    def test_callable_object(self, name: str) -> None:
        class Job:
            def __call__(self, name: str) -> int:
                return len(holders(f"object:{name}"))

        assert mongo_locked("object:{name}")(Job())(name) == 1
        assert mongo_locked()(Job())(name) == 0

    @pytest.mark.parametrize("function", [plain, coroutine, generator, agenerator, Till.method, Till.static])
    def test_looks_like_itself(self, function: Any) -> None:
        """The name, module, docstring, signature and kind stay those of the function."""
        inner = function.__wrapped__
        assert function.__name__ == inner.__name__
        assert function.__qualname__ == inner.__qualname__
        assert function.__module__ == __name__
        assert function.__doc__ == inner.__doc__
        assert inspect.signature(function) == inspect.signature(inner, eval_str=True)
        for kind in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
            assert kind(function) == kind(inner)

    def test_pickled(self) -> None:
        """A decorated function of a module can be sent to another process."""
        assert pickle.loads(pickle.dumps(plain)) is plain  # noqa: S301 - our own


class TestKeys:
    def test_callable(self, name: str) -> None:
        """``key=`` takes the arguments of the call and returns a key, or a model instance."""

        @mongo_locked(key=lambda name, times=1: f"by:{name}:{times}")
        def by_text(name: str, times: int = 1) -> int:
            return len(holders(f"by:{name}:{times}"))

        @mongo_locked(key=lambda order: order)
        def by_instance(order: Order) -> int:
            return len(holders(f"shop.order:{order.pk}"))

        assert by_text(name) == by_text(name, times=2) == by_instance(Order(pk=int(name[:12], 16))) == 1

    def test_options(self, name: str) -> None:
        """Options go to the lock. The function's name is the default label."""

        @mongo_locked("options:{name}", lease=44, owner="me", label="mine")
        def work(name: str) -> dict[str, Any]:
            return holder(f"options:{name}")

        found = work(name)
        assert (found["lease"], found["owner"], found["label"]) == (44_000, "me", "mine")
        assert mongo_locked("label:{name}")(find)(name)["label"] == f"{__name__}.find"


def find(name: str) -> dict[str, Any]:
    return holder(f"label:{name}")


class TestContention:
    """The outcome of a call when the lock is busy. The body never runs."""

    def test_skip(self, name: str, caplog: pytest.LogCaptureFixture) -> None:
        """The call returns SKIPPED, a false value, and logs a line. Skipped work is visible."""
        work = mongo_locked("busy:{name}", wait=0, on_contention="skip")(lambda name: "ran")
        with caplog.at_level(logging.INFO, "django_mongolock"), held_elsewhere(f"busy:{name}", lease=20):
            assert not work(name)
        assert f"skipped, the lock is busy key=busy:{name}" in caplog.text

    def test_async_callable_for_a_function(self) -> None:
        """A plain function cannot have an async callable, because nobody would await it."""

        async def later(error: LockNotAcquired) -> None: ...

        with pytest.raises(TypeError, match=r"on_contention is async, but .*\.plain is not"):
            mongo_locked("key", on_contention=later)(plain)

    @pytest.mark.parametrize("policy", ["wait", "", None, 5])
    def test_unknown_policy(self, policy: Any) -> None:
        """An unknown policy is refused with a list of the existing ones."""
        with pytest.raises(ValueError, match="on_contention is one of 'raise', 'skip', 'respond', 'retry'"):
            mongo_locked("key", on_contention=policy)

    @pytest.mark.parametrize("policy", ["skip", "retry", lambda error, name: None])
    def test_reentry(self, name: str, policy: Any) -> None:
        """A lock that the same thread holds is a mistake in the code, whatever the policy on contention."""

        @mongo_locked("again:{name}", on_contention=policy)
        def work(name: str) -> None: ...

        with mongo_lock(f"again:{name}"), pytest.raises(LockReentry):
            work(name)


class TestSkipped:
    def test_stays_itself(self) -> None:
        """SKIPPED exists once, also after copying and pickling (results travel between processes)."""
        assert pickle.loads(pickle.dumps(SKIPPED)) is SKIPPED  # noqa: S301 - our own
        assert copy.deepcopy(SKIPPED) is SKIPPED
        assert repr(SKIPPED) == "SKIPPED"


#: An untyped alias for calls that type checkers refuse.
any_locked: Any = mongo_locked
app: Any = Celery("decorators", broker="memory://", set_as_current=False)


class TestRefused:
    """Decorations that cannot work are refused at once, with a message that names the cure."""

    @pytest.mark.parametrize(
        ("decorate", "problem"),
        [
            (lambda: mongo_locked("key")(Till), "functions, methods and view classes, not on Till"),
            (lambda: any_locked(lambda name: f"x:{name}"), "lambda as key="),
            (lambda: any_locked(key="order:{order_id}"), "pass a template without key="),
            (lambda: mongo_locked(key=coroutine), "not async"),
            (lambda: any_locked("key", key=lambda: "key"), "either templates or key="),
            (lambda: any_locked(5)(plain), "must be a str, not int"),
            (lambda: mongo_locked("")(plain), "must not be empty"),
            (lambda: mongo_locked("{name}{name}")(plain), "put one of"),
            (lambda: mongo_locked("x:{nam}")(plain), "has no parameter nam; it has name, extra"),
            (lambda: mongo_locked()(app.task(find, shared=False)), "below the decorator that makes the Celery task"),
            (lambda: any_locked()(classmethod(plain)), "on a function, not on a classmethod: put it below"),  # type: ignore[arg-type]
            (lambda: any_locked()(staticmethod(plain)), "on a function, not on a staticmethod: put it below"),
            (lambda: any_locked()(property(plain)), "on a function, not on a property: put it below"),
        ],
    )
    def test_arguments(self, decorate: Callable[[], Any], problem: str) -> None:
        """Wrong arguments are errors at import, not at the first call."""
        with pytest.raises((TypeError, ValueError), match=problem):
            decorate()

    def test_unfinished_result(self, name: str) -> None:
        """A function may return work that is still to be done, and do it without the lock. The result is an error."""
        made: dict[str, Callable[[str], Any]] = {
            "coroutine": coroutine,
            "generator": generator,
            "async_generator": agenerator,
            "_GeneratorContextManager": contextlib.contextmanager(generator),
            "_AsyncGeneratorContextManager": contextlib.asynccontextmanager(agenerator),
        }
        for kind, make in made.items():
            locked: Any = mongo_locked(f"unfinished:{name}")(lambda make=make: make(name))
            with pytest.raises(TypeError, match=f"returned a {kind}, which would run without the lock"):
                locked()

            async def amake(make: Any = make) -> Any:
                return make(name)

            with pytest.raises(TypeError, match=f"returned a {kind}, which would run without the lock"):
                asyncio.run(mongo_locked(f"unfinished:{name}")(amake)())
        assert holders(f"unfinished:{name}") == []


def test_celery_refuses_wrong_arguments_where_the_task_is_sent() -> None:
    """A locked task refuses wrong arguments like every task, because the lock does not hide the signature."""

    @app.task(shared=False)  # type: ignore[untyped-decorator]
    @mongo_locked("ad:{ad_id}")
    def export_ad(ad_id: int) -> int:
        return ad_id

    for wrong in [(), (1, 2)]:
        with pytest.raises(TypeError):
            export_ad.delay(*wrong)
