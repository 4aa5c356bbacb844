"""CPython's tests of locks, on MongoDB and in memory. Those that do not apply are in exempt.py."""

from __future__ import annotations

import contextlib
import itertools
import unittest
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Final

import pytest

from django_mongolock import locks
from django_mongolock.testing import override_locks

from .exempt import EXEMPT, NOT_RUN
from .processes import close_all

pytestmark = pytest.mark.long
BACKENDS: Final = ("mongo", "memory")
SUITES: Final = ("threading", "asyncio")

#: Tests that are to fail may do so in a thread.
IN_THREADS: Final = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


def adapter(suite: str) -> Any:
    """Our locks, and the suite for them. Raises ImportError."""
    return import_module(f".{suite}_locks", __package__)


def names(suite: str) -> Iterator[str]:
    """The tests of a suite that are about locks."""
    for name, case in adapter(suite).cases().items():
        for method in unittest.defaultTestLoader.getTestCaseNames(case):
            yield f"{suite}.{name}.{method}"


def reason_of(backend: str, name: str, table: Mapping[str, str] = EXEMPT) -> str | None:
    """Why this test does not apply; None if it does."""
    return table.get(name) or table.get(f"{backend}-{name}")


def found() -> dict[str, list[str]]:
    tests: dict[str, list[str]] = {}
    for suite in SUITES:
        with contextlib.suppress(ImportError):
            tests[suite] = list(names(suite))
    return tests


FOUND: Final = found()


def parameters(*, exempt: bool) -> Iterator[Any]:
    """The tests of all suites that apply, or those that do not; on both backends."""
    for suite in SUITES:
        if suite not in FOUND:
            yield pytest.param("mongo", suite, marks=pytest.mark.skip(reason="needs the tests of Python"))
        for backend, name in itertools.product(BACKENDS, FOUND.get(suite, ())):
            if not reason_of(backend, name, NOT_RUN) and bool(reason_of(backend, name)) == exempt:
                yield pytest.param(backend, name, id=f"{backend}-{name}")


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "memory":
        with override_locks():
            yield request.param
            close_all()
    else:
        yield request.param
        close_all()


@pytest.fixture
def prepared(backend: str, name: str, monkeypatch: pytest.MonkeyPatch) -> unittest.TestCase:
    suite, case, method = name.split(".")
    found = adapter(suite)
    found.prepare(monkeypatch, exempt=reason_of(backend, name) is not None)
    test: unittest.TestCase = found.cases()[case](method)
    return test


def problems(test: unittest.TestCase) -> list[str]:
    """Run it as its own project would; return what went wrong."""
    result = unittest.TestResult()
    test.run(result)
    for _, reason in result.skipped:
        pytest.skip(reason)
    return [trace for _, trace in (*result.errors, *result.failures)]


@pytest.mark.parametrize(("backend", "name"), [*parameters(exempt=False)], indirect=["backend"])
def test_what_applies(prepared: unittest.TestCase) -> None:
    """What another project expects of a lock, ours does."""
    if found := problems(prepared):
        pytest.fail("\n".join(found), pytrace=False)


@IN_THREADS
@pytest.mark.parametrize(("backend", "name"), [*parameters(exempt=True)], indirect=["backend"])
def test_what_does_not_apply(prepared: unittest.TestCase, backend: str, name: str) -> None:
    """No exemption is dead: a test that is exempt fails."""
    assert problems(prepared), f"it passes: take it out of exempt.py ({reason_of(backend, name)})"


def test_every_exemption_is_for_a_test() -> None:
    known = {f"{prefix}{name}" for name in itertools.chain(*FOUND.values()) for prefix in ("", "mongo-", "memory-")}
    exempt = {
        name
        for name in (*EXEMPT, *NOT_RUN)
        if name.split(".")[0].removeprefix("memory-").removeprefix("mongo-") in FOUND
    }
    assert exempt - known == set()


#: Of each kind of lock, a test that finds out whether it excludes.
EXCLUDING: Final = [
    ("memory", name)
    for name in (
        "threading.Lock.test_try_acquire_contended",
        "threading.RLock.test_try_acquire_contended",
        "threading.Semaphore.test_try_acquire_contended",
        "threading.BoundedSemaphore.test_try_acquire_contended",
        "asyncio.Lock.test_acquire",
        "asyncio.Semaphore.test_acquire_cancel_before_awoken",
    )
    if name.split(".")[0] in FOUND
]


@IN_THREADS
@pytest.mark.parametrize(("backend", "name"), EXCLUDING, indirect=["backend"])
def test_a_lock_that_does_not_exclude_is_found(prepared: unittest.TestCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suites can fail: here each acquisition has a key of its own."""
    make, numbers = locks.make_lock, itertools.count()
    monkeypatch.setattr(locks, "make_lock", lambda keys, *rest: make((f"{keys[0]}:{next(numbers)}",), *rest))
    assert problems(prepared)
