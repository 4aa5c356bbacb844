"""Mistakes of newcomers. Each error names the cure."""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import pickle
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
from celery import Celery
from django.apps import AppConfig, apps
from django.contrib import admin
from django.contrib.auth.models import User
from django.core.exceptions import FieldError, ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import NotSupportedError
from django.db.models import Q
from django.db.utils import ConnectionRouter
from django.forms import modelform_factory
from django.http import HttpRequest
from django.test import RequestFactory
from django.urls import clear_url_caches
from django.views import View
from django.views.generic import UpdateView
from pymongo.errors import AutoReconnect
from pymongo.hello import Hello
from pymongo.server_description import ServerDescription
from pymongo.synchronous.settings import TopologySettings
from pymongo.topology_description import TOPOLOGY_TYPE, TopologyDescription
from pytest_django import Settings

from django_mongolock import LockBackendFailed, LockNotAcquired, mongo_lock, mongo_locked, mongo_semaphore, once_per
from django_mongolock.backends import close_backends
from django_mongolock.conf import get_settings, used_apps
from django_mongolock.contrib.celery import OnceTask, clear_stale_locks, enqueue_once, workers
from django_mongolock.contrib.celery.workers import check_once
from django_mongolock.decorator.calls import shared_by_all
from django_mongolock.decorator.locked_command import LockedCommand
from django_mongolock.documents.admin import DocumentLockAdminMixin
from django_mongolock.editing import EditLockViewMixin
from django_mongolock.editing.admin import EditLockMixin
from django_mongolock.engine.lock.lock import MongoLock
from django_mongolock.engine.store.errors import whereabouts
from django_mongolock.engine.store.mongo import MongoStore, StoreConfig
from django_mongolock.exceptions import LockKeyInvalid, LockMisused, LockReentry
from django_mongolock.fencing import fenced_update
from django_mongolock.history.models import LockEvent
from django_mongolock.inspection.queries import ping
from django_mongolock.management import checks
from django_mongolock.management.checks import check_apps, check_settings, check_shared_locks
from django_mongolock.models import Lock
from django_mongolock.router import MongoLockRouter
from django_mongolock.rows import locked
from django_mongolock.testing import MemoryLocks
from django_mongolock.versions import VersionField, retry_on_conflict
from django_mongolock.versions.admin import VersionedAdmin
from django_mongolock.versions.forms import VersionedModelForm
from testproject.rates.models import Rate
from testproject.shop.models import Ad, Order
from tests.support.lock_documents import Locks
from tests.support.lock_fixtures import WITH_MONGO
from tests.support.programs import said_by

pytestmark = WITH_MONGO


def test_blocking_in_a_coroutine_is_warned_of() -> None:
    """Blocking works, but would stop every task of the event loop. Each way to block is reported with its place."""

    async def block() -> None:
        with mongo_lock("k"):
            pass
        lock = mongo_lock("k").acquire()
        assert lock.release()
        assert lock.try_acquire()
        assert lock.release()

    with pytest.warns(RuntimeWarning, match="async with") as told:
        asyncio.run(block())
    assert [warning.filename for warning in told] == [__file__] * 3


def test_a_wrong_setting_does_not_open_the_locks_to_other_apps(settings: Settings) -> None:
    """Otherwise `migrate` would report the models of all apps, because they do not fit into MongoDB."""
    settings.MONGOLOCK = {"DATABASE": "mongo", "LEASE": "long"}
    assert MongoLockRouter().allow_migrate("mongo", "auth") is False
    assert MongoLockRouter().allow_migrate("mongo", "django_mongolock") is True


# Arguments that were meant otherwise


def unmeant(call: Callable[[], Any]) -> str:
    with pytest.raises(TypeError) as told:
        call()
    return str(told.value)


def test_a_lock_as_a_condition(mongolock: MemoryLocks) -> None:
    """F227: A lock object cannot be used as a condition."""
    with pytest.raises(TypeError, match=r"`if lock` does not acquire it: use `if lock.try_acquire\(\)`, or `with`"):
        bool(mongo_lock("k", wait=0))


@pytest.mark.parametrize(
    ("call", "error", "cure"),
    [
        (pickle.dumps, TypeError, "make a new one there: mongo_lock('a')"),
        (copy.copy, TypeError, "pass its key"),
        (MongoLock.ensure_held, LockMisused, "the lock 'a' is not acquired by this object: use `with`"),
        (lambda lock: lock.fencing_token, LockMisused, "the lock 'a' is not acquired"),
        (lambda lock: lock.locked(), AttributeError, "`held`: whether this object holds the lock; `lock_info(key)`"),
        (lambda lock: lock.lockd(), AttributeError, "no attribute 'lockd'"),
    ],
)
def test_what_a_lock_is_not(
    mongolock: MemoryLocks, call: Callable[[Any], Any], error: type[Exception], cure: str
) -> None:
    """F154, F155: The error names the cure."""
    with pytest.raises(error) as caught:
        call(mongo_lock("a"))
    assert cure in str(caught.value)


def test_a_timedelta_is_a_time(settings: Settings, mongolock: MemoryLocks) -> None:
    """A timedelta is taken for every time in seconds, in settings, options, methods and tests."""
    second = timedelta(seconds=1)
    settings.MONGOLOCK = {**settings.MONGOLOCK, "WAIT": 2 * second, "LEASE": 40 * second}
    assert check_settings(app_configs=None) == []
    given: Any = get_settings()
    assert (given.WAIT, given.LEASE) == (2.0, 40.0)
    options = mongo_lock("a", lease=50 * second, wait=second, min_hold=0 * second, max_hold=90 * second).options
    assert (options.lease, options.wait, options.min_hold, options.max_hold) == (50.0, 1.0, 0.0, 90.0)
    lock = mongo_lock("a").acquire(second)
    lock.extend(120 * second)
    assert lock.remaining > 100
    assert lock.release()
    with mongolock.hold("a", lease=60 * second) as held:
        held.die()
        mongolock.advance(timedelta(hours=1))
    assert mongo_lock("a", wait=0 * second).try_acquire()
    with pytest.raises(ValueError, match="lease must be more than 0"):
        mongo_lock("a", lease=-second)
    settings.MONGOLOCK = {**settings.MONGOLOCK, "MAX_WAITERS": second}
    assert [found.id for found in check_settings(app_configs=None)] == ["mongolock.E010"]


@pytest.mark.parametrize(
    ("call", "cure"),
    [
        (lambda: mongo_lock("a", leas=3), "did you mean lease=?"),  # type: ignore[call-arg]
        (lambda: mongo_semaphore("a", 3, lable="x"), "did you mean label=?"),  # type: ignore[call-arg]
        (lambda: mongo_locked("a", on_contension="skip"), "did you mean on_contention=?"),  # type: ignore[call-arg]
        (lambda: once_per(hour=1), "did you mean hours=?"),  # type: ignore[arg-type]
        (lambda: mongo_lock("a", xyzzy=3), "Known: auto_renew, label, lease, "),  # type: ignore[call-arg]
        (lambda: mongo_lock("a", timeout=5), "it could mean two things: use lease= "),  # type: ignore[call-arg]
        (lambda: mongo_semaphore("a", 3, ttl=5), "use lease="),  # type: ignore[call-arg]
        (lambda: mongo_lock("a", blocking=False), "use wait=: wait=0 for a single try"),  # type: ignore[call-arg]
        # arguments of other lock libraries, such as a time in the second place, a number as the key, and options of
        # `threading` and Redis
        (lambda: mongo_lock("a", 10), "did you mean wait=10?"),  # type: ignore[arg-type]
        (lambda: mongo_lock("a", False), "did you mean wait=0?"),  # type: ignore[arg-type]
        (lambda: mongo_lock("a", timedelta(minutes=1)), "did you mean wait=60.0?"),  # type: ignore[arg-type]
        (lambda: mongo_lock(5), 'as in f"order:{5}"'),  # type: ignore[arg-type]
        (lambda: mongo_locked("a", 10), 'as in f"order:{10}"'),  # type: ignore[arg-type]
        (lambda: mongo_lock("a", wait=False), "give wait=0 for a single try"),
        (lambda: mongo_lock("a").acquire(blocking=False), "wait=0 for a single try"),  # type: ignore[arg-type]
        (lambda: mongo_lock("a").acquire(timeout=3), "or wait="),  # type: ignore[arg-type]
        (lambda: mongo_lock("a").acquire(leese=3), "acquire() takes wait="),  # type: ignore[arg-type]
        (lambda: asyncio.run(mongo_lock("a").aacquire(blocking_timeout=3)), "use wait="),  # type: ignore[arg-type]
        # keys, and first arguments
        (lambda: mongo_lock(["a", "b"]), "mongo_lock(*keys)"),  # type: ignore[arg-type]
        (lambda: mongo_lock({"a"}), "mongo_lock(*keys)"),  # type: ignore[arg-type]
        (lambda: mongo_lock(None), "a lock key must be a str, not NoneType"),  # type: ignore[arg-type]
        (lambda: mongo_lock(key="a"), "the keys come first, without a name"),  # type: ignore[call-arg]
        (lambda: mongo_lock(Order), "an instance of Order, or, as one key for all of them, 'shop.order'"),  # type: ignore[arg-type]
        (lambda: locked(Order(pk=5)), "locked(Order, pk=5)"),  # type: ignore[arg-type]
        (lambda: fenced_update(Order(pk=5), 1, state="paid"), "Order.objects.filter(pk=order.pk)"),  # type: ignore[arg-type]
        (lambda: mongo_lock("a").atomic("locks"), 'atomic(using="locks")'),  # type: ignore[call-overload]
        (lambda: enqueue_once("shop.tasks.export"), "enqueue_once(export_ad, [5])"),
        (lambda: enqueue_once(clear_stale_locks, 5), "enqueue_once(export_ad, [5])"),  # type: ignore[arg-type]
        (lambda: enqueue_once(clear_stale_locks, "ad-7"), "enqueue_once(export_ad, [5])"),
        # numbers
        (lambda: retry_on_conflict(attempts="3"), "attempts is a "),  # type: ignore[call-overload]
        (lambda: retry_on_conflict(attempts=2.5), "attempts is a "),  # type: ignore[call-overload]
        (lambda: retry_on_conflict(backoff="1"), "backoff is a "),  # type: ignore[call-overload]
        (lambda: retry_on_conflict(longest=None), "longest is a "),  # type: ignore[call-overload]
        (lambda: mongo_lock("a", wait="10"), "wait is a number of seconds or a timedelta, not str"),  # type: ignore[arg-type]
        (lambda: mongo_semaphore("a", "3"), "permits is a whole number"),  # type: ignore[arg-type]
        (lambda: once_per(hours="24"), "timedelta hours component: str"),  # type: ignore[arg-type]
    ],
)
def test_what_was_meant(call: Callable[[], Any], cure: str) -> None:
    """The TypeError of a misunderstood argument shows the right one."""
    assert cure in unmeant(call)


def test_a_lock_is_no_decorator_and_a_decorator_no_lock() -> None:
    lock: Any = mongo_lock("a")
    assert "@mongo_locked" in unmeant(lambda: lock(print))
    decorator: Any = mongo_locked("a")
    with pytest.raises(TypeError, match=r"with mongo_lock\(\.\.\.\)"), decorator:
        pass

    async def enter() -> None:
        async with decorator:
            pass

    with pytest.raises(TypeError, match=r"with mongo_lock\(\.\.\.\)"):
        asyncio.run(enter())


def test_a_transaction_under_a_lock_in_memory(mongolock: MemoryLocks, do: Callable[..., Any]) -> None:
    """In a user's test without a database, both methods name the missing MongoDB, not a missing database."""
    with mongo_lock("a") as lock, pytest.raises(LockMisused, match="not kept in MongoDB"):
        do(lock.atomic(), "__enter__")


# Forgotten parts of a project


def test_the_app_is_not_installed(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    """Locks would work without the app's indexes, but slower from day to day. The first lock says so."""
    close_backends()
    monkeypatch.setattr(apps, "is_installed", lambda name: name != "django_mongolock")
    with pytest.raises(ImproperlyConfigured, match='put "django_mongolock" into INSTALLED_APPS'):
        mongo_lock("a").acquire()
    monkeypatch.setattr(apps, "ready", False)  # a lock that is made while Django starts cannot ask
    assert mongo_lock("a").key == "a"


def test_the_router_is_missing(settings: Settings, db: None) -> None:
    """The error is not "no such table". With using= the router is not needed."""
    settings.DATABASE_ROUTERS = []
    for read in (Lock.objects.count, Lock.objects.held().first, LockEvent.objects.all().exists):
        with pytest.raises(ImproperlyConfigured, match=r'put "django_mongolock.router.MongoLockRouter" first into'):
            read()
    assert Lock.objects.using("mongo").filter(pk="no such").count() == 0


def test_a_call_that_should_be_retried_without_celery(monkeypatch: pytest.MonkeyPatch, mongolock: MemoryLocks) -> None:
    """Without Celery, no task runs that could be retried. The lock is busy, and nothing else is wrong."""

    @mongo_locked("a", on_contention="retry", wait=0)
    def call() -> None: ...

    monkeypatch.delitem(sys.modules, "celery")
    monkeypatch.setitem(sys.modules, "django_mongolock.contrib.celery", None)  # to import it is an error
    with mongolock.hold("a"), pytest.raises(LockNotAcquired):
        call()


# Servers that do not answer, with the reason and the place to look


@pytest.mark.long
@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("mongodb://alice:hunter2@127.0.0.1:9", "127.0.0.1:9 (Connection refused). Is it running, and are HOST"),
        ("mongodb://[::1]:9,127.0.0.1:9/?replicaSet=x", "[::1]:9 ("),
        ("mongodb://alice:hunter2@nowhere.invalid", "nowhere.invalid:27017 (Name or service not known). Is it"),
        ("mongodb://{here}/?replicaSet=other", "no server of this address belongs to the replica set 'other'"),
    ],
)
def test_a_server_that_cannot_be_reached_is_named(mongo_uri: str, uri: str, said: str) -> None:
    here = mongo_uri.partition("://")[2].partition("/")[0]
    store = MongoStore(StoreConfig({"host": uri.replace("{here}", here)}, "x"))
    started = time.monotonic()
    with pytest.raises(LockBackendFailed) as told:
        ping(store, 60)
    assert said in told.value.problem
    assert "hunter2" not in told.value.problem
    assert time.monotonic() - started < 30
    store.close()


def described(*servers: ServerDescription, kind: str = "ReplicaSetNoPrimary") -> str:
    """Return the text about a client that knows *servers*."""
    known = {server.address: server for server in servers}
    number = getattr(TOPOLOGY_TYPE, kind)
    topology = TopologyDescription(number, known, "rs0", None, None, TopologySettings())
    return whereabouts(Mock(topology_description=topology))


def server(host: str, **hello: Any) -> ServerDescription:
    """Return a member of a replica set that answers."""
    answer: Any = {"ok": 1, "setName": "rs0", "maxWireVersion": 17, **hello}
    return ServerDescription((host, 1), Hello(answer))


def test_a_wait_that_failed_tells_how_long_it_was(mongolock: MemoryLocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """F153: The time counts from the call, however many commands there were, even if the error was sent to another
    process."""
    lock = mongo_lock("a", wait=10)
    session: Any = lock._current_session()
    later = itertools.count(session.now(), 11)
    monkeypatch.setattr(session, "now", lambda: next(later))
    with mongolock.unavailable(), pytest.raises(LockBackendFailed, match=r"lock 'a': after \d+\.0 s, MongoDB") as told:
        lock.acquire()
    assert pickle.loads(pickle.dumps(told.value)).waited == told.value.waited >= 11  # noqa: S301


def test_members_of_a_replica_set_are_named_with_their_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a primary, there is an election to wait for. With one, the server or the network is slow."""
    away = ServerDescription(("c", 3), error=AutoReconnect("c:3: timed out"))
    secondaries = [server("a", secondary=True), server("b", secondary=True)]
    said = described(*secondaries, away)
    assert said.startswith("a:1 (secondary), b:1 (secondary), c:3 (no answer). There is no primary: rs.status()")
    said = described(server("a", isWritablePrimary=True), *secondaries[1:], away, kind="ReplicaSetWithPrimary")
    assert said.startswith("a:1 (primary), b:1 (secondary), c:3 (no answer). Is the primary overloaded")
    assert "A test that asks for the fixture mongolock" in described(away)  # F154
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    assert described(away).endswith("are HOST and PORT right?")
    many = [ServerDescription((f"h{number}", 1), error=AutoReconnect("h: timed out")) for number in range(7)]
    assert "h2:1 (no answer) and 4 more." in described(*many)


# on_contention, refused at decoration, not under the first contention


def function(name: str, extra: int = 0) -> None: ...


def only_name(name: str, /, *, extra: int) -> None: ...


def view(request: HttpRequest, order_id: int) -> None: ...


def with_all(*args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("called", "policy"),
    [
        (function, lambda: None),
        (function, lambda error, name: None),
        (view, lambda request, order_id: None),
        (with_all, lambda: None),
        (View, lambda error, request: None),
    ],
)
def test_a_policy_of_the_wrong_arity_is_refused_at_decoration(called: Any, policy: Callable[..., Any]) -> None:
    """A policy takes the error, and then any arguments of the call."""
    said = unmeant(lambda: mongo_locked("k", on_contention=policy)(called))
    assert "def busy(error, *args, **kwargs)" in said


@pytest.mark.parametrize(
    ("called", "policy"),
    [
        (function, lambda error, *args, **kwargs: None),
        (function, lambda error, name, extra=0: None),
        (only_name, lambda error, name, extra: None),
        (view, lambda error, request, order_id: None),
        (with_all, lambda error: None),
        (function, functools.partial(lambda first, error, *args: None, 1)),
    ],
)
def test_a_policy_that_fits(called: Any, policy: Callable[..., Any]) -> None:
    """A policy fits any way in which the call may be made."""
    mongo_locked("k", on_contention=policy)(called)


# Forty more mistakes


def in_a_thread(call: Callable[[], Any]) -> None:
    """Call it in another thread, and raise its error here."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()


def shared_object() -> None:
    lock = mongo_lock("a")
    with lock:
        in_a_thread(lock.acquire)


def acquired(use: Callable[[MongoLock], object]) -> Callable[[], None]:
    def call() -> None:
        lock = mongo_lock("a").acquire()
        try:
            use(lock)
        finally:
            lock.release()

    return call


def after_its_block(use: Callable[[MongoLock], object]) -> Callable[[], None]:
    def call() -> None:
        with mongo_lock("a") as lock:
            pass
        use(lock)

    return call


def nested() -> None:
    with mongo_lock("a"), mongo_lock("a"):
        pass


def decorated(decorator: Any, target: Any) -> Callable[[], Any]:
    return lambda: decorator(target)


class NoView:
    """A class that is no view."""


def of_a_request(**options: Any) -> Callable[[], Any]:
    return lambda: mongo_locked("a", **options)(view)(RequestFactory().get("/"), 5)


def unsaved() -> None:
    with mongo_lock(Order()):
        pass


def two_mixins(*bases: type) -> Callable[[], type]:
    return lambda: type("Late", bases, {"__module__": __name__})


@pytest.mark.parametrize(
    ("mistake", "error", "cure"),
    [
        # templates that nothing fills
        (lambda: mongo_lock("order:{order_id}"), LockKeyInvalid, "make it with lock_key(template, name=value)"),
        (lambda: mongo_lock("order:%s", 5), TypeError, 'Or one key, as in f"order:{pk}"?'),  # type: ignore[arg-type]
        (lambda: mongo_locked("order:%s"), ValueError, "name a parameter in braces, as in 'order:{order_id}'"),
        (lambda: mongo_locked("order:%(pk)d"), ValueError, "name a parameter in braces, as in 'order:{order_id}'"),
        (decorated(mongo_locked("order:{pk}"), view), TypeError, "view has no parameter pk; it has request, order_id"),
        (lambda: mongo_locked("order:{}"), ValueError, "name a parameter in each {}"),
        (lambda: mongo_locked("order{a}{b}"), ValueError, "put one of :/|,;#= between two fields"),
        # keys and numbers
        (unsaved, ValueError, "Order has no primary key yet: save it before you lock it"),
        (lambda: mongo_lock("a" * 600), LockKeyInvalid, "at most 512 bytes, prefix included: this one has 600"),
        (lambda: mongo_lock("a", lease=-1), ValueError, "lease must be more than 0"),
        (lambda: mongo_lock("a", wait=-1), ValueError, "wait is 0 for a single try, or seconds, or None"),
        (lambda: mongo_lock("a", mode="read"), ValueError, 'mode is "exclusive" or "shared", not'),  # type: ignore[arg-type]
        (lambda: mongo_semaphore("a", 0), ValueError, "permits must be at least 1"),
        # one object, several uses
        (shared_object, LockMisused, "make a new one for every use"),
        (acquired(MongoLock.__enter__), LockMisused, "`with` needs no acquire()"),
        (acquired(bool), TypeError, "use `if lock.try_acquire()`"),
        (after_its_block(MongoLock.ensure_held), LockMisused, "the lock 'a' was released: do this inside its block"),
        (after_its_block(MongoLock.extend), LockMisused, "the lock 'a' was released: do this inside its block"),
        (nested, LockReentry, "pass reentrant=True to take it again"),
        # decorators
        (decorated(mongo_locked("a"), NoView), TypeError, "goes on functions, methods and view classes, not on NoView"),
        (decorated(mongo_locked("a"), staticmethod(function)), TypeError, "not on a staticmethod: put it below that"),
        (decorated(mongo_locked("a"), property(function)), TypeError, "not on a property: put it below that"),
        (
            decorated(mongo_locked("a"), clear_stale_locks),
            TypeError,
            "put @mongo_locked below the decorator that makes",
        ),
        (decorated(mongo_locked, function), TypeError, "write @mongo_locked(), with brackets"),
        (decorated(once_per, function), TypeError, "@once_per needs the period of the schedule"),
        # on_contention
        (lambda: mongo_locked("a", on_contention="ignore"), ValueError, "one of 'raise', 'skip', 'respond', 'retry'"),  # type: ignore[type-var]
        (of_a_request(on_contention="retry"), TypeError, 'use "respond" for tests.test_mistakes.view'),
        (of_a_request(on_contention="skip"), TypeError, 'use "respond" for tests.test_mistakes.view'),
        (decorated(mongo_locked("a", on_contention="retry"), View), TypeError, 'use "respond" for View'),
        (mongo_locked("a", on_contention="respond")(with_all), TypeError, 'A Celery task takes "retry"'),
        # mixins after the class that they change, and models without a version
        (two_mixins(admin.ModelAdmin, EditLockMixin), TypeError, "bases ModelAdmin, EditLockMixin"),
        (two_mixins(admin.ModelAdmin, DocumentLockAdminMixin), TypeError, "bases ModelAdmin, DocumentLockAdminMixin"),
        (two_mixins(UpdateView, EditLockViewMixin), TypeError, "bases UpdateView, EditLockViewMixin"),
        (modelform_factory(Order, VersionedModelForm, fields=["item"]), TypeError, "has no VersionField, which"),
        (lambda: VersionField(primary_key=True), TypeError, "a VersionField cannot be primary_key"),
        # locks in memory
        (Lock.objects.count, LockBackendFailed, "in a test ask the fixture mongolock"),
        (lambda: call_command("list_locks"), CommandError, "in a test ask the fixture mongolock"),
    ],
)
def test_a_mistake_in_code(
    mongolock: MemoryLocks, mistake: Callable[[], Any], error: type[Exception], cure: str
) -> None:
    """The error of a mistake in code names the cure."""
    with pytest.raises(error) as caught:
        mistake()
    assert cure in str(caught.value).replace("\n", " ")


def test_a_release_by_another_object(mongolock: MemoryLocks, do: Callable[..., Any]) -> None:
    """The release has no effect, and a warning says so. An object whose acquisition failed gets no warning."""
    with mongolock.hold("a") as held:
        lock = mongo_lock("a", wait=0)
        with pytest.warns(RuntimeWarning, match="'a' is not acquired by this object: use `with`, or"):
            assert not do(lock, "release")
        assert not do(lock, "try_acquire")
        with warnings.catch_warnings(action="error"):
            assert not do(lock, "release")
        assert held.held


def test_the_place_of_a_release_by_another_object(mongolock: MemoryLocks) -> None:
    with pytest.warns(RuntimeWarning) as told:
        mongo_lock("a").release()
    assert [warning.filename for warning in told] == [__file__]


def lookup(**conditions: Any) -> Callable[[], Any]:
    return lambda: Lock.objects.filter(**conditions)


@pytest.mark.parametrize(
    ("mistake", "error", "cure"),
    [
        (lambda: Lock.objects.create(key="a"), NotSupportedError, "use mongo_lock()"),
        (lambda: Lock(key="a").save(), NotSupportedError, "use mongo_lock()"),
        (lambda: Lock.objects.update(token=1), NotSupportedError, "use mongo_lock()"),
        (lambda: Lock(key="a").delete(), NotSupportedError, "use force_release()"),
        (lambda: Lock.objects.all().delete(), NotSupportedError, "use force_release()"),
        (lookup(held=True), FieldError, "States are methods: held(), stale()"),
        (lookup(owner="5"), FieldError, "owned_by(owner)"),
        (lambda: Lock.objects.exclude(Q(state="held")), FieldError, "States are methods: held(), stale()"),
        (Lock.objects.force_release, TypeError, "every lock of the database: choose some with filter()"),
        (lambda: Lock.objects.all().ask_to_release("anna"), TypeError, "choose some with filter()"),
        (lambda: mongo_lock("a", using="nosuch"), ImproperlyConfigured, "there is no DATABASES alias 'nosuch'"),
        (lambda: call_command("clear_stale_locks"), CommandError, "use --no-input, or --dry-run"),
        (lambda: call_command("clear_stale_locks", interactive=False), TypeError, "no_input"),
        (lambda: call_command("clear_stale_locks", "--older-than", "10min"), CommandError, "90s, 5m, 2h or 1d"),
        (
            lambda: call_command("clear_stale_locks", older_than="5m", no_input=True),
            CommandError,
            "or a timedelta, not",
        ),
        (lambda: call_command("clear_stale_locks", older_than=-5, no_input=True), CommandError, "must be more than 0"),
        (lambda: call_command("release_lock", "nosuch"), CommandError, "no lock has the key 'nosuch': see list_locks"),
        (lambda: call_command("release_lock"), CommandError, "name either the KEY of a lock, or --owner"),
        (lambda: call_command("run_locked", "tea", "sleep", "5"), CommandError, "put -- between the key and the"),
        (lambda: call_command("run_locked", "tea", "--", "sleep 5"), CommandError, "write its arguments apart"),
    ],
)
def test_a_mistake_with_the_model_or_a_command(
    locks: Locks, mistake: Callable[[], Any], error: type[Exception], cure: str
) -> None:
    """The error names the cure, and no lock is released."""
    with mongo_lock("order:5") as lock:
        with pytest.raises(error) as caught:
            mistake()
        assert cure in str(caught.value)
        assert Lock.objects.filter(key="order:5", holders__token=lock.fencing_token).exists()


def test_a_time_of_a_command_may_be_a_timedelta(locks: Locks) -> None:
    """Code that calls the command gives times as anywhere else."""
    assert "no such locks" in said_by("clear_stale_locks", older_than=timedelta(minutes=1), no_input=True)


@pytest.mark.parametrize(
    ("changes", "code", "cure"),
    [
        ({"DATABASE": ""}, "E001", "Name the alias of your MongoDB."),
        ({"DATABASE": "lock"}, "E002", "Aliases in DATABASES with the ENGINE 'django_mongodb_backend': mongo."),
        ({"DATABASE": "mongodb://u:hunter2@h/x"}, "E002", "must be the name of an alias in DATABASES."),
        ({"DATABASE": {"PASSWORD": "hunter2"}}, "E002", "must be the name of an alias in DATABASES."),
        ({"DATABASE": "default"}, "E003", "with the ENGINE 'django_mongodb_backend': mongo."),
        ({"database": "mongo"}, "E004", "Write 'DATABASE'."),
        ({"TIMEOUT": 10}, "E004", "Known: BACKEND, "),
        ({"LEASE": "30"}, "E005", "for example 30."),
        ({"WAIT": -1}, "E006", "0 for a single try, None without end."),
        ({"KEY_PREFIX": "shop"}, "E007", 'for example "shop-production:"'),
        ({"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}, "E013", "LocMemCache is no backend of locks"),
    ],
)
def test_a_mistake_in_the_setting(settings: Settings, changes: dict[str, Any], code: str, cure: str) -> None:
    """The check names the cure. The first lock of a server, which runs no checks, raises. No message has a password."""
    close_backends()
    settings.MONGOLOCK = {**settings.MONGOLOCK, **changes}
    found = {str(each.id): f"{each.msg} {each.hint}" for each in check_settings(app_configs=None)}
    assert cure in found[f"mongolock.{code}"]
    with pytest.raises(ImproperlyConfigured) as caught:
        mongo_lock("a")
    assert "hunter2" not in f"{found} {caught.value}"


@pytest.mark.parametrize(
    ("host", "cure"),
    [
        ("localhost:27017/?replicaSet=rs0", "it does not begin with mongodb:// or mongodb+srv://"),
        ("anna:hunter2@localhost:27017", "it does not begin with mongodb:// or mongodb+srv://"),
        ("mongodb:/localhost:27017", "it does not begin with mongodb:// or mongodb+srv://"),
        ("http://localhost:27017", "it does not begin with mongodb:// or mongodb+srv://"),
        ('"mongodb://localhost:27017"', "it does not begin with mongodb:// or mongodb+srv://"),
        ("mongodb://localhost:27017/x\n", "it begins or ends with a space or a line break"),
        ("mongodb://anna:hunter2@x@localhost:27017", "percent-encode characters such as @ : / ? # %"),
        ("mongodb://anna:hunter2/x@localhost:27017", "percent-encode characters such as @ : / ? # %"),
        ("mongodb://anna:hunter2%x@localhost:27017", "percent-encode characters such as @ : / ? # %"),
        ("mongodb://localhost:27017/?replSet=rs0", "its option 'replSet' is unknown to MongoDB"),
        ("mongodb://anna:hunter2%40x@localhost:27017", ""),
        ("db1.example.org:27018,db2.example.org", ""),
        ("/run/mongodb/mongodb-27017.sock", ""),
    ],
)
def test_a_mistake_in_the_address(settings: Settings, host: str, cure: str) -> None:
    """The check names the cure, and quotes no password. A HOST of names alone is right."""
    with patch.dict(settings.DATABASES["mongo"], HOST=host):
        found = check_settings(app_configs=None)
    assert [each.id for each in found] == ["mongolock.E019"] * bool(cure)
    assert cure in "".join(each.msg for each in found)
    assert "hunter2" not in str(found)


def test_a_setting_beside_the_dictionary(settings: Settings) -> None:
    """A setting of that name would be read by nobody, unless the dictionary takes its value."""
    settings.MONGOLOCK_RETENTION = 86_400
    (found,) = check_settings(app_configs=None)
    settings.MONGOLOCK = {**settings.MONGOLOCK, "RETENTION": settings.MONGOLOCK_RETENTION}
    assert (found.id, found.hint) == ("mongolock.E004", 'Write MONGOLOCK = {"RETENTION": …}.')
    assert check_settings(app_configs=None) == []


class PrimaryReplica:
    """The router of Django's own documentation. It answers for all models."""

    def db_for_read(self, model: Any, **hints: Any) -> str:
        return "default"

    db_for_write = db_for_read


def test_a_router_that_answers_for_all_models(settings: Settings) -> None:
    """The hint says where the router of the locks belongs."""
    settings.DATABASE_ROUTERS = [PrimaryReplica(), "django_mongolock.router.MongoLockRouter"]
    (found,) = check_settings(app_configs=None)
    assert found.id == "mongolock.E027"
    assert "before any router that answers for all models" in str(found.hint)


@pytest.mark.parametrize("routers", [["django_mongolock.MongoLockRouter"], "django_mongolock.router.MongoLockRouter"])
def test_a_router_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, routers: Any) -> None:
    """The check says what to write. It does not end with the traceback of an import."""
    monkeypatch.setattr(checks, "router", ConnectionRouter(routers))
    (found,) = check_settings(app_configs=None)
    assert found.id == "mongolock.E027"
    assert 'Write DATABASE_ROUTERS = ["django_mongolock.router.MongoLockRouter"]' in str(found.hint)


def test_options_of_once_task_on_a_plain_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Celery makes any option an attribute of the task, so nothing would be enqueued once."""
    app = Celery("project", set_as_current=False)
    app.task(name="plain", once_key="export:{name}")(function)
    app.task(name="right", base=OnceTask, once_key="export:{name}")(function)
    monkeypatch.setattr(workers, "current_app", app)
    (found,) = check_once(app_configs=None)
    assert (found.id, found.msg.startswith("The task plain ")) == ("mongolock.E028", True)
    assert "@shared_task(base=OnceTask, once_key=" in str(found.hint)


class RateForm(VersionedModelForm):
    """A form with its seal, which a template may leave out."""

    class Meta:
        model = Rate
        fields = ("value",)


def test_a_template_without_the_seal(caplog: pytest.LogCaptureFixture) -> None:
    """The user is told of a change, as always without a seal. The log tells the developer why."""
    rate = Rate.objects.create(name="EUR", value=1)
    assert not RateForm({"value": "2", "version_read": ""}, instance=rate).is_valid()
    assert caplog.messages == []
    assert not RateForm({"value": "3"}, instance=rate).is_valid()
    assert "{{ form.version_read }}" in caplog.text
    assert RateForm({"name": "USD", "value": "2"}).is_valid()
    assert len(caplog.messages) == 1


# Declarations


def test_a_locked_command_is_checked_where_it_is_written() -> None:
    """The on_contention of a locked command differs from that of mongo_locked. The key and the options are those of a
    lock."""
    with pytest.raises(ValueError, match=r'Command\.on_contention is "fail" or "skip", not \'respond\''):
        type("Command", (LockedCommand,), {"on_contention": "respond"})
    with pytest.raises(ValueError, match="key template"):
        type("Command", (LockedCommand,), {"lock_key": "import:{}"})
    assert "did you mean lease=?" in unmeant(lambda: type("Command", (LockedCommand,), {"lock_options": {"leas": 3}}))
    type("Command", (LockedCommand,), {"on_contention": "skip", "lock_key": "import:{source}"})


class UserLockAdmin(DocumentLockAdminMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    """An admin without its document_lock."""


def test_an_admin_without_what_it_is_about_fails_the_check() -> None:
    """An admin without a lock, with the lock of another model, or with a model without a version fails the check."""
    site = admin.AdminSite()

    def ids(kind: type[admin.ModelAdmin[Any]], model: Any) -> list[str | None]:
        return [found.id for found in kind(model, site).check()]

    right = type(site_admin(Ad))
    assert ids(UserLockAdmin, User) == ["mongolock.E017"]
    assert ids(right, User)[-1:] == ["mongolock.E017"]
    assert ids(right, Ad) == []
    assert ids(VersionedAdmin, User) == ["mongolock.E073"]
    assert ids(VersionedAdmin, Rate) == []


def site_admin(model: Any) -> Any:
    return admin.site.get_model_admin(model)


# Checks


def test_a_lease_that_one_command_may_use_up(settings: Settings) -> None:
    """The reply that grants the lock could come when the lock is over."""
    settings.MONGOLOCK = {**settings.MONGOLOCK, "LEASE": 5, "COMMAND_TIMEOUT": 5}
    assert [found.id for found in check_settings(app_configs=None)] == ["mongolock.W006"]
    settings.MONGOLOCK = {**settings.MONGOLOCK, "LEASE": 6}
    assert check_settings(app_configs=None) == []


@mongo_locked()
def without_a_key(number: int) -> None: ...


@mongo_locked()
def only_a_request(request: HttpRequest, *args: Any, **kwargs: Any) -> None: ...


@mongo_locked("one lock")
def with_a_key(number: int) -> None: ...


def test_a_lock_that_all_calls_share() -> None:
    """If the calls have arguments, the key was probably forgotten. A key without a field shows that it was meant."""
    said = [found for found in check_shared_locks(app_configs=None) if "tests.test_mistakes." in found.msg]
    (found,) = said
    assert found.id == "mongolock.W009"
    assert found.msg.startswith("All calls of tests.test_mistakes.without_a_key() share one lock")
    assert '@mongo_locked("order:{order_id}")' in str(found.hint)


LATE_VIEWS = """
from django.urls import path
from django_mongolock import mongo_locked
from django_mongolock.conf import used_apps
used_apps["django_mongolock.absent"] = "A view"
@mongo_locked()
def late(request, pk): ...
urlpatterns = [path("<int:pk>/", late)]
"""


def test_what_only_views_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    """The checks import the views themselves, because Django's own check, the usual importer, may come later."""
    (tmp_path / "late_views.py").write_text(LATE_VIEWS)
    monkeypatch.syspath_prepend(tmp_path)
    settings.ROOT_URLCONF = "late_views"
    with patch.dict(used_apps, clear=True):
        assert [found.id for found in check_apps(app_configs=None)] == ["mongolock.E026"]
        del sys.modules["late_views"]
        clear_url_caches()
        shared_by_all.discard("late_views.late")
        assert any("late_views.late()" in found.msg for found in check_shared_locks(app_configs=None))
    shared_by_all.discard("late_views.late")


def test_metrics_without_their_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module's name in INSTALLED_APPS is accepted by Django, and would measure nothing."""
    config = AppConfig.create("django_mongolock.contrib.prometheus")
    monkeypatch.setattr(apps, "get_app_configs", lambda: [config])
    (found,) = check_settings(app_configs=None)
    assert found.id == "mongolock.W007"
    assert "django_mongolock.contrib.prometheus.PrometheusConfig" in str(found.hint)
    right = AppConfig.create("django_mongolock.contrib.prometheus.PrometheusConfig")
    monkeypatch.setattr(apps, "get_app_configs", lambda: [right])
    assert check_settings(app_configs=None) == []
