"""The settings of the workers, as in the test project, with short times."""

from testproject.settings import *  # noqa: F403
from testproject.settings import MONGOLOCK

MONGOLOCK = {**MONGOLOCK, "COMMAND_TIMEOUT": 1}
