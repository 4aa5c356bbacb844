"""Common parts of the tests, for waiting, servers, documents, processes, and browsers."""

import os
from typing import Final

#: The database of this process of the test run (pytest-xdist), and of the processes that it starts.
DATABASE: Final = f"mongolock_tests{os.environ.get('PYTEST_XDIST_WORKER', '')}"
