"""Faults that a server makes on request. Each has one setting for the whole server, so one process has it at a time."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from pymongo import MongoClient
from pymongo.errors import OperationFailure


@contextlib.contextmanager
def failpoint(
    client: MongoClient[Any], name: str, data: Mapping[str, object], mode: object = "alwaysOn"
) -> Iterator[None]:
    """Let the server make the fault *name* until the block ends. Skips the test where the server makes none."""
    with reserved(client):
        try:
            client.admin.command("configureFailPoint", name, mode=mode, data=data)
        except OperationFailure:
            pytest.skip("the server was not started with enableTestCommands")
        try:
            yield
        finally:
            client.admin.command("configureFailPoint", name, mode="off")


#: The servers with faults set by this process. A process may set several.
_reserved: set[str] = set()


@contextlib.contextmanager
def reserved(client: MongoClient[Any]) -> Iterator[None]:
    """Keep the other processes of the test run from setting faults of that server. Wait until none of them does."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    name = quote(f"faults of {client.address}", safe="")
    if name in _reserved:
        yield
        return
    with Path(tempfile.gettempdir(), name).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _reserved.add(name)
        try:
            yield
        finally:
            _reserved.remove(name)
