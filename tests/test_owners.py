"""Locks of owners, with their rights, a release by others, and web sessions as owners."""

from __future__ import annotations

from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth import alogout, login, logout
from django.contrib.auth.models import AnonymousUser, User
from django.contrib.auth.signals import user_logged_out
from django.contrib.sessions.backends import signed_cookies
from django.contrib.sessions.backends.db import SessionStore
from django.contrib.sessions.models import Session
from django.http import HttpRequest

from django_mongolock import mongo_lock
from django_mongolock.exceptions import LockBackendFailed
from django_mongolock.models import Lock
from django_mongolock.owners import asession_owner, release_owner, session_owner
from tests.support.looking import held_elsewhere, holders, new_key

pytestmark = pytest.mark.django_db(databases=["default", "mongo"], transaction=True)


def request_of(session: Any = None) -> HttpRequest:
    """Return a request of this session, or of a new one."""
    request = HttpRequest()
    request.session = session or SessionStore()
    request.user = AnonymousUser()
    return request


@pytest.fixture
def anna() -> User:
    return User.objects.create_user("anna")


def sign_in(request: HttpRequest, user: User) -> None:
    login(request, user, backend="django.contrib.auth.backends.ModelBackend")


class TestRelease:
    """Everything that an owner has is released, and nothing else."""

    @pytest.mark.parametrize("how", ["function", "queryset"])
    def test_only_theirs(self, how: str) -> None:
        one, two, other, plain = (new_key() for _ in range(4))
        mine = mongo_lock(one, two, owner="job 5").acquire()
        with held_elsewhere(other, owner="job 55"), held_elsewhere(plain):
            assert {lock.key for lock in Lock.objects.owned_by("job 5")} == {one, two}
            count = release_owner("job 5") if how == "function" else Lock.objects.owned_by("job 5").force_release()
            assert count == 2
            assert holders(one) == holders(two) == []
            assert holders(other)
            assert holders(plain)
        assert not mine.release()

    @pytest.mark.parametrize("how", ["function", "queryset"])
    def test_among_other_holders(self, how: str) -> None:
        """If several callers hold a lock, only the owner's grant is taken."""
        key = new_key()
        mine = mongo_lock(key, mode="shared", owner="job 5").acquire()
        with held_elsewhere(key, mode="shared", owner="job 6"):
            if how == "function":
                assert release_owner("job 5") == 1
            else:
                assert Lock.objects.owned_by("job 5").filter(key=key).force_release() == 1
            assert [held["owner"] for held in holders(key)] == ["job 6"]
        assert not mine.release()

    def test_strings_are_literal(self) -> None:
        """F54: An owner is never an expression."""
        key = new_key()
        with held_elsewhere(key, owner="$owner"):
            assert release_owner("$holders.owner") == 0
            assert len(holders(key)) == 1


class TestSession:
    def test_two_requests_at_once(self) -> None:
        """F131: The first two requests of a session that ask for an owner get the same one, whichever is saved last.
        Another session gets another one. No owner shows the key of the session."""
        visitor = request_of()
        visitor.session.save()
        first, second = (request_of(SessionStore(visitor.session.session_key)) for _ in range(2))
        owner = session_owner(first)
        assert async_to_sync(asession_owner)(second) == owner
        for request in (first, second):
            request.session.save()
        assert session_owner(request_of(SessionStore(visitor.session.session_key))) == owner
        assert session_owner(request_of()) != owner
        assert str(visitor.session.session_key) not in owner

    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_a_new_session(self, asynchronous: bool) -> None:
        """The owner is stored with the response, not before. Later requests have the owner of the first."""
        request = request_of()
        owner = async_to_sync(asession_owner)(request) if asynchronous else session_owner(request)
        assert not Session.objects.exists()
        request.session.save()
        again = request_of(SessionStore(request.session.session_key))
        assert session_owner(again) == owner != session_owner(request_of())

    def test_a_session_in_the_cookie(self) -> None:
        """A session in the cookie has no lasting key. The owner is random, and kept in the session."""
        first, other = (request_of(signed_cookies.SessionStore()) for _ in range(2))
        owner = session_owner(first)
        first.session["basket"] = [1]
        first.session.save()
        again = request_of(signed_cookies.SessionStore(first.session.session_key))
        assert session_owner(again) == owner != session_owner(other)

    def test_with_the_user(self, anna: User) -> None:
        """A login keeps the owner, even if nothing was claimed before. A logout makes a new one."""
        request = request_of()
        owners = [session_owner(request)]
        sign_in(request, anna)
        owners.append(session_owner(request))
        logout(request)
        owners.append(session_owner(request))
        assert owners[0] == owners[1] != owners[2]

    @pytest.mark.parametrize("asynchronous", [False, True])
    def test_logout_releases(self, anna: User, asynchronous: bool) -> None:
        request, other, key, kept = request_of(), request_of(), new_key(), new_key()
        sign_in(request, anna)
        sign_in(other, anna)
        mine = mongo_lock(key, owner=session_owner(request)).acquire()
        with held_elsewhere(kept, owner=session_owner(other)):
            if asynchronous:
                async_to_sync(alogout)(request)
            else:
                logout(request)
            assert holders(key) == []
            assert holders(kept)
        assert not mine.release()

    def test_the_signal_of_a_logout_releases(self, anna: User) -> None:
        """The lock is released before the signal returns. The later flush of the session would release it in the
        background."""
        request, key = request_of(), new_key()
        mine = mongo_lock(key, owner=session_owner(request)).acquire()
        user_logged_out.send(sender=User, request=request, user=anna)
        assert holders(key) == []
        assert not mine.release()

    def test_logout_while_mongodb_is_away(self, anna: User, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*args: Any, **kwargs: Any) -> None:
            raise LockBackendFailed("away")

        request = request_of()
        sign_in(request, anna)
        session_owner(request)
        monkeypatch.setattr("django_mongolock.inspection.operations.release_owner", fail)
        logout(request)
        assert not request.session.keys()

    def test_no_session(self) -> None:
        """Without a session, the error names the missing middleware."""
        with pytest.raises(TypeError, match="SessionMiddleware"):
            session_owner(HttpRequest())
