"""`claim` is a lock of an owner over several requests, in MongoDB and in memory, blocking and awaited."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import User
from django.contrib.sessions.models import Session
from django.core.management import call_command
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path
from django.utils import timezone
from pytest_django import Settings

from django_mongolock import LockLost, LockNotAcquired, mongo_lock
from django_mongolock.backends import mongo_store
from django_mongolock.claims import Claim, claim
from django_mongolock.exceptions import LockMisused
from django_mongolock.models import Lock
from django_mongolock.owners import claim_owner, release_owner
from django_mongolock.testing import override_locks
from tests.support.lock_documents import Locks
from tests.support.lock_fixtures import WITH_MONGO, Commands
from tests.support.programs import said_by
from tests.support.waiting import eventually
from tests.test_admin import browser
from tests.test_owners import request_of

pytestmark = [WITH_MONGO, pytest.mark.usefixtures("locks")]
Do = Callable[..., Any]


class TestClaim:
    """One object acquires the claim. Others that know the key and the owner extend and release it."""

    def test_over_several_requests(self, do: Do, key: str) -> None:
        """Every request makes its own object. The token stays the same, and the next claim has a larger one."""
        first = do(claim(key, owner="a"), "acquire")
        assert first.held
        assert 1_790 < first.remaining <= 1_800
        token = first.fencing_token
        second = claim(key, owner="a", lease=60)
        assert not second.held
        assert do(second, "renew").fencing_token == token
        assert second.acquired_at == first.acquired_at
        assert do(claim(key, owner="a"), "acquire").fencing_token == token
        assert do(claim(key, owner="a"), "release")
        assert not do(claim(key, owner="a"), "release")
        assert do(claim(key, owner="b"), "acquire").fencing_token > token

    def test_others_are_kept_out(self, do: Do, key: str) -> None:
        """Another owner's claim, a plain lock, and a lock with the very same owner are kept out. The error names the
        holder."""
        do(claim(key, owner="a", label="editing the cart"), "acquire")
        with pytest.raises(
            LockNotAcquired, match=r"editing the cart, owner claim:\w{32}, no process: a claim, for "
        ) as caught:
            do(claim(key, owner="b"), "acquire")
        assert 1_700 < caught.value.retry_after < 2_000
        for owner in (None, "a"):
            assert not mongo_lock(key, wait=0, owner=owner).try_acquire()
        with pytest.raises(LockLost, match=r"^lock '\S+' was lost: its owner does not hold it now$"):
            do(claim(key, owner="b"), "renew")
        assert not do(claim(key, owner="b"), "release")
        assert do(claim(key, owner="a"), "renew").held

    def test_what_a_process_holds_is_no_claim(self, do: Do, key: str) -> None:
        """A lock that a process holds for the owner is neither extended nor given back by a claim of that owner."""
        with mongo_lock(key, owner="a") as lock:
            with pytest.raises(LockNotAcquired):
                do(claim(key, owner="a"), "acquire")
            with pytest.raises(LockLost):
                do(claim(key, owner="a"), "renew")
            assert not do(claim(key, owner="a"), "release")
            lock.ensure_held()

    @pytest.mark.long
    def test_ends_with_its_lease(self, do: Do, key: str) -> None:
        """Without a renewal, a claim is free soon after its lease. The old claim is lost, and does not count as
        held."""
        made = do(claim(key, owner="a", lease=0.3), "acquire")
        assert eventually(lambda: not made.held, 5)
        with pytest.raises(LockLost):
            made.ensure_held()
        next_one = claim(key, owner="b")
        assert eventually(lambda: taken(next_one), 10)
        with pytest.raises(LockLost):
            do(made, "renew")
        assert not do(made, "release")
        assert next_one.renew().held

    def test_forced(self, do: Do, key: str) -> None:
        """A forced release, or the release of all locks of the owner, frees a claim."""
        made = do(claim(key, owner="a"), "acquire")
        assert Lock.objects.get(key=key).force_release()
        with pytest.raises(LockLost) as caught:
            do(made, "renew")
        assert caught.value.token is not None
        assert not made.held
        do(made, "acquire")
        assert release_owner("a") == 1
        assert taken(claim(key, owner="b"))

    def test_before_it_is_held(self, key: str) -> None:
        """The facts of a claim that is not held are errors that name the missing call. The repr shows the known
        facts."""
        made = claim(key, owner="a")
        for name in ("fencing_token", "acquired_at"):
            with pytest.raises(LockMisused, match=r"call acquire\(\) or renew\(\) first"):
                getattr(made, name)
        assert repr(made) == f"<Claim {made.key!r}, not known to be held>"
        with override_locks():
            made = claim(key, owner="a").acquire()
            assert repr(made).startswith(f"<Claim {made.key!r} held, token {made.fencing_token}, 1")

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"owner": None}, "an owner is a text"),
            ({"owner": HttpRequest()}, "or a request with a session"),
            ({"owner": ""}, "owner has 1 to 256 characters"),
            ({"owner": "a", "lease": 0}, "lease"),
            ({"owner": "a", "lease": -5}, "lease"),
            ({"owner": "a", "label": "x" * 300}, "label"),
        ],
    )
    def test_wrong(self, options: dict[str, Any], says: str) -> None:
        """Invalid arguments are refused before anything is sent."""
        with pytest.raises((TypeError, ValueError), match=says):
            claim("k", **options)


def taken(made: Claim) -> bool:
    try:
        return made.acquire().held
    except LockNotAcquired:
        return False


class TestSession:
    """A claim of a session ends with the session."""

    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_a_removed_session(self, key: str, asynchronous: bool) -> None:
        """F139: The next renewal of a claim whose session is gone raises LockLost, and frees the key."""
        request = request_of()
        made = claim(key, owner=request).acquire()
        request.session.save()
        Session.objects.all().delete()
        token = made.fencing_token
        with pytest.raises(LockLost) as caught:
            async_to_sync(made.arenew)() if asynchronous else made.renew()
        assert caught.value.token == token
        assert taken(claim(key, owner="b"))

    @pytest.mark.long
    def test_a_saved_user_sends_nothing(self, commands: Commands, key: str) -> None:
        """The save of a user sends no command to the locks, also with a new password or without is_active."""
        anna = User.objects.create_user("anna")
        claim(key, owner=request_of()).acquire()
        before = len(commands.sent)
        anna.set_password("another")
        anna.is_active = False
        anna.save()
        assert len(commands.sent) == before

    def test_a_new_session(self, key: str, locks: Locks) -> None:
        """The request that acquires a claim may renew it at once, before its session is stored."""
        request = request_of()
        made = claim(key, owner=request).acquire()
        assert made.renew().held
        assert asyncio.run(made.arenew()).held

    @pytest.mark.long
    def test_expiry(self, key: str, locks: Locks, settings: Settings) -> None:
        """When the session expires, the lock is free, however long its lease is. clearsessions finds nothing left to
        free."""
        settings.SESSION_COOKIE_AGE = 2
        request = request_of()
        made = claim(key, owner=request, lease=1_800).acquire()
        request.session.save()
        (session,) = Session.objects.all()
        assert made.remaining <= 1
        ends = Lock.objects.get(key=made.key).expires_at
        assert ends is not None
        assert ends <= session.expire_date + timedelta(seconds=0.5)
        assert eventually(lambda: timezone.now() > session.expire_date, 10)
        call_command("clearsessions")
        assert not Session.objects.exists()
        assert taken(claim(key, owner="b"))

    def test_a_long_session_does_not_lengthen_it(self, key: str, locks: Locks) -> None:
        """If the session lasts longer than the lease, the lease counts."""
        made = claim(key, owner=request_of(), lease=60).acquire()
        assert 50 < made.remaining <= 60


def open_item(request: HttpRequest, item: int) -> HttpResponse:
    """Open a work item, and claim it for the user."""
    try:
        return HttpResponse(str(claim(f"workitem:{item}", owner=request).acquire().fencing_token))
    except LockNotAcquired:
        return HttpResponse("someone else works on it", status=423)


def save_item(request: HttpRequest, item: int, last: bool) -> HttpResponse:
    """Save a work item in a later request, only while the claim is held."""
    try:
        work = claim(f"workitem:{item}", owner=request).renew()
    except LockLost:
        return HttpResponse("it was taken away", status=409)
    return HttpResponse(str(work.release() if last else work.fencing_token))


urlpatterns = [
    path("open/<int:item>/", open_item),
    path("save/<int:item>/", save_item, {"last": False}),
    path("done/<int:item>/", save_item, {"last": True}),
]


def test_work_items(locks: Locks, settings: Settings) -> None:
    """The story of the work items: each has one worker at a time over many requests of a session. A logout frees all
    remaining ones, opened before or after the login. The session's key is nowhere in a lock."""
    settings.ROOT_URLCONF = __name__
    anna, bert = Client(), Client()

    def ask(client: Client, *addresses: str) -> list[int]:
        return [client.get(f"/{address}/").status_code for address in addresses]

    assert ask(anna, "open/1", "open/2", "save/1", "save/2", "open/1") == [200] * 5
    assert ask(bert, "open/1", "save/1", "done/1", "open/3") == [423, 409, 409, 200]
    anna.force_login(User.objects.create_user("anna"))
    assert ask(anna, "save/1", "done/1", "save/1", "open/4", "open/3") == [200, 200, 409, 200, 423]
    assert ask(bert, "open/1", "open/2", "open/4") == [200, 423, 423]
    stored = repr(list(locks.collection.find({"_id": {"$regex": "workitem"}})))
    assert stored.count("'owner': 'session:") >= 4
    assert not {client.session.session_key for client in (anna, bert)} & set(re.findall(r"\w+", stored))
    anna.logout()
    assert ask(bert, "open/2", "open/4", "save/1", "save/3") == [200] * 4
    assert ask(anna, "save/2", "save/4") == [409, 409]


class TestLooking:
    """Lists, the admin and the ORM show claims."""

    def test_shown(self, key: str, locks: Locks) -> None:
        """F213: The table, JSON, the page and the ORM show a claim of its owner that no process holds."""
        claim(key, owner="session:x", label="checkout").acquire()
        owner = claim_owner("session:x")
        mongo_lock("other").acquire()
        (line,) = [line for line in said_by("list_locks", "--wide").splitlines() if key in line]
        assert f"checkout, no process: a claim · owner {owner}" in line
        assert "session:x" not in line
        (lock,) = Lock.objects.owned_by(owner)
        (holder,) = lock.holders
        assert (holder.owner, holder.host, holder.pid) == (owner, "no process: a claim", None)
        assert "no process: a claim" in browser("view_lock").get("/admin/django_mongolock/lock/").content.decode()

    def test_no_process(self, key: str, locks: Locks) -> None:
        """The dashboard does not show a claim among the processes."""
        claim(key, owner="a").acquire()
        page = browser("view_lock").get("/admin/django_mongolock/lockdashboard/").content.decode()
        assert "Processes" not in page
        assert key in page


def test_time_is_local(key: str, locks: Locks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The belief in a claim counts from before its command was sent. No read makes it longer."""
    send = mongo_store()._find_and_modify

    def slow(*arguments: Any, **command: Any) -> Any:
        reply = send(*arguments, **command)
        time.sleep(0.3)
        return reply

    monkeypatch.setattr(mongo_store(), "_find_and_modify", slow)
    made = claim(key, owner="a", lease=20).acquire()
    left = made.remaining
    assert left <= 20 - 0.3
    list(Lock.objects.all())
    assert made.remaining <= left
