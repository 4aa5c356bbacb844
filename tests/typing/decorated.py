"""The types of decorated callables, checked by mypy and never run (see tests/test_typing.py)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, assert_type

from django.http import HttpRequest, HttpResponse
from django.views import View

from django_mongolock import LockNotAcquired, mongo_locked
from django_mongolock.decorator.policies import Skipped
from testproject.shop.models import Order


@mongo_locked("order:{order_id}", wait=0, on_contention="respond")
def view(request: HttpRequest, order_id: int) -> HttpResponse:
    return HttpResponse()


@mongo_locked("order:{order_id}")
async def aview(request: HttpRequest, order_id: int) -> HttpResponse:
    return HttpResponse()


@mongo_locked()
def bare(number: int, *, text: str = "") -> bool:
    return True


@mongo_locked()
def empty() -> None: ...


@mongo_locked("a:{n}", "b:{n}", lease=30, owner="me", label=None, reentrant=True)
def generator(n: int) -> Iterator[str]:
    yield ""


@mongo_locked("a:{n}", on_contention="skip")
async def agenerator(n: int) -> AsyncIterator[str]:
    yield ""


@mongo_locked("a:{n}", on_contention="skip")
def skipping(n: int, *, text: str = "") -> str:
    return text


@mongo_locked("a:{n}", on_contention="skip")
async def askipping(n: int) -> str:
    return ""


def busy(error: LockNotAcquired, order: Order) -> int:
    return 0


@mongo_locked(key=lambda order: order, on_contention=busy)
def by_instance(order: Order) -> int:
    return 1


@mongo_locked("view:{request.path}")
class Locked(View):
    limit = 5

    @mongo_locked("self:{self.limit}")
    def method(self, number: int) -> str:
        return ""

    @mongo_locked("skip:{n}", on_contention="skip")
    def skipping(self, n: int) -> int:
        return n

    @classmethod
    @mongo_locked("cls")
    def made(cls) -> int:
        return 1

    @staticmethod
    @mongo_locked("static")
    def static(number: int) -> int:
        return number


async def check(request: HttpRequest, order: Order) -> None:
    assert_type(view(request, order_id=5), HttpResponse)
    assert_type(await aview(request, 5), HttpResponse)
    assert_type(bare(5, text=""), bool)
    assert_type(empty(), None)
    assert_type(generator(5), Iterator[str])
    assert_type(agenerator(5), AsyncIterator[str])
    assert_type(by_instance(order), int)
    assert_type(skipping(5, text=""), str | Skipped)
    assert_type(await askipping(5), str | Skipped)
    assert_type(Locked().skipping(5), int | Skipped)
    assert_type(Locked(), Locked)
    assert_type(Locked().limit, int)
    assert_type(Locked().method(5), str)
    assert_type(Locked.made(), int)
    assert_type(Locked.static(5), int)


async def wrong(request: HttpRequest) -> Any:
    view(request, order_id="5")  # type: ignore[arg-type]
    view(request)  # type: ignore[call-arg]
    bare("5")  # type: ignore[arg-type]
    skipping("5")  # type: ignore[arg-type]
    Locked().method("5")  # type: ignore[arg-type]
    mongo_locked("key", release="later")  # type: ignore[arg-type]
    mongo_locked("key", lease="30")  # type: ignore[arg-type]
    mongo_locked(5)  # type: ignore[arg-type]
