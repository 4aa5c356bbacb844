"""Test support for a real MongoDB: a replica set in a container, started by testcontainers, that keeps the locks.

With pytest, use the fixture `mongolock_container`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from pymongo import MongoClient
from pymongo.errors import OperationFailure

from ..backends import close_backends
from ..conf import get_settings

__all__ = ["keep_locks_in", "replica_set"]

PORT: Final = 27017
#: Seconds in which the server of a started container has to answer, and then as many to become primary.
START_LIMIT: Final = 60.0
_ALREADY_INITIALIZED: Final = 23


@contextmanager
def replica_set(image: str) -> Iterator[str]:
    """Start a replica set of one member in a container, and yield its address. At the end, remove the container.

    - image: image of a MongoDB with an entry point that takes the options of mongod, as the official one does.
    """
    try:
        from docker.errors import DockerException
        from testcontainers.core.container import DockerContainer
    except ImportError as error:
        raise ImproperlyConfigured(
            "a MongoDB in a container needs testcontainers: pip install testcontainers"
        ) from error
    try:
        made = DockerContainer(image)
    except DockerException:
        raise ImproperlyConfigured(
            "a MongoDB in a container needs Docker, which does not answer: start it, or set DOCKER_HOST. "
            "If you have a MongoDB, define the fixture mongolock_container by keep_locks_in(address)"
        ) from None
    command = ["--replSet", "mongolock", "--bind_ip_all"]
    with made.with_command(command).with_exposed_ports(PORT) as container:
        host, port = container.get_container_host_ip(), container.get_exposed_port(PORT)
        address = f"mongodb://{host}:{port}/?directConnection=true"
        _initiate(address)
        yield address


def _initiate(address: str) -> None:
    """Make the server a replica set, and wait until it is primary."""
    milliseconds = round(START_LIMIT * 1000)
    with MongoClient[dict[str, Any]](address, serverSelectionTimeoutMS=milliseconds) as client:
        try:
            client.admin.command("replSetInitiate")
        except OperationFailure as error:
            if error.code != _ALREADY_INITIALIZED:
                raise
        end = time.monotonic() + START_LIMIT
        while not client.admin.command("hello")["isWritablePrimary"]:
            if time.monotonic() > end:
                raise TimeoutError(f"the MongoDB in the container was not primary within {START_LIMIT:g} s")
            time.sleep(0.1)


@contextmanager
def keep_locks_in(address: str) -> Iterator[None]:
    """Within the block, use the MongoDB with this *address* for MONGOLOCK["DATABASE"], the alias of the locks."""
    connection: Any = connections[get_settings().DATABASE]
    entry = connection.settings_dict
    before = dict(entry)
    _disconnect(connection)
    entry.update({"HOST": address, "PORT": "", "USER": "", "PASSWORD": "", "OPTIONS": {}})
    try:
        yield
    finally:
        _disconnect(connection)
        entry.update({name: before[name] for name in ("HOST", "PORT", "USER", "PASSWORD", "OPTIONS")})


def _disconnect(connection: Any) -> None:
    close_backends()
    connection.close_pool()
