"""versioned_update(): documents of PyMongo's own collections, blocking and awaiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import bson
import pytest
from bson import Int64, ObjectId
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pymongo import AsyncMongoClient, WriteConcern
from pymongo.collection import Collection

from django_mongolock import VersionConflict
from django_mongolock.versions import aversioned_update, versioned_update

Documents = Collection[dict[str, Any]]
Update = Callable[..., Any]


@pytest.fixture(params=["blocking", "in a thread", "asynchronous"])
async def update(request: pytest.FixtureRequest, collection: Documents, mongo_uri: str) -> Any:
    """Each face, as a coroutine function; all take the blocking collection that the test looks at."""

    async def call(_: Documents, *args: Any, **options: Any) -> Any:
        if request.param == "blocking":
            return versioned_update(collection, *args, **options)
        if request.param == "in a thread":
            return await aversioned_update(collection, *args, **options)
        async with AsyncMongoClient[dict[str, Any]](mongo_uri) as client:
            other = client[collection.database.name][collection.name]
            return await aversioned_update(other, *args, **options)

    return call


async def test_functions_of_the_document(update: Update, collection: Documents) -> None:
    """What the function returns is set, and the version raised; the result is the document as it is then."""
    collection.insert_one({"_id": 1, "n": 5, "version": 3, "other": "x"})
    after = await update(collection, 1, lambda document: {"n": document["n"] + 1})
    assert after == collection.find_one() == {"_id": 1, "n": 6, "version": 4, "other": "x"}


async def test_changes_in_place(update: Update, collection: Documents) -> None:
    """A function may change the document itself, return it or not, and take fields out."""
    collection.insert_one({"_id": 1, "n": 5, "gone": 1, "deep": {"list": [1]}, "flag": 1, "version": 1})

    def change(document: dict[str, Any]) -> None:
        document["n"] += 1
        document["deep"]["list"].append(2)
        document["flag"] = True  # equal to 1 in Python, not in MongoDB
        del document["gone"]

    await update(collection, 1, change)
    expected = {"_id": 1, "n": 6, "deep": {"list": [1, 2]}, "flag": True, "version": 2}
    found = collection.find_one()
    assert found == expected
    assert found["flag"] is True

    def and_return(document: dict[str, Any]) -> dict[str, Any]:
        document["n"] = 0
        return document

    assert (await update(collection, 1, and_return))["version"] == 3
    assert (await update(collection, 1, lambda document: {**document, "n": 9}))["n"] == 9


async def test_operators(update: Update, collection: Documents) -> None:
    """Update operators, from a function or as they are."""
    collection.insert_one({"_id": 1, "list": [], "n": 1})
    await update(collection, 1, lambda document: {"$push": {"list": document["n"]}, "$set": {"n": 2}})
    assert collection.find_one() == {"_id": 1, "list": [1], "n": 2, "version": 1}
    await update(collection, 1, {"$inc": {"n": 5}})
    await update(collection, 1, {"word": "$n"})
    assert collection.find_one() == {"_id": 1, "list": [1], "n": 7, "version": 3, "word": "$n"}


async def test_nothing_to_change(update: Update, collection: Documents) -> None:
    """Then nothing is written, and the version stays."""
    collection.insert_one({"_id": 1, "version": 1})
    changes: list[Any] = [lambda document: None, lambda document: {}, lambda document: document]
    for change in changes:
        assert await update(collection, 1, change) == {"_id": 1, "version": 1}
    assert collection.find_one() == {"_id": 1, "version": 1}


async def test_a_conflict_is_tried_again(update: Update, collection: Documents) -> None:
    """With the document read again."""
    collection.insert_one({"_id": 1, "n": 0, "version": 1})
    seen = []

    def change(document: dict[str, Any]) -> dict[str, Any]:
        seen.append(document["n"])
        if len(seen) < 3:
            versioned_update(collection, 1, {"$inc": {"n": 10}})
        return {"n": document["n"] + 1}

    after = await update(collection, 1, change, backoff=0)
    assert seen == [0, 10, 20]
    assert (after["n"], after["version"]) == (21, 4)


async def test_it_gives_up(update: Update, collection: Documents) -> None:
    """After the last attempt the conflict is raised, with its facts."""
    collection.insert_one({"_id": 1, "n": 0, "version": 1})

    def change(document: dict[str, Any]) -> dict[str, Any]:
        versioned_update(collection, 1, {"$inc": {"n": 10}})
        return {"n": 5, "other": 1}

    with pytest.raises(VersionConflict) as caught:
        await update(collection, 1, change, attempts=2, backoff=0)
    error = caught.value
    assert (error.what, error.pk, error.read, error.stored) == (collection.full_name, 1, 2, 3)
    assert error.changed == {"n": (5, 20), "other": (1, None)}
    assert collection.find_one() == {"_id": 1, "n": 20, "version": 3}


async def test_gone(update: Update, collection: Documents) -> None:
    """No document, or none any more."""
    missing = ObjectId()
    for change in ({"n": 1}, lambda document: {"n": 1}):
        with pytest.raises(LookupError, match=f"there is no document ObjectId\\('{missing}'\\) in "):
            await update(collection, missing, change)
    collection.insert_one({"_id": 1})

    def delete(document: dict[str, Any]) -> dict[str, Any]:
        collection.delete_one({"_id": 1})
        return {"n": 1}

    with pytest.raises(VersionConflict, match="deleted meanwhile"):
        await update(collection, 1, delete, attempts=1)
    assert collection.count_documents({}) == 0


async def test_versions_of_all_kinds(update: Update, collection: Documents) -> None:
    """None yet, null, of another name, 64 bits, the float that the shell writes; not a text."""
    collection.insert_many(
        [{"_id": 1}, {"_id": 2, "v": None}, {"_id": 3, "v": Int64(2**40)}, {"_id": 4, "v": 3.0}, {"_id": 5, "v": "3"}]
    )
    for key, version in ((1, 1), (2, 1), (3, 2**40 + 1), (4, 4)):
        after = await update(collection, key, lambda document: {"n": 1}, version_field="v")
        assert (after["v"], type(after["v"]) is not float) == (version, True)
    with pytest.raises(ValueError, match="'v' of document 5 is '3', not a version"):
        await update(collection, 5, lambda document: {"n": 1}, version_field="v")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (5, TypeError, "must be a mapping, or a function"),
        (lambda document: 5, TypeError, "a mapping of fields, or of update operators, not 5"),
        ({"n": 1, "$set": {"m": 1}}, ValueError, "mixed"),
        ({"version": 7}, ValueError, "'version' cannot be changed"),
        ({"$inc": {"version": 7}}, ValueError, "'version' cannot be changed"),
        (lambda document: {"version": 7}, ValueError, "cannot be changed"),
        (lambda document: document.update(version=7), ValueError, "cannot be changed"),
        (lambda document: document.pop("version") and None, ValueError, "cannot be changed"),
        (lambda document: {"_id": 7}, ValueError, "'_id' cannot be changed"),
    ],
)
async def test_wrong_changes(
    update: Update, collection: Documents, change: Any, error: type[Exception], words: str
) -> None:
    """A clear error, and nothing written."""
    collection.insert_one({"_id": 1, "version": 1})
    with pytest.raises(error, match=words):
        await update(collection, 1, change)
    assert collection.find_one() == {"_id": 1, "version": 1}


@pytest.mark.parametrize("name", ["", "a.b", "$v", "_id"])
def test_wrong_version_fields(collection: Documents, name: str) -> None:
    """A field at the top, by its name."""
    with pytest.raises(ValueError, match="version_field must name a field at the top"):
        versioned_update(collection, 1, {"n": 1}, version_field=name)


def test_ids_are_values(collection: Documents) -> None:
    """An id out of a request is no query."""
    collection.insert_one({"_id": 1})
    changes: list[Any] = [{"n": 1}, lambda document: {"n": 1}]
    for change in changes:
        with pytest.raises(LookupError):
            versioned_update(collection, {"$gt": 0}, change)


async def test_coroutine_functions_as_changes(collection: Documents) -> None:
    """aversioned_update() awaits what it is given."""
    collection.insert_one({"_id": 1, "n": 1})

    async def change(document: dict[str, Any]) -> dict[str, Any]:
        return {"n": document["n"] + 1}

    assert (await aversioned_update(collection, 1, change))["n"] == 2


def test_many_writers(collection: Documents) -> None:
    """None of the increments of ten threads is lost."""
    collection.insert_one({"_id": 1, "n": 0})
    start = threading.Barrier(10)

    def work() -> None:
        start.wait()
        for _ in range(5):
            versioned_update(
                collection, 1, lambda document: {"n": document["n"] + 1}, attempts=500, backoff=0.005, longest=0.1
            )

    threads = [threading.Thread(target=work) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert collection.find_one() == {"_id": 1, "n": 50, "version": 50}


@pytest.mark.parametrize("name", ["blocking", "asynchronous"])
async def test_a_collection_that_confirms_nothing(collection: Documents, mongo_uri: str, name: str) -> None:
    """The write is confirmed all the same (w: 1): it is made once, and its result is known."""
    collection.insert_one({"_id": 1, "n": 5})
    deaf: Any

    def add(document: dict[str, Any]) -> dict[str, Any]:
        return {"n": document["n"] + 1}

    if name == "blocking":
        deaf = collection.with_options(write_concern=WriteConcern(0))
        after = versioned_update(deaf, 1, add)
    else:
        async with AsyncMongoClient[dict[str, Any]](mongo_uri, w=0) as client:
            deaf = client[collection.database.name][collection.name]
            after = await aversioned_update(deaf, 1, add)
    assert after == collection.find_one() == {"_id": 1, "n": 6, "version": 1}


def test_names_that_set_would_take_for_a_path(collection: Documents) -> None:
    """A field whose name has a dot is not the field that $set means: refused, nothing written."""
    collection.insert_one({"_id": 1, "a": {"b": 1}})

    def change(document: dict[str, Any]) -> None:
        document["a.b"] = 2

    with pytest.raises(ValueError, match=r"the field 'a\.b' cannot be changed"):
        versioned_update(collection, 1, change)
    assert collection.find_one() == {"_id": 1, "a": {"b": 1}}
    collection.insert_one({"_id": 2, "a": {"b": 1}, "a.b": 5})
    with pytest.raises(ValueError, match=r"'a\.b'"):
        versioned_update(collection, 2, lambda document: {**document, "n": 1})
    assert collection.find_one({"_id": 2}) == {"_id": 2, "a": {"b": 1}, "a.b": 5}
    assert versioned_update(collection, 1, {"a.b": 3})["a"] == {"b": 3}, "as $set has it"


VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False, width=32) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab.$", max_size=3), inner, max_size=3),
    max_leaves=5,
)


def documents(letters: str) -> Any:
    return st.dictionaries(st.text(letters, max_size=3), VALUES, max_size=4)


@pytest.mark.long
@given(before=documents("abc."), after=documents("abc.$"))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_generated_changes(collection: Documents, before: dict[str, Any], after: dict[str, Any]) -> None:
    """What is stored is what the function has made of the document, to the byte; or it is refused and as before."""
    collection.replace_one({"_id": 1}, before, upsert=True)

    def change(document: dict[str, Any]) -> None:
        document.clear()
        document.update({"_id": 1, **after})

    expected = {"_id": 1, **after, "version": 1}
    try:
        versioned_update(collection, 1, change)
    except ValueError:
        assert any(not name or "." in name or name.startswith("$") for name in {*before, *after})
        expected = {"_id": 1, **before}
    found: Any = collection.find_one()
    if as_bytes(before) == as_bytes(after):
        expected.pop("version", None)  # nothing was changed
    assert as_bytes(found) == as_bytes(expected)


def as_bytes(document: dict[str, Any]) -> dict[str, bytes]:
    """Each field as it is stored, where 1, 1.0 and true differ."""
    return {name: bson.encode({"": value}) for name, value in document.items()}
