"""`once_per` runs a function once in a period, by MongoDB's clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import transaction

from django_mongolock import SKIPPED, LockNotAcquired, mongo_lock, once_per
from tests.support.looking import holder, holders, new_key


def job(key: str, **period: float) -> tuple[Callable[..., Any], list[int]]:
    runs: list[int] = []

    @once_per(key, **period)  # type: ignore[arg-type]
    def run(number: int = 0, error: type[BaseException] | None = None) -> str:
        runs.append(number)
        if error is not None:
            raise error
        return "done"

    return run, runs


def test_runs_once() -> None:
    """Many calls at once, or later in the period, run once. The others return SKIPPED."""
    run, runs = job(new_key(), minutes=10)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(run, range(8)))
    assert sorted(map(repr, results)) == ["'done'", *["SKIPPED"] * 7]
    assert run(9) is SKIPPED
    assert len(runs) == 1


def test_runs_again_in_the_next_period() -> None:
    """The period counts from the start of the run, and ends a tenth early."""
    key = new_key()
    run, runs = job(key, hours=24)
    assert run() == "done"
    held = holder(key)
    assert (held["until"] - held["acquired_at"]).total_seconds() == pytest.approx(24 * 3600 * 0.9)
    short = new_key()
    run, runs = job(short, seconds=0.3)
    assert run(1) == "done"
    with mongo_lock(short, wait=5):
        pass
    assert run(2) == "done"
    assert runs == [1, 2]


@pytest.mark.parametrize("error", [ValueError, SystemExit, LockNotAcquired("another")])
def test_a_run_that_fails_does_not_count(error: Any) -> None:
    """The error of a failed run comes through, even if the error is one of ours. The next call runs."""
    key = new_key()
    run, runs = job(key, hours=1)
    with pytest.raises(error if isinstance(error, type) else type(error)):
        run(1, error)
    assert holders(key) == []
    assert run(2) == "done"
    assert runs == [1, 2]


@pytest.mark.django_db(transaction=True)
def test_an_error_after_the_commit() -> None:
    """F124: A run counts after its commit, although a function of `on_commit` raised."""
    key = new_key()
    run, runs = job(key, hours=1)
    inside: Any = run
    committed: Any = once_per(key, hours=1)(lambda: transaction.on_commit(lambda: inside.__wrapped__(1, ValueError)))
    with pytest.raises(ValueError):  # noqa: PT011 - the hook's own
        committed()
    assert run(2) is SKIPPED
    assert runs == [1]


async def test_coroutines() -> None:
    key, runs = new_key(), []

    @once_per(key, hours=1)
    async def run(fail: bool = False) -> str:
        runs.append(fail)
        await asyncio.sleep(0)
        if fail:
            raise ValueError
        return "done"

    with pytest.raises(ValueError):  # noqa: PT011 - the function's own
        await run(True)
    results = await asyncio.gather(*(run() for _ in range(5)))
    assert sorted(map(repr, results)) == ["'done'", *["SKIPPED"] * 4]
    assert runs == [True, False]


def test_keys() -> None:
    """Each key has its own period. Without a template the function has one."""
    name = new_key()

    @once_per(f"{name}:{{tenant}}", hours=1)
    def each(tenant: str) -> str:
        return tenant

    assert [each("a"), each("b"), each(tenant="a")] == ["a", "b", SKIPPED]

    @once_per(hours=1)
    def plain() -> None: ...

    plain.__wrapped__.__qualname__ = name  # type: ignore[attr-defined]
    assert plain() is None
    assert holders("once:tests.test_once_per.test_keys.<locals>.plain")


@pytest.mark.parametrize(
    "wrong",
    [
        once_per,
        lambda: once_per(lambda: None),  # type: ignore[arg-type]
        lambda: once_per(hours=-1),
        lambda: once_per("a:{missing}", hours=1)(lambda: None),
        lambda: once_per(hours=1)(type("C", (), {})),
        lambda: once_per(hours=1)(5),  # type: ignore[type-var]
        lambda: once_per(hours=1)(_generator),
    ],
)
def test_mistakes(wrong: Callable[[], object]) -> None:
    """An option that cannot be meant is refused at decoration, not in the night."""
    with pytest.raises(TypeError):
        wrong()


def _generator() -> Any:
    yield 1
