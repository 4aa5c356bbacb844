"""Errors of the driver in the words of this package. The texts quote no command and no URI."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any, Final

import pymongo
from pymongo import MongoClient
from pymongo.errors import (
    ConfigurationError,
    InvalidOperation,
    NotPrimaryError,
    OperationFailure,
    PyMongoError,
    WriteConcernError,
)
from pymongo.server_description import ServerDescription

from ...exceptions import LockBackendFailed

#: Codes that say nothing about the command. The outcome is unknown, and trying again may help. The source is MongoDB's
#: list (src/mongo/base/error_codes.yml). The codes are those in the categories of network errors, shutdown, step-down,
#: interruption, time limits, snapshots, stale routing, overload and retryable errors. Codes without a category are
#: added for conflicts, taken locks, and a server without room or rights to write.
_PASSING: Final = frozenset(
    {
        *{6, 7, 89, 202, 9001},  # the network
        *{91, 189, 10058, 10107, 11600, 11602, 13435, 13436},  # shutdown, and no primary any more
        *{24, 50, 262, 279, 290, 355, 407, 453, 11601, 46841, 91331, 10045600},  # interrupted, or out of time
        *{134, 239, 246, 250, 272, 406},  # no snapshot of the majority yet, or a chunk on its way
        *{63, 150, 249, 13388},  # routing by an old version
        *{402, 433, 449, 450, 462},  # too much to do
        *{46, 107, 112, 117, 216, 267, 365},  # a conflict, or a lock that is taken
        *{146, 371, 14031},  # no memory, no disk, or writing is blocked
    }
)
#: Two upserts of one key raced. The server usually repeats them itself.
_DUPLICATE_KEY: Final = 11000
#: The rights that locks need, as text.
RIGHTS: Final = "find, insert and update on the collection"
#: The largest number of servers that an error names.
SHOWN: Final = 3
#: Unauthorized, AuthenticationFailed, AtlasError.
_REFUSALS: Final = {
    13: "the user of this connection may not do this: it needs {}",
    18: "authentication failed: check user, password and authSource",
    8000: "authentication failed: check user, password and roles in Atlas",
}
_ATLAS: Final = 8000


@contextlib.contextmanager
def bounded(timeout: float, client: MongoClient[Any] | None = None, needs: str = RIGHTS) -> Iterator[None]:
    """Limit the commands inside to *timeout* seconds, and raise the driver's errors as `translate` returns them."""
    try:
        with pymongo.timeout(timeout):
            yield
    except PyMongoError as error:
        raise translate(error, timeout, client=client, needs=needs) from bare(error)


def translate(
    error: PyMongoError,
    timeout: float,
    key: str | None = None,
    *,
    client: MongoClient[Any] | None = None,
    needs: str = RIGHTS,
) -> LockBackendFailed:
    """Return the error to raise ``from bare(error)`` in place of the driver's, whose text may hold a command or a URI.

    The attribute `passing` is False if the command had no effect and trying again does not help.

    - client: sender of the command. If its TLS connections fail to every server, trying again does not help either.
    - needs: rights that the command takes, as text.
    """
    if isinstance(error, InvalidOperation):
        return LockBackendFailed("the session was closed", key, passing=False)
    if (problem := tls_problem(error)) is not None:
        return LockBackendFailed(problem, key, passing=client is None or not _all_refuse_tls(client))
    if isinstance(error, WriteConcernError):
        return LockBackendFailed(f"the majority of the replica set did not confirm in time ({_code_name(error)})", key)
    if not isinstance(error, OperationFailure) or error.timeout:
        answers = isinstance(error, NotPrimaryError) or (client is not None and _has_no_primary(client))
        head = "MongoDB has no primary here" if answers else f"MongoDB did not answer within {timeout:.1f} s"
        where = "" if client is None else f": {whereabouts(client)}"
        return LockBackendFailed(f"{head} ({type(error).__name__}){where}", key)
    if error.code in _REFUSALS:
        return LockBackendFailed(_refusal(error).format(needs), key, passing=False)
    passing = error.code == _DUPLICATE_KEY or _is_passing(error)
    cure = "" if passing else ": manage.py check --database says what this server lacks"
    return LockBackendFailed(
        f"MongoDB refused the command (code {error.code}, {_code_name(error)}){cure}", key, passing=passing
    )


def _refusal(error: OperationFailure) -> str:
    """Return the text for a refusal. Atlas has one code for wrong passwords and for commands that a tier forbids."""
    if error.code == _ATLAS and "auth" not in str((error.details or {}).get("errmsg", error)):
        return "Atlas does not allow this command: check the roles of the user, and what the tier of the cluster allows"
    return _REFUSALS[error.code or 0]


def whereabouts(client: MongoClient[Any]) -> str:
    """Return the kind of each server, or why it does not answer, and the cure. Name hosts, but no user or password."""
    topology = client.topology_description
    servers = _servers(client)
    named = ", ".join(map(_describe, servers[:SHOWN])) + (
        f" and {more} more" if (more := len(servers) - SHOWN) > 0 else ""
    )
    if _are_of_no_set(servers):
        name = topology.replica_set_name
        return (
            f"no server of this address belongs to the replica set {name!r}: correct replicaSet, or start mongod with "
            f"--replSet {name} and run rs.initiate() in mongosh"
        )
    if any(server.server_type_name == "RSGhost" for server in servers):
        return f"{named}. The replica set was never initiated: run rs.initiate() in mongosh once"
    if is_direct(client) and _has_no_primary(client):
        name = servers[0].replica_set_name or "NAME"
        return (
            f"{named}. The address leads to this member only, and it is not the primary: name all members, without "
            f"directConnection=true: mongodb://host1,host2/?replicaSet={name}"
        )
    if topology.has_writable_server():
        return f"{named}. Is the primary overloaded, or the network slow?"
    if any(server.is_server_type_known for server in servers):
        return f"{named}. There is no primary: rs.status() in mongosh says why; an election takes about ten seconds"
    test = " A test that asks for the fixture mongolock needs no server." if "PYTEST_CURRENT_TEST" in os.environ else ""
    return f"{named}. Is it running, and are HOST and PORT right?{test}"


def is_direct(client: MongoClient[Any]) -> bool:
    """Return whether the address leads to one server, whatever replica set it belongs to."""
    return client.topology_description.topology_type_name == "Single"


def _servers(client: MongoClient[Any]) -> list[ServerDescription]:
    return list(client.topology_description.server_descriptions().values())


def _are_of_no_set(servers: list[ServerDescription]) -> bool:
    """Return whether no server is of the replica set that the address names."""
    return not servers or any(isinstance(server.error, ConfigurationError) for server in servers)


def _has_no_primary(client: MongoClient[Any]) -> bool:
    """Return whether servers were reached, and none of them is a primary."""
    servers = _servers(client)
    if is_direct(client):
        kinds = {server.server_type_name for server in servers if not isinstance(server.error, NotPrimaryError)}
        return _are_of_no_set(servers) or kinds <= {"RSSecondary", "RSArbiter", "RSOther", "RSGhost"}
    reached = not servers or any(server.is_server_type_known for server in servers)
    return reached and not client.topology_description.has_writable_server()


def is_out_of_reach(client: MongoClient[Any]) -> bool:
    """Return whether a connection to each server was tried and has failed. During an election, servers answer."""
    servers = client.topology_description.server_descriptions().values()
    return all(server.error is not None for server in servers)


def _describe(server: ServerDescription) -> str:
    """Return the address of a server, and why it does not answer, in the words of the operating system."""
    host, port = server.address
    address = f"[{host}]:{port}" if ":" in host else host if port is None else f"{host}:{port}"
    if server.error is None:
        return f"{address} ({server.server_type_name.removeprefix('RS').lower().replace('ghost', 'not initiated')})"
    found = re.search(r"\[Errno -?\d+\] ([^([\]:]+)", str(server.error))
    reason = (
        found[1].strip() if found else "no answer" if "timed out" in str(server.error) else type(server.error).__name__
    )
    return f"{address} ({reason})"


def bare(error: PyMongoError) -> BaseException:
    """Return the error without its text, if the text may quote the command with all its data.

    The many frames of the driver are left out too.
    """
    forget_frames(error)
    return OperationFailure(_code_name(error), error.code) if isinstance(error, OperationFailure) else error


def forget_frames(error: BaseException | None) -> None:
    """Drop the frames of the error.

    The driver keeps the error in a reference cycle. With its frames, all callers of the driver would stay alive until
    the next garbage collection, the lock object among them.
    """
    while error is not None:
        error.__traceback__, error = None, error.__context__


def is_refusal(error: PyMongoError) -> bool:
    """Return whether the server refused the command for its content. Missing rights and passing errors do not count."""
    if not isinstance(error, OperationFailure) or isinstance(error, WriteConcernError):
        return False
    return not (error.code in _REFUSALS or _is_passing(error))


def _is_passing(error: OperationFailure) -> bool:
    return error.code in _PASSING or error.has_error_label("RetryableWriteError")


def tls_problem(error: Exception | None) -> str | None:
    """Return the problem with the TLS of a connection, if that is why it failed."""
    found = re.search(r"\[SSL: (\w+)\]", str(error))
    if found is None:
        return None
    return f"no TLS connection ({found[1]}): check tlsCAFile, and name and dates of the server's certificate"


def _all_refuse_tls(client: MongoClient[Any]) -> bool:
    servers = client.topology_description.server_descriptions().values()
    return all(tls_problem(server.error) is not None for server in servers)


def _code_name(error: OperationFailure) -> str:
    return str((error.details or {}).get("codeName", type(error).__name__))
