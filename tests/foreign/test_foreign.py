"""CPython's tests of locks, on MongoDB and in memory. exempt.py lists those that do not apply."""

from __future__ import annotations

import contextlib
import itertools
import unittest
from collections.abc import Iterable, Iterator
from typing import Any, Final

import pytest

from django_mongolock import locks
from django_mongolock.testing import override_locks

from . import threading_locks
from .exempt import EXEMPT, NOT_RUN

pytestmark = pytest.mark.long

#: Tests that are to fail may do so in a thread.
IN_THREADS: Final = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


def found() -> list[str]:
    """Return the tests of locks. The list is empty if Python came without its tests."""
    with contextlib.suppress(ImportError):
        methods = unittest.defaultTestLoader.getTestCaseNames
        return [f"{name}.{method}" for name, case in threading_locks.cases().items() for method in methods(case)]
    return []


FOUND: Final = found()


def each(names: Iterable[str], *backends: str) -> pytest.MarkDecorator:
    """Parametrize with the tests of *names* on *backends*, or on both backends."""
    chosen = itertools.product(backends or ("mongo", "memory"), set(names) & set(FOUND))
    parameters = [pytest.param(*one, id="-".join(one)) for one in sorted(chosen)]
    return pytest.mark.parametrize(("backend", "name"), parameters, indirect=["backend"])


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    with override_locks(strict=None) if request.param == "memory" else contextlib.nullcontext():
        yield


@pytest.fixture
def prepared(backend: None, name: str, monkeypatch: pytest.MonkeyPatch) -> unittest.TestCase:
    case, method = name.split(".")
    threading_locks.prepare(monkeypatch, exempt=name in EXEMPT)
    test: unittest.TestCase = threading_locks.cases()[case](method)
    return test


def problems(test: unittest.TestCase) -> list[str]:
    """Run the test as its own project would, and return the faults."""
    result = unittest.TestResult()
    test.run(result)
    for _, reason in result.skipped:
        pytest.skip(reason)
    return [trace for _, trace in (*result.errors, *result.failures)]


@each(set(FOUND) - EXEMPT.keys() - NOT_RUN.keys())
def test_what_applies(prepared: unittest.TestCase) -> None:
    """Our locks do what another project expects of a lock."""
    if found := problems(prepared):
        pytest.fail("\n".join(found), pytrace=False)


@IN_THREADS
@each(EXEMPT)
def test_what_does_not_apply(prepared: unittest.TestCase, name: str) -> None:
    """An exempt test fails. No exemption is dead."""
    assert problems(prepared), f"it passes: take it out of exempt.py ({EXEMPT[name]})"


@pytest.mark.skipif(not FOUND, reason="needs the tests of Python")
def test_every_exemption_is_for_a_test() -> None:
    assert {*EXEMPT, *NOT_RUN} - set(FOUND) == set()


@IN_THREADS
@each((f"{case}.test_try_acquire_contended" for case in ("Lock", "RLock", "Semaphore", "BoundedSemaphore")), "memory")
def test_a_lock_that_does_not_exclude_is_found(prepared: unittest.TestCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suites can fail. Here each acquisition has a key of its own."""
    make, numbers = locks.make_lock, itertools.count()

    def make_another(keys: Any, *rest: Any) -> Any:
        return make((f"{keys[0]}:{next(numbers)}",), *rest)

    monkeypatch.setattr(locks, "make_lock", make_another)
    assert problems(prepared)
