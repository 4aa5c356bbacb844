"""Start the MongoDB of the test run before Django's settings are read.

Loaded by `-p tests.plugin`: a conftest comes too late, because pytest-django reads the settings first.
"""

import contextlib
import os
from collections.abc import Iterator

import pytest

from testproject.servers import ServerError, mongodb


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Iterator[None]:
    """Put the URI of a server into MONGODB_URI, unless one is there; the server ends with the test run."""
    options = early_config.known_args_namespace
    if not (options.help or options.version or distributes(options.numprocesses)):
        servers = contextlib.ExitStack()
        early_config.add_cleanup(servers.close)
        try:
            os.environ["MONGODB_URI"] = servers.enter_context(mongodb(parameters={"enableTestCommands": 1}))
        except ServerError as error:
            raise pytest.UsageError(str(error)) from None
    return (yield)


def distributes(processes: int | str | None) -> bool:
    """Return whether this process only hands the tests out, to workers (pytest-xdist) that each start a server."""
    return bool(processes) and "PYTEST_XDIST_WORKER" not in os.environ
