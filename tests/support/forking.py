"""A child of the test's own process, with all inherited locks."""

import os
import signal
import traceback
from collections.abc import Callable

import pytest

#: Marks of tests that fork. Python warns a process that has threads.
FORKS = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:MongoClient opened before fork:UserWarning"),
]


def in_child(call: Callable[[], object]) -> None:
    """Call *call* in a forked child, and end the child with `os._exit`. AssertionError is raised if *call* raised."""
    child = os.fork()
    if not child:
        # replaces the test runner's handler, so that a hanging child ends
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)
        try:
            call()
        except BaseException:  # noqa: BLE001 - its exit status tells
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "it failed in the child, see above"
