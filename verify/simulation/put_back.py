"""A plugin of pytest (`-p verify.simulation.put_back`) that puts the defect in MONGOLOCK_DEFECT into the engine."""

import os
from typing import Final

import pytest

from verify.simulation.defects import DEFECTS, Patches

#: The variable that names the defect for the tests.
VARIABLE: Final = "MONGOLOCK_DEFECT"


def pytest_configure(config: pytest.Config) -> None:
    """Put the defect back, in this process and for good. Raises KeyError."""
    if name := os.environ.get(VARIABLE):
        DEFECTS[name](Patches())
