"""Start the MongoDB of the test run before Django's settings are read. Install system packages first, if asked to.

Load this plugin with `-p tests.plugin`. A conftest comes too late, because pytest-django reads the settings first.
"""

import contextlib
import faulthandler
import gc
import os
import signal
from collections.abc import Iterator
from typing import Final

import pytest

from testproject.servers import ServerError, mongodb
from tests import parts


def pytest_addoption(parser: pytest.Parser) -> None:
    what = "before the tests, install with apt-get what some of them need and this machine lacks: a browser, servers"
    parser.addoption("--with-system-packages", action="store_true", help=what)


#: A copy of this process's standard error. Pytest redirects the original during a test.
STDERR: Final = os.dup(2)


def pytest_configure() -> None:
    """Let SIGQUIT show the stacks of all threads before it ends the process. .ci/run sends it to a run that hangs."""
    if hasattr(signal, "SIGQUIT"):
        faulthandler.register(signal.SIGQUIT, STDERR, chain=True)


def pytest_collection_finish() -> None:
    """Let `gc.collect` skip the imported objects. With them, it takes tenths of a second in each test that calls it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Keep the watchdog running after a failed test.

    Pytest stops the watchdog then, and pytest-timeout its alarm. An event loop that waited for a thread of a failed
    test has hung a run. The watchdog stops at the end of the test.
    """
    seconds = float(node.config.getini("faulthandler_timeout"))
    if isinstance(node, pytest.Item) and seconds:
        faulthandler.dump_traceback_later(seconds, exit=True, file=STDERR)


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Iterator[None]:
    """Put the URI of a server into MONGODB_URI, unless the variable is set. The server ends with the test run.

    All processes of the run (pytest-xdist) inherit the variable and share the server. Each process has its own
    databases there.
    """
    options = early_config.known_args_namespace
    if options.help or options.version:
        return (yield)
    if not is_worker():
        if options.with_system_packages:
            parts.install()
        servers = contextlib.ExitStack()
        early_config.add_cleanup(servers.close)
        try:
            os.environ["MONGODB_URI"] = servers.enter_context(mongodb(parameters={"enableTestCommands": 1}))
        except ServerError as error:
            raise pytest.UsageError(str(error)) from None
    return (yield)


def is_worker() -> bool:
    """Return whether this is a process to which pytest-xdist hands out tests."""
    return "PYTEST_XDIST_WORKER" in os.environ
