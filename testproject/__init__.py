"""A small shop, the example project of django_mongolock, its demo, and the project of its tests.

python -m testproject.demo            everything, until Ctrl-C python -m testproject.manage check    Django's own
commands, on MONGODB_URI
"""

import ctypes.util

from testproject.celery import app as celery_app

__all__ = ["celery_app"]

_find_library = ctypes.util.find_library


def _find_other_library(name: str) -> str | None:
    """Find a library that is not GDAL. The database backend looks for that one under 36 names, and each search runs
    the C compiler: 0.6 s of processor time for each process that starts."""
    return None if "gdal" in name.lower() else _find_library(name)


ctypes.util.find_library = _find_other_library
