"""The types of locks, checked by mypy and never run (see tests/test_typing.py)."""

from __future__ import annotations

import asyncio
import threading
from datetime import datetime
from typing import Any, assert_type

from pymongo import AsyncMongoClient
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.client_session import ClientSession

from django_mongolock import SKIPPED, lock_info, mongo_lock, mongo_locked, mongo_semaphore
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.fencing import afenced_update, fenced_update
from django_mongolock.inspection.queries import alock_info
from django_mongolock.inspection.snapshot import LockSnapshot, ShownState
from django_mongolock.leaders import AsyncTerm, Term, leader
from django_mongolock.models import Lock, LockQuerySet
from testproject.shop.models import Ad, Order


def told(lock: MongoLock) -> None: ...


async def check(order: Order, ad: Ad) -> None:
    with mongo_lock("key", order, ad, lease=30, wait=None, mode="shared", on_lost=told, using="mongo") as lock:
        assert_type(lock, MongoLock)
        assert_type(lock.fencing_token, int)
        assert_type(lock.fencing_tokens, dict[str, int])
        assert_type(lock.remaining, float)
        assert_type(lock.acquired_at, datetime)
    async with mongo_lock("key") as same:
        assert_type(same, MongoLock)
    assert_type(mongo_semaphore("key", 3, wait=0.5).acquire(), MongoLock)
    assert_type(await mongo_lock("key").aacquire(wait=0), MongoLock)
    assert_type(mongo_lock("key").try_acquire(wait=5), bool)
    assert_type(await mongo_lock("key").arelease(), bool)
    with mongo_lock("key", release="on_commit") as lock, lock.atomic() as session:
        assert_type(session, ClientSession)
    async with mongo_lock("key") as lock, lock.atomic(AsyncMongoClient[dict[str, Any]]()) as asession:
        assert_type(asession, AsyncClientSession)
    assert_type(lock.run_atomic(lambda session: 5), int)
    assert_type(fenced_update(Order.objects.all(), lock, state="paid"), int)
    assert_type(await afenced_update(Order.objects.all(), 5), int)
    assert_type(mongo_semaphore("key", 3, weight=2, resize=True), MongoLock)
    assert_type(mongo_lock("key").acquire().downgrade(), None)
    assert_type(await mongo_lock("key").adowngrade(), None)
    # Known to the plugin of mypy only.
    assert_type(Lock.objects.held().stale(), LockQuerySet)  # pyright: ignore[reportAttributeAccessIssue, reportAssertTypeFailure]
    assert_type(bool(SKIPPED), bool)


async def asking() -> None:
    assert_type(lock_info("key"), LockSnapshot)
    assert_type((await alock_info("key")).state, ShownState)
    assert_type(lock_info("key").left, float | None)


def lead(term: Term) -> int:
    return term.fencing_token


async def alead(term: AsyncTerm) -> str:
    return term.key


async def leading() -> None:
    with leader("scheduler", lease=30, wait=None, label="beat") as term:
        assert_type(term, Term)
        assert_type(term.held, bool)
        assert_type(term.ended, threading.Event)
    async with leader("scheduler") as aterm:
        assert_type(aterm, AsyncTerm)
        assert_type(aterm.ended, asyncio.Event)
    assert_type(leader("scheduler").run(lead), int)
    assert_type(await leader("scheduler").arun(alead), str)


def wrong() -> int:
    mongo_lock("key", lease="30")  # type: ignore[arg-type]
    mongo_lock("key", mode="semaphore")  # type: ignore[arg-type]
    mongo_semaphore("key")  # type: ignore[call-arg]
    mongo_semaphore("key", 3, weight="2")  # type: ignore[arg-type]
    leader("key", leese=3)  # type: ignore[arg-type]
    lock_info(5)  # type: ignore[arg-type]
    mongo_locked("key", permits="3")  # type: ignore[arg-type]
    mongo_lock("key").fencing_token = 5  # type: ignore[misc]
    with mongo_lock("key"):
        return 5
    # A block that may raise does not make this unreachable, because the lock hides no error.
