"""Functions that start programs for the tests of the platforms, and read their results."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

PLATFORMS = [
    pytest.mark.program,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("dramatiq") is None, reason="needs the group platforms: python3 dev.py platforms"),
]
ROOT = Path(__file__).resolve().parents[2]


def key() -> str:
    return f"platform-{uuid.uuid4().hex}"


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.platforms.settings", "PYTHONPATH": str(ROOT), **more}


@contextmanager
def program(name: str, *arguments: str, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [str(Path(sys.executable).with_name(name)), *arguments]
    with subprocess.Popen(command, cwd=ROOT, env=environment(**more)) as running:
        try:
            yield running
        finally:
            running.terminate()
            try:
                running.wait(30)
            except subprocess.TimeoutExpired:
                running.kill()


def database() -> Any:
    client: MongoClient[dict[str, Any]] = MongoClient(os.environ["MONGODB_URI"])
    return client["mongolock_platforms"]


def counted(name: str) -> int:
    found = database()["numbers"].find_one({"_id": name})
    return 0 if found is None else int(found["n"])


def held(name: str) -> list[Any]:
    found = database()["mongolock_locks"].find_one({"_id": name})
    return [] if found is None else list(found["holders"])
