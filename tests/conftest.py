"""Fixtures for all tests."""

import os
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from pymongo import MongoClient
from pymongo.collection import Collection

from django_mongolock.testing.pytest_plugin import mongolock  # as the installed plugin has it
from testproject.servers import Redis
from tests import parts
from tests.support import DATABASE
from tests.support.lock_fixtures import away, commands, connect, do, face, history, in_thread, locks
from tests.support.packages import packages

__all__ = ["away", "commands", "connect", "do", "face", "history", "in_thread", "locks", "mongolock", "packages"]


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def key() -> str:
    """Return a key of this test alone."""
    return uuid.uuid4().hex


@pytest.fixture(scope="session")
def mongo_uri() -> str:
    """The URI of the MongoDB of this test run."""
    return os.environ["MONGODB_URI"]


@pytest.fixture(scope="session")
def mongo(mongo_uri: str) -> Iterator[MongoClient[dict[str, Any]]]:
    """Return a client of the MongoDB of this test run."""
    with MongoClient[dict[str, Any]](mongo_uri, serverSelectionTimeoutMS=5000) as client:
        yield client


@pytest.fixture(scope="session")
def redis() -> Iterator[Redis]:
    """A Redis, for all tests that need one."""
    parts.require("Redis")
    with Redis() as server:
        yield server


@pytest.fixture
def collection(mongo: MongoClient[dict[str, Any]]) -> Iterator[Collection[dict[str, Any]]]:
    """Return a collection that does not exist yet, with a name of its own. The collection is dropped afterwards."""
    collection = mongo[DATABASE][f"test_{uuid.uuid4().hex}"]
    yield collection
    for name in collection.database.list_collection_names(filter={"name": {"$regex": f"^{collection.name}"}}):
        collection.database.drop_collection(name)
