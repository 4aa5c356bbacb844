"""The acquisitions that are granted, those that are refused, and the texts of the refusals."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from bson import Code, Int64

from django_mongolock import LockError, LockNotAcquired
from django_mongolock.exceptions import (
    DocumentChanged,
    DocumentDamaged,
    DocumentHeld,
    DocumentLockLost,
    DocumentNotFound,
    DocumentRefused,
    LockMisused,
    StaleToken,
)
from tests.documents.conftest import Document, Ground
from tests.support.lock_fixtures import WITH_MONGO
from tests.support.programs import python

pytestmark = WITH_MONGO
#: A program that prints its process's name. The process then ends.
NAME = "from django_mongolock.engine.protocol.processes import this_process; print(this_process())"


@pytest.fixture(scope="module")
def dead() -> str:
    """The name of a process that has ended."""
    return python("-c", NAME).strip()


class TestGranted:
    """One update sets holder, state and time, and raises the version."""

    @pytest.mark.parametrize(
        "before",
        [
            {},
            {"holder": None, "state": "exported"},
            {"holder": "", "state": "exported"},
            {"holder": None, "state": "new, and never heard of"},
            {"holder": None, "state": "exporting"},
            {"holder": "other", "state": "exported"},
            {"holder": "other", "state": "withdraw_failed"},
            {"holder": "other", "state": "exporting", "time": datetime(2020, 1, 1, tzinfo=UTC)},
            {"holder": "other", "state": "new", "time": datetime(2020, 1, 1, tzinfo=UTC)},
            {"holder": "other", "state": "new"},
        ],
        ids=str,
    )
    def test_granted(self, ground: Ground, before: dict[str, Any]) -> None:
        """F136: A document is granted if it has no holder, or if the work of its holder has ended or is stale, whatever
        the owner and the state."""
        id_ = ground.add(7, **before)
        started = datetime.now(UTC).replace(tzinfo=None)
        held = ground.lock.acquire((id_, 7), "exporting", owner="me")
        assert ground.read(id_, "holder", "state", "version") == ("me", "exporting", 8)
        assert abs(ground.read(id_, "time") - started) < timedelta(seconds=30)
        assert (held.id, held.owner, held.pending, held.version) == (id_, "me", "exporting", 8)
        assert held.since == ground.read(id_, "time").replace(tzinfo=UTC)
        assert 0 < held.remaining <= 60
        assert ground.raw(id_)["price"] == 5

    def test_changes_come_with_the_grant(self, ground: Ground) -> None:
        """The changes are written by the same update, unchanged. Text that looks like a field stays text, also in an
        owner."""
        id_ = ground.add(1)
        changes = {"price": 9, "title": "$price", "body": "$$NOW"}
        held = ground.lock.acquire((id_, 1), "exporting", changes=changes, owner="$price")
        assert ground.read(id_, "price", "title", "body", "holder") == (9, "$price", "$$NOW", "$price")
        with pytest.raises(DocumentChanged):
            ground.lock.acquire((id_, 1), "exporting", changes={"price": 1})
        held.finish("exported", {"title": "$title"})
        assert ground.read(id_, "title", "version", "price") == ("$title", 3, 9)

    @pytest.mark.parametrize("missing", [{}, {"documentVersion": None}], ids=str)
    def test_no_version(self, plain: Ground, missing: Document) -> None:
        """A document that never had a version has version 0, and 1 after the first grant. The document is granted
        once."""
        plain.collection.insert_one({"_id": "old", **missing})
        read = plain.raw("old")
        held = plain.lock.acquire(read, "exporting", final="exported")
        assert (held.version, plain.raw("old")["documentVersion"]) == (1, 1)
        held.finish("exported")
        for given in (read, ("old", 0)):
            with pytest.raises(DocumentChanged):
                plain.lock.acquire(given, "exporting")

    @pytest.mark.parametrize("version", [0, -3, Int64(7), 2**31 - 1, 2**40])
    def test_any_whole_number_is_a_version(self, plain: Ground, version: int) -> None:
        """A whole number stays one, also past 32 bits, and a long one stays long. The type is part of other programs'
        schema."""
        held = plain.lock.acquire((plain.add(version), version), "exporting", changes={"documentVersions": 2})
        assert held.version == version + 1 == plain.raw(held.id)["documentVersion"]
        held.update(price=1)
        held.finish("exported", {"price": 2})
        (found,) = plain.collection.aggregate([{"$project": {"type": {"$type": "$documentVersion"}}}])
        assert (found["type"] == "long") is (isinstance(version, Int64) or version >= 2**31 - 1)


class TestRefused:
    """Each way to fail has an error of its own, and changes nothing."""

    def refused(self, ground: Ground, id_: Any, version: int, owner: str = "me") -> LockError:
        before = ground.collection.find_one({"_id": id_})
        with pytest.raises(LockError) as caught:
            ground.lock.acquire((id_, version), "exporting", owner=owner, changes={"price": 99})
        batch = ground.lock.acquire_many([(id_, version)], "exporting", owner=owner)
        assert not batch.held
        assert type(batch.refused[id_]) is type(caught.value)
        assert ground.collection.find_one({"_id": id_}) == before
        return caught.value

    def test_no_such_document(self, ground: Ground) -> None:
        """The document was deleted, or never existed."""
        id_ = ground.add(1)
        ground.collection.delete_one({"_id": id_})
        error = self.refused(ground, id_, 1)
        assert isinstance(error, DocumentNotFound)
        assert error.id == id_

    @pytest.mark.parametrize("given", [6, 8])
    def test_stale_version(self, ground: Ground, given: int) -> None:
        """The error has the given version and the stored one."""
        error = self.refused(ground, ground.add(7), given)
        assert isinstance(error, DocumentChanged)
        assert (error.given, error.found) == (given, 7)

    @pytest.mark.parametrize("state", ["exporting", "withdrawing", "never heard of", None])
    def test_held(self, ground: Ground, state: str | None) -> None:
        """F136: The error names the flow that holds the document, the start, and the time of staleness, in any
        state."""
        since = datetime.now(UTC).replace(microsecond=0) - timedelta(seconds=20)
        error = self.refused(ground, ground.add(7, holder="other", state=state, time=since), 7)
        assert isinstance(error, DocumentHeld)
        assert isinstance(error, LockNotAcquired)
        assert (error.holder, error.since, error.state) == ("other", since, state)
        assert 10 < error.retry_after <= 30
        assert error.stale_in is not None
        assert 20 < error.stale_in < 41

    @pytest.mark.parametrize(
        ("ago", "least", "most"), [(0, 0.5, 5), (20, 20, 30), (40, 5, 20), (-3_600, 0.5, 0.5), (None, 0.5, 0.5)]
    )
    def test_when_to_try_again(self, ground: Ground, ago: int | None, least: float, most: float) -> None:
        """The time is as long again as the hold so far, and short once the document is stale, whichever clock wrote the
        time (F62)."""
        id_ = ground.add(1, holder="other", state="exporting")
        if ago is not None:
            ground.age(id_, ago)
        error = self.refused(ground, id_, 1)
        assert isinstance(error, DocumentHeld)
        assert least <= error.retry_after <= most
        assert (error.stale_in is None) is (ago is None)

    @pytest.mark.parametrize(
        ("role", "value"),
        [
            *[("version", value) for value in ("7", 7.0, True, [7], Int64(2**63 - 1))],
            *[("holder", value) for value in (5, ["me"], {"me": 1}, False, Code("me"))],
            *[("state", value) for value in (1, ["exported"])],
            *[("time", value) for value in ("2030-01-01", 1_900_000_000)],
        ],
        ids=str,
    )
    def test_damaged(self, plain: Ground, role: str, value: Any) -> None:
        """An unreadable document does not count as free. The error names the field."""
        id_ = plain.add(7, state="exported")
        plain.change(id_, **{role: value})
        error = self.refused(plain, id_, 7)
        assert isinstance(error, DocumentDamaged)
        assert plain.names[role] in str(error)

    def test_an_array_as_a_parent(self, make: Callable[..., Ground]) -> None:
        """F138: A lock with fields inside of an array is damaged. The error comes at once, also with wait=."""
        ground = make("other names")
        id_ = ground.add(7)
        ground.change(id_, lock=[])
        assert isinstance(self.refused(ground, id_, 7), DocumentDamaged)
        with pytest.raises(DocumentDamaged):
            ground.lock.acquire((id_, 7), "exporting", wait=None)

    def test_freed_in_the_moment_of_looking(self, plain: Ground, strike: Any) -> None:
        """A caller that is refused, and then finds the document free, asks again."""
        id_ = plain.add(7, holder="other", state="exporting")
        strike(plain, before=lambda number: plain.change(id_, holder=None) if number == 2 else None)
        assert plain.lock.acquire((id_, 7), "exporting").version == 8

    @pytest.mark.parametrize(
        "error",
        [
            DocumentNotFound("ads", 5),
            DocumentChanged("ads", 5, 6, 7),
            DocumentHeld("ads", 5, "me", "exporting", datetime(2030, 1, 1, tzinfo=UTC), 3.5, 40.0),
            DocumentLockLost("ads", 5, 7, "me", "exporting"),
            DocumentLockLost("ads", 5, 7, "me", "exporting", maybe_written=True),
            DocumentRefused("ads", 5, "MongoDB refused it (code 121, DocumentValidationFailure)"),
            DocumentDamaged("ads", 5, "its field 'v' is missing"),
            StaleToken(5, 6, "fencing_token", "ads 7"),
        ],
        ids=lambda error: type(error).__name__,
    )
    def test_errors_survive_pickling(self, error: LockError) -> None:
        """Celery pickles the errors to pass them between processes."""
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301
        assert vars(copy) == vars(error)
        assert str(copy) == str(error)
        assert "5" in str(error)


class TestOwners:
    """F70: The same owner resumes the documents of a dead run, and stale ones, but never those of a living run."""

    @pytest.mark.parametrize(
        ("owner", "process", "age", "granted"),
        [
            ("me", "alive", 0, False),
            ("me", "unknown", 0, False),
            ("me", "dead", 0, True),
            ("Me", "dead", 0, False),
            ("other", "dead", 0, False),
            ("me", "alive", 61, True),
            ("other", "alive", 61, True),
        ],
    )
    @pytest.mark.parametrize("many", [False, True])
    def test_resuming(  # noqa: PLR0917
        self, ground: Ground, dead: str, owner: str, process: str, age: float, granted: bool, many: bool
    ) -> None:
        """The process named by the token and the time decide about resuming."""
        held = ground.lock.acquire((ground.add(1), 1), "exporting", owner="me")
        if process != "alive":
            ground.change(held.id, token=f"1.ab:2 {dead if process == 'dead' else 'of another machine'}")
        ground.age(held.id, age)
        document = (held.id, 2)
        if many:
            batch = ground.lock.acquire_many([document], "exporting", owner=owner, final="exported")
            assert bool(batch.held) is granted
            with batch:
                return
        if not granted:
            with pytest.raises(DocumentHeld):
                ground.lock.acquire(document, "exporting", owner=owner)
            return
        next_run = ground.lock.acquire(document, "exporting", owner=owner)
        assert next_run.version == 3
        with pytest.raises(DocumentLockLost):
            held.finish("exported")
        next_run.finish("exported")


class TestWaiting:
    """wait= retries again and again, with the current document."""

    def test_freed(self, ground: Ground, strike: Any) -> None:
        """The document is read again, and the work is chosen for its new state."""
        id_ = ground.add(1, holder="other", state="exporting", opted_in=True)
        more = {"opted_in": False, "version": 5}
        strike(ground, before=lambda number: ground.change(id_, holder=None, **more) if number == 4 else None)

        def choose(document: Any) -> str:
            opted_in = document["opted_in"] if isinstance(document, dict) else document.opted_in
            return "exporting" if opted_in else "withdrawing"

        read = ground.lock._source.instance(ground.raw(id_))
        held = ground.lock.acquire(read, choose, wait=10)
        assert (held.pending, held.version) == ("withdrawing", 6)

    def test_bounded(self, plain: Ground) -> None:
        """After the wait, the document is refused with the facts found. A document that is deleted meanwhile is refused
        at once."""
        id_ = plain.add(1, holder="other", state="exporting")
        started = time.monotonic()
        with pytest.raises(DocumentHeld):
            plain.lock.acquire((id_, 1), "exporting", wait=0.2)
        assert 0.2 <= time.monotonic() - started < 5
        with pytest.raises(DocumentNotFound):
            plain.lock.acquire(("none", 1), "exporting", wait=5)

    def test_outdated(self, plain: Ground) -> None:
        """Without waiting, another version is a refusal. With it, the document is read again."""
        id_ = plain.add(5)
        assert plain.lock.acquire((id_, 4), "exporting", wait=timedelta(seconds=1)).version == 6


class TestWrongCalls:
    """A call that cannot be meant is reported before any command."""

    @pytest.mark.parametrize(
        ("document", "options", "problem"),
        [
            (("x", "1"), {}, "whole number"),
            (("x", True), {}, "whole number"),
            (("x", 1, 2), {}, r"\(id, version\)"),
            ((None, 1), {}, "without an id"),
            (({"a": 1}, 1), {}, "id of type dict"),
            (5, {}, r"\(id, version\)"),
            (("x", 1), {"pending": "exported"}, "not declared as a pending"),
            (("x", 1), {"pending": None}, "name the pending"),
            (("x", 1), {"pending": lambda _: "exporting"}, "as you have read it"),
            (("x", 1), {"final": "exporting"}, "not declared as a final"),
            (("x", 1), {"owner": ""}, "1 to 256"),
            (("x", 1), {"owner": 5}, "must be a str"),
            (("x", 1), {"owner": "a\nb"}, "control"),
            (("x", 1), {"changes": {"lockedBy": "me"}}, "lock's own"),
            (("x", 1), {"changes": {"lockedByToken": "me"}}, "lock's own"),
            (("x", 1), {"changes": {"documentVersion.x": 1}}, "lock's own"),
            (("x", 1), {"changes": {"_id": 1}}, "not _id"),
            (("x", 1), {"changes": {"$x": 1}}, "cannot be"),
            (("x", 1), {"changes": {"a": 1, "a.b": 1}}, "already"),
            ({"_id": 5, "documentVersion": "3"}, {}, "is str, not a whole number"),
        ],
    )
    def test_arguments(self, plain: Ground, document: Any, options: Any, problem: str) -> None:
        """A wrong argument is an error that names the cure."""
        with pytest.raises((TypeError, ValueError, DocumentDamaged), match=problem):
            plain.lock.hold(document, **{"pending": "exporting", **options})

    def test_used_twice(self, plain: Ground) -> None:
        """Each use of the block is a new hold."""
        hold = plain.lock.hold((plain.add(1), 1), "exporting", final="exported")
        with hold:
            pass
        with pytest.raises(LockMisused, match="once for each block"), hold:
            pass
