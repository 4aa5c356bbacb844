"""A plugin of pytest (`-p verify.simulation.put_back`): the tests meet the defect that MONGOLOCK_DEFECT names."""

import os
from typing import Final

import pytest

from verify.simulation.defects import DEFECTS, Patches

#: The variable that says which defect the tests meet.
VARIABLE: Final = "MONGOLOCK_DEFECT"


def pytest_configure(config: pytest.Config) -> None:
    """Put the defect back, in this process and for good. Raises KeyError."""
    if name := os.environ.get(VARIABLE):
        DEFECTS[name](Patches())
