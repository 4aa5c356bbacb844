"""Which acquisitions are granted, which are refused, and what the refusals say."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from bson import Code, Int64

from django_mongolock import (
    DocumentChanged,
    DocumentDamaged,
    DocumentHeld,
    DocumentLockLost,
    DocumentNotFound,
    DocumentRefused,
    LockError,
    LockMisused,
    LockNotAcquired,
    StaleToken,
)
from django_mongolock.documents.sender import Sender
from tests.documents.conftest import Document, Ground
from tests.support.lock_fixtures import WITH_MONGO

pytestmark = WITH_MONGO


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
            {"holder": "somebody", "state": "exported"},
            {"holder": "somebody", "state": "withdraw_failed"},
        ],
        ids=str,
    )
    def test_granted(self, ground: Ground, before: dict[str, Any]) -> None:
        """It has no holder, or no work on it is under way, or the same flow has it."""
        id_ = ground.add(7, **before)
        started = datetime.now(UTC).replace(tzinfo=None)
        held = ground.lock.acquire((id_, 7), "exporting", owner="me")
        assert ground.read(id_, "holder", "state", "version") == ("me", "exporting", 8)
        assert abs(ground.read(id_, "time") - started) < timedelta(seconds=30)
        assert (held.id, held.owner, held.pending, held.version) == (id_, "me", "exporting", 8)
        assert held.since == ground.read(id_, "time").replace(tzinfo=UTC)
        assert 0 < held.remaining <= 60
        assert ground.raw(id_)["price"] == 5

    def test_an_owner_that_nobody_else_has(self, ground: Ground) -> None:
        """Without owner= nobody is the same flow by accident."""
        id_ = ground.add(1)
        ground.lock.acquire((id_, 1), "exporting")
        with pytest.raises(DocumentHeld):
            ground.lock.acquire((id_, 2), "exporting")

    def test_changes_come_with_the_grant(self, ground: Ground) -> None:
        """They are written by the same update, as they are: text that names a field is text."""
        id_ = ground.add(1)
        changes = {"price": 9, "title": "$price", "body": "$$NOW"}
        held = ground.lock.acquire((id_, 1), "exporting", changes=changes)
        assert ground.read(id_, "price", "title", "body") == (9, "$price", "$$NOW")
        with pytest.raises(DocumentChanged):
            ground.lock.acquire((id_, 1), "exporting", changes={"price": 1})
        assert ground.raw(id_)["price"] == 9
        held.finish("exported", {"title": "$title"})
        assert ground.read(id_, "title", "version") == ("$title", 3)

    def test_an_owner_that_looks_like_a_field(self, ground: Ground) -> None:
        """Every text of a caller is a literal."""
        id_ = ground.add(1)
        ground.lock.acquire((id_, 1), "exporting", owner="$price")
        assert ground.read(id_, "holder") == "$price"
        with pytest.raises(DocumentHeld):
            ground.lock.acquire((id_, 2), "exporting", owner="$$ROOT")

    @pytest.mark.parametrize("missing", [{}, {"documentVersion": None}], ids=str)
    def test_no_version(self, plain: Ground, missing: Document) -> None:
        """A document that never had a version has version 0, and 1 after the first grant; it is granted once."""
        plain.collection.insert_one({"_id": "old", **missing})
        read = plain.raw("old")
        held = plain.lock.acquire(read, "exporting", final="exported")
        assert (held.version, plain.raw("old")["documentVersion"]) == (1, 1)
        held.finish("exported")
        for given in (read, ("old", 0)):
            with pytest.raises(DocumentChanged):
                plain.lock.acquire(given, "exporting")
        with plain.lock.acquire_many([plain.raw("old")], "exporting", final="exported") as batch:
            assert [one.version for one in batch] == [2]

    def test_a_long_version_stays_long(self, plain: Ground) -> None:
        """Its type is part of the schema of other programs."""
        held = plain.lock.acquire((plain.add(Int64(7)), 7), "exporting", changes={"price": 1})
        held.finish("exported", {"price": 2})
        types = plain.collection.aggregate([{"$project": {"type": {"$type": "$documentVersion"}}}])
        assert [found["type"] for found in types] == ["long"]

    @pytest.mark.parametrize("version", [0, -3, Int64(7), 2**31 - 1, 2**40])
    def test_any_whole_number_is_a_version(self, plain: Ground, version: int) -> None:
        """It stays one, also past 32 bits."""
        held = plain.lock.acquire((plain.add(version), version), "exporting")
        assert held.version == version + 1
        assert plain.raw(held.id)["documentVersion"] == version + 1


class TestRefused:
    """Each way to fail has an error of its own, and changes nothing."""

    @pytest.mark.parametrize(
        ("ago", "least", "most"), [(0, 0.5, 5), (20, 20, 30), (40, 5, 20), (3_600, 0.5, 0.5), (-3_600, 0.5, 0.5)]
    )
    def test_when_to_try_again(self, ground: Ground, ago: int, least: float, most: float) -> None:
        """After as long again as it has been held; and soon once it is stale, whichever clock wrote the time (F62)."""
        id_ = ground.add(1, holder="other", state="exporting")
        time = {ground.names["time"]: {"$subtract": ["$$NOW", ago * 1_000]}}
        ground.collection.update_one({"_id": id_}, [{"$set": time}])
        with pytest.raises(DocumentHeld) as caught:
            ground.lock.acquire((id_, 1), "exporting", owner="me")
        assert least <= caught.value.retry_after <= most
        assert caught.value.stale_in is not None
        assert min(60, max(0, 30 - ago)) <= caught.value.stale_in <= min(60, max(0, 60 - ago))

    def refused(self, ground: Ground, id_: Any, version: int, owner: str = "me") -> LockError:
        before = ground.collection.find_one({"_id": id_})
        with pytest.raises(LockError) as caught:
            ground.lock.acquire((id_, version), "exporting", owner=owner, changes={"price": 99})
        assert ground.collection.find_one({"_id": id_}) == before
        batch = ground.lock.acquire_many([(id_, version)], "exporting", owner=owner)
        assert not batch.held
        assert type(batch.refused[id_]) is type(caught.value)
        assert ground.collection.find_one({"_id": id_}) == before
        return caught.value

    def test_no_such_document(self, ground: Ground) -> None:
        """It was deleted, or never was."""
        id_ = ground.add(1)
        ground.collection.delete_one({"_id": id_})
        error = self.refused(ground, id_, 1)
        assert isinstance(error, DocumentNotFound)
        assert error.id == id_

    @pytest.mark.parametrize("given", [6, 8])
    def test_stale_version(self, ground: Ground, given: int) -> None:
        """The error says which version was given, and which was found."""
        error = self.refused(ground, ground.add(7), given)
        assert isinstance(error, DocumentChanged)
        assert (error.given, error.found) == (given, 7)

    @pytest.mark.parametrize("state", ["exporting", "withdrawing", "never heard of", None])
    def test_held(self, ground: Ground, state: str | None) -> None:
        """The error says which flow has it, since when, and when it would be stale."""
        since = datetime.now(UTC).replace(microsecond=0) - timedelta(seconds=20)
        error = self.refused(ground, ground.add(7, holder="other", state=state, time=since), 7)
        assert isinstance(error, DocumentHeld)
        assert isinstance(error, LockNotAcquired)
        assert (error.holder, error.since, error.state) == ("other", since, state)
        assert 10 < error.retry_after <= 30
        assert error.stale_in is not None
        assert 20 < error.stale_in < 41

    def test_held_nobody_knows_since_when(self, ground: Ground) -> None:
        """Data from before there was a time."""
        error = self.refused(ground, ground.add(7, holder="other", state="exporting"), 7)
        assert isinstance(error, DocumentHeld)
        assert (error.since, error.retry_after, error.stale_in) == (None, 0.5, None)

    def test_case_counts(self, plain: Ground) -> None:
        """Another spelling is another owner."""
        self.refused(plain, plain.add(7, holder="Me", state="exporting"), 7)

    @pytest.mark.parametrize(
        ("role", "value"),
        [
            ("version", "7"),
            ("version", 7.0),
            ("version", True),
            ("version", [7]),
            ("version", Int64(2**63 - 1)),
            ("holder", 5),
            ("holder", ["me"]),
            ("holder", {"me": 1}),
            ("holder", False),
            ("state", 1),
            ("state", ["exported"]),
            ("time", "2030-01-01"),
            ("time", 1_900_000_000),
            ("holder", Code("me")),
        ],
        ids=str,
    )
    def test_damaged(self, plain: Ground, role: str, value: Any) -> None:
        """What cannot be read is not taken for "nobody has it": fails closed, and names the field."""
        id_ = plain.add(7, state="exported")
        plain.change(id_, **{role: value})
        error = self.refused(plain, id_, 7)
        assert isinstance(error, DocumentDamaged)
        assert plain.names[role] in str(error)

    def test_damaged_model(self, make: Callable[..., Ground]) -> None:
        """Also where a model is in front of it."""
        ground = make("model")
        id_ = ground.add(7, holder=5)
        assert isinstance(self.refused(ground, id_, 7), DocumentDamaged)

    def test_freed_in_the_moment_of_looking(self, plain: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whoever is refused, and finds the document free then, asks again instead of saying that nobody has it."""
        id_ = plain.add(7, holder="other", state="exporting")
        send, calls = Sender.send, []

        def free_first(sender: Sender, command: Any, *left: float) -> Any:
            calls.append(command)
            if len(calls) == 2:
                plain.change(id_, holder=None)
            return send(sender, command, *left)

        monkeypatch.setattr(Sender, "send", free_first)
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
        """Celery ships them between processes."""
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301
        assert vars(copy) == vars(error)
        assert str(copy) == str(error)
        assert "5" in str(error)


class TestWrongCalls:
    """What cannot be meant is told before anything is sent."""

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
            (("x", 1), {"final": "exporting"}, "not declared as a final"),
            (("x", 1), {"owner": ""}, "1 to 256"),
            (("x", 1), {"owner": 5}, "must be a str"),
            (("x", 1), {"owner": "a\nb"}, "control"),
            (("x", 1), {"changes": {"lockedBy": "me"}}, "lock's own"),
            (("x", 1), {"changes": {"documentVersion.x": 1}}, "lock's own"),
            (("x", 1), {"changes": {"_id": 1}}, "not _id"),
            (("x", 1), {"changes": {"$x": 1}}, "cannot be"),
            (("x", 1), {"changes": {"a": 1, "a.b": 1}}, "already"),
        ],
    )
    def test_arguments(self, plain: Ground, document: Any, options: Any, problem: str) -> None:
        """A TypeError or a ValueError that names the cure."""
        given = {"pending": "exporting", **options}
        with pytest.raises((TypeError, ValueError), match=problem):
            plain.lock.hold(document, **given)

    def test_version_that_is_text(self, plain: Ground) -> None:
        """A document as it was read, whose version is text, is reported as damage."""
        with pytest.raises(DocumentDamaged, match="is str, not a whole number"):
            plain.lock.hold({"_id": 5, "documentVersion": "3"}, "exporting")

    def test_names_that_only_begin_alike(self, plain: Ground) -> None:
        """A field is not another one because of how it begins."""
        held = plain.lock.acquire((plain.add(1), 1), "exporting", changes={"lockedByWhom": 1, "documentVersions": 2})
        assert held.document["lockedByWhom"] == 1

    def test_used_twice(self, plain: Ground) -> None:
        """Each acquisition is a hold of its own."""
        hold = plain.lock.hold((plain.add(1), 1), "exporting", final="exported")
        with hold:
            pass
        with pytest.raises(LockMisused, match="once for each block"), hold:
            pass
