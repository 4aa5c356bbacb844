"""Errors of the driver in the words of this package, which quote no command and no URI."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any, Final

import pymongo
from pymongo import MongoClient
from pymongo.errors import InvalidOperation, OperationFailure, PyMongoError, WriteConcernError

from ..exceptions import LockBackendFailed

#: A duplicate key from two upserts that raced (the server repeats them itself, but need not); a time limit.
_PASSING_CODES: Final = {11000, 262}
#: Unauthorized, AuthenticationFailed, AtlasError.
_REFUSALS: Final = {
    13: "the user of this connection may not do this: it needs find, insert and update on the collection",
    18: "authentication failed: check user, password and authSource",
    8000: "authentication failed or not allowed on Atlas: check user, password and roles",
}


@contextlib.contextmanager
def bounded(timeout: float, client: MongoClient[Any] | None = None) -> Iterator[None]:
    """Give the commands inside *timeout* seconds, and raise what `translate` makes of the driver's errors."""
    try:
        with pymongo.timeout(timeout):
            yield
    except PyMongoError as error:
        raise translate(error, timeout, client=client) from bare(error)


def translate(
    error: PyMongoError, timeout: float, key: str | None = None, *, client: MongoClient[Any] | None = None
) -> LockBackendFailed:
    """The error to raise instead, ``from bare(error)``: the driver's words may hold the whole command, or a URI.

    Its `passing` is False where the command had no effect and trying again does not help. client: the one that sent the
    command; where its TLS connections fail to every server, trying again does not help either.
    """
    if isinstance(error, InvalidOperation):
        return LockBackendFailed("the session was closed", key, passing=False)
    if (problem := tls_problem(error)) is not None:
        return LockBackendFailed(problem, key, passing=client is None or not _all_refuse_tls(client))
    if isinstance(error, WriteConcernError):
        return LockBackendFailed(f"the majority of the replica set did not confirm in time ({_code_name(error)})", key)
    if not isinstance(error, OperationFailure) or error.timeout:
        return LockBackendFailed(f"MongoDB did not answer within {timeout:.1f} s ({type(error).__name__})", key)
    if error.code in _REFUSALS:
        return LockBackendFailed(_REFUSALS[error.code], key, passing=False)
    return LockBackendFailed(
        f"MongoDB refused the command (code {error.code}, {_code_name(error)})",
        key,
        passing=error.code in _PASSING_CODES or error.has_error_label("RetryableWriteError"),
    )


def bare(error: PyMongoError) -> BaseException:
    """The error without its text, if that may quote the command, with everything in it."""
    return OperationFailure(_code_name(error), error.code) if isinstance(error, OperationFailure) else error


def is_refusal(error: PyMongoError) -> bool:
    """Whether the server would not carry the command out, for another reason than missing rights."""
    unsure = isinstance(error, WriteConcernError)
    return isinstance(error, OperationFailure) and not (unsure or error.timeout or error.code in _REFUSALS)


def tls_problem(error: Exception | None) -> str | None:
    """What is wrong with the TLS of a connection, if that is why it failed."""
    found = re.search(r"\[SSL: (\w+)\]", str(error))
    if found is None:
        return None
    return f"no TLS connection ({found[1]}): check tlsCAFile, and name and dates of the server's certificate"


def _all_refuse_tls(client: MongoClient[Any]) -> bool:
    servers = client.topology_description.server_descriptions().values()
    return all(tls_problem(server.error) is not None for server in servers)


def _code_name(error: OperationFailure) -> str:
    return str((error.details or {}).get("codeName", type(error).__name__))
