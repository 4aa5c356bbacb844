"""Anything at all, at every way in: it works, or it is refused in the words that the documentation promises."""

from __future__ import annotations

import io
import re
import string
import time
import unicodedata
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

import bson
import pytest
from bson import Code, DatetimeMS, DBRef, Decimal128, Int64, MaxKey, ObjectId, Regex, Timestamp
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from django_mongolock import mongo_lock, mongo_semaphore
from django_mongolock.engine import text_checks
from django_mongolock.engine.rule import deadlock, document, replies
from django_mongolock.exceptions import LockDocumentDamaged
from django_mongolock.inspection import snapshot
from django_mongolock.inspection.patterns import glob
from django_mongolock.keys import lock_key
from django_mongolock.locks import LockOptions
from django_mongolock.models import Lock
from tests.support.lock_documents import DAMAGE, Locks, entry, waiter
from tests.support.lock_documents import document as lock_document
from tests.support.lock_fixtures import WITH_MONGO
from tests.test_admin import LIST, NAMES, browser

#: What means something to somebody: format strings, MongoDB, regular expressions, SQL, HTML, shells, terminals.
WORDS = [
    *string.punctuation, "{", "}", "{a}", "{a.b}", "{a[0]}", "{a!r}", "{a:>9}", "{}", "{0}", "$", "$$ROOT", "$where",
    ".", "\0", "\n", "\ud800", "\u2028", "\u202e", "\u0301", "\u0345", "\u037e", "é", "ﬀ", "🔒", "(a+)+$", "[", "\\",
    "*", "?", "<script>", "'", '"', "%s", "%(x)s", "../", "--", "x" * 600, "a" * 3_000, "9" * 5_000, "1e999", "nan",
    " ", "",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(WORDS) | st.text(max_size=5), max_size=6).map("".join)

SCALARS: Any = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**63), 2**63 - 1).map(Int64),
    st.floats(),
    TEXTS,
    st.binary(max_size=20),
    st.datetimes(timezones=st.just(UTC)),
    st.integers(-(2**63), 2**63 - 1).map(DatetimeMS),
    st.sampled_from([Regex("(a+)+$"), Code("x"), ObjectId("0" * 24), Timestamp(1, 1), MaxKey(), Decimal128("NaN")]),
    st.just(DBRef("a", 1)),
)
FIELD_NAMES = st.sampled_from(sorted({*document.DOCUMENT_FIELDS, *document.HOLDER_FIELDS, "label", "beat"})) | TEXTS
VALUES: Any = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELD_NAMES, inner, max_size=4), max_leaves=8
)


class Anything:
    """An object of a class that we do not know, with attributes and items of any kind."""

    def __init__(self, value: Any) -> None:
        self.b = self.pk = value

    def __getitem__(self, key: object) -> Any:
        return self.b


ARGUMENTS = VALUES | VALUES.map(Anything)


@pytest.mark.long
@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=2, max_size=2, unique=True))
@example([("a:b", ""), ("a", "b:")])
@example([("\u037e", "x"), (";", "x")])
def test_two_calls_with_one_key(calls: list[tuple[str, str]]) -> None:
    """F54: nobody can choose a value that makes the key of another call, unless the values are the same text."""
    keys = []
    for first, second in calls:
        with suppress(ValueError):
            keys.append(text_checks.check_key(str(lock_key("k:{a}:{b}", a=first, b=second))))
    same = len({tuple(map(_composed, call)) for call in calls}) == 1
    assert same or len(set(keys)) == len(keys)


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


@pytest.mark.long
@given(
    st.lists(VALUES, max_size=3), st.dictionaries(st.sampled_from([*LockOptions.__annotations__, "timeout"]), VALUES)
)
@example(["k"], {"lease": float("nan")})
@example(["k"], {"lease": 10**400})
@example(["k"], {"wait": -1e-9})
@example(["k"], {"owner": "a" + "\u0300\u0327" * 50_000})
@example(["k"], {"using": "\0"})
def test_arguments_of_locks(keys: list[Any], options: dict[str, Any]) -> None:
    """F58: TypeError, ValueError, or that there is no such alias; before anything is sent, since nobody is there."""
    makers: list[Any] = [mongo_lock, partial(mongo_semaphore, permits=3)]
    for make in makers:
        with suppress(TypeError, ValueError, ImproperlyConfigured):
            lock = make(*keys, **options)
            assert all(type(key) is str for key in lock.keys)
            repr(lock)


@pytest.mark.long
@given(TEXTS, st.sampled_from(["", "shop:"]), st.lists(TEXTS, max_size=3))
@example("*a" * 170, "", ["a" * 512 + "!"])
def test_patterns(pattern: str, prefix: str, keys: list[str]) -> None:
    """F56: whatever somebody searches for is a pattern or a ValueError; it is never slow."""
    with suppress(ValueError):
        match = glob(pattern, prefix)
        bson.encode(match.query())
        found = re.compile(match.regex.replace(r"\z", r"\Z"))
        started = time.thread_time()
        for key in keys:
            found.search(key[: text_checks.MAX_KEY_BYTES])
        assert time.thread_time() - started < 2


MOMENT = datetime(2026, 1, 1, tzinfo=UTC)
DOCUMENTS = st.one_of(
    st.dictionaries(FIELD_NAMES, VALUES),
    st.builds(
        lambda change, holder, queued: {
            **lock_document("k", [{**entry(1), **holder}], [{**waiter(2), **queued}]),
            **change,
        },
        *[st.dictionaries(FIELD_NAMES, VALUES, max_size=2)] * 3,
    ),
)


@pytest.mark.long
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(DOCUMENTS)
def test_documents_that_are_read(found: dict[str, Any]) -> None:
    """F55: whatever is stored, it is judged, described and searched without an error, and never shown with a grant."""
    damage = document.find_damage(found)
    assert damage is None or len(damage) < 6_000
    computed = {"now": MOMENT, "whole": damage is None, "released": False}
    computed |= {"holding": 1, "more_permits": 2, "queue": {"waiting": 1}}
    shown = snapshot.read_snapshot({"_id": "k", **found, **computed})
    assert (shown.damage is None) <= (damage is None)
    for name in ("holders", "waiters"):
        for item in found.get(name) or () if isinstance(found.get(name), list) else ():
            document.is_holder(item)
            if document.is_waiter(item):
                assert "secret-grant" not in document.describe(item, MOMENT)
    deadlock.cycles([{"_id": "k", **found}], MOMENT)


@pytest.mark.long
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(["mine", "holder", "queued", "first_end", "place"]), VALUES | DOCUMENTS))
@example({"mine": entry(1), "holder": {**entry(1), "until": DatetimeMS(2**62)}})
def test_answers_that_are_read(answer: dict[str, Any]) -> None:
    """F55: an answer made of a strange document is LockDocumentDamaged, or says that nothing is held by us."""
    raw = {"now": MOMENT, "waiting": 0, **{k: v for k, v in answer.items() if k != "place" or isinstance(v, int)}}
    with suppress(LockDocumentDamaged):
        reply = replies.read_reply("k", raw)
        assert not reply.held or document.is_holder(raw["mine"])


@pytest.mark.long
@given(VALUES)
@example({"to": "s", "grant": "g", "token": "1", "at": 5})
@example({"granted": [{"to": "s"}, None]})
def test_bells_that_are_read(message: Any) -> None:
    """F55: what a bell tells may have been written by somebody else."""
    bell = replies.read_bell(message)
    assert bell is None or (type(bell.session), type(bell.grant)) == (str, str)


# These need a server.

SLOW = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
PARAMETERS = ["q", "o", "p", "state", "mode", "e", "all", "_popup", "_to_field", "_facets", "key", "key__regex", "pk",
              "id__in"]  # fmt: skip


@pytest.fixture
def strange(locks: Locks) -> Locks:
    """A collection with everything in it that is strange, and one lock that is not."""
    for name, (change, _) in DAMAGE.items():
        locks.add(name, [entry(1)], [waiter(2)], change)
    locks.collection.insert_many([{"_id": value} for value in (7, 1.5, ObjectId("0" * 24), {"a": 1}, None)])
    locks.held("healthy")
    return locks


@pytest.mark.long
@WITH_MONGO
def test_query_strings_of_the_admin(strange: Locks) -> None:
    """F55, F56: any query string, while the collection is full of strange documents: a page or a refusal, no crash."""
    client = browser(*NAMES)

    @SLOW
    @given(st.dictionaries(st.sampled_from(PARAMETERS) | TEXTS, TEXTS, max_size=4))
    @example({"state": "all", "q": "(a+)+$"})
    @example({"p": "9" * 30})
    @example({"o": "1.2.-99.x"})
    def ask(query: dict[str, str]) -> None:
        data = {k: v.encode(errors="replace").decode() for k, v in query.items()}
        data = {k.encode(errors="replace").decode(): v for k, v in data.items()}
        assert client.get(LIST, data).status_code in (200, 302, 400)

    ask()
    assert "healthy" in client.get(LIST).content.decode()


@pytest.mark.long
@WITH_MONGO
def test_arguments_of_commands(strange: Locks) -> None:
    """F55, F56: any arguments: what was asked for, or an error in words, in the terminal and as JSON."""
    options = ["--key", "--owner", "--json", "--all", "--stale", "--limit", "--older-than", "--batch-size", "--dry-run",
               "--no-input", "--ask", "--by", "--waiting", "--deadlocks", "--database"]  # fmt: skip
    commands = ["list_locks", "clear_stale_locks", "release_lock"]

    @SLOW
    @given(st.sampled_from(commands), st.lists(st.sampled_from(options) | TEXTS | st.just("mongo"), max_size=4))
    @example("list_locks", ["--all", "--limit", "0"])
    @example("release_lock", ["holders has a number", "--ask"])
    @example("release_lock", ["holders has a number", "--no-input"])
    def run(command: str, arguments: list[str]) -> None:
        with suppress(CommandError):
            call_command(command, *arguments, stdout=io.StringIO(), stderr=io.StringIO())

    run()
    assert strange.read("healthy")["_id"] == "healthy"


@pytest.mark.long
@WITH_MONGO
def test_queries_of_locks(strange: Locks) -> None:
    """F55: any text in any query; every lock that is found can be shown."""

    @SLOW
    # MongoDB's regular expressions, which the prefix becomes, cannot hold NUL; no key has one.
    @given(TEXTS.map(lambda text: text.encode(errors="replace").decode().replace("\x00", "")))
    def look(text: str) -> None:
        for queryset in (
            Lock.objects.filter(key=text),
            Lock.objects.filter(key__startswith=text[:50]),
            Lock.objects.held().filter(holders__owner=text),
            Lock.objects.filter(key__in=[text, "healthy"]),
        ):
            for lock in queryset:
                assert (str(lock), lock.holders, lock.expires_at) is not None

    look()
    assert len(list(Lock.objects.all())) >= len(DAMAGE)
