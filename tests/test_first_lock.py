"""The first lock of a process is as fast as any other, because its imports happen when Django is set up (F76).

An import inside the first request delays that request. Under gevent or eventlet, it delays all requests until it has
ended. The import runs programs to find libraries, and other requests see half-imported modules.
"""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import python

ROOT = Path(__file__).resolve().parent.parent

#: A project with only this app and the alias of its locks. The project records its imports and programs.
PROJECT = """
import json, os, sys, threading, time

network, programs = [], []

def hear(event, args):
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"):
        network.append(f"{event} {args[1:]}")
    elif event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.system"):
        programs.append(f"{event} {args}")

sys.addaudithook(hear)

from django.conf import settings

settings.configure(
    DATABASES={
        "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
        "locks": {"ENGINE": "django_mongodb_backend", "HOST": os.environ["TEST_HOST"], "NAME": "mongolock_tests"},
    },
    INSTALLED_APPS=["django_mongolock"],
    MONGOLOCK={"DATABASE": "locks", "WAIT": 20},
    DATABASE_ROUTERS=["django_mongolock.router.MongoLockRouter"],
)

def ours():
    return {name for name in sys.modules if name.partition(".")[0] in PACKAGES}

PACKAGES = ("django_mongolock", "django_mongodb_backend", "django", "pymongo", "bson", "gridfs", "ctypes")

import django
django.setup()
before = ours()
said = {"network": list(network), "threads": [thread.name for thread in threading.enumerate()]}
"""
SAY = """
print(json.dumps(said))
"""
FIRST_LOCK = """
from django_mongolock import mongo_lock
del programs[:]
with mongo_lock(sys.argv[1]) as lock:
    said["held"] = lock.held
said["late"] = sorted(ours() - before)
said["programs"] = programs
"""


def run(*parts: str, host: str = "") -> dict[str, Any]:
    """Run a project in a process of its own, and return its report."""
    host = host or os.environ["MONGODB_URI"]
    said: dict[str, Any] = json.loads(
        python("-c", "".join(parts), f"first:{uuid.uuid4().hex}", folder=ROOT, TEST_HOST=host)
    )
    return said


@pytest.mark.long
def test_the_first_lock_imports_nothing() -> None:
    """F76: The first lock imports no module of ours, of Django or of the driver, and starts no program to find
    libraries."""
    said = run(PROJECT, FIRST_LOCK, SAY)
    assert said["held"]
    assert (said["late"], said["programs"]) == ([], [])


@pytest.mark.long
@pytest.mark.parametrize(
    "host", ["mongodb://127.0.0.1:9/?directConnection=true", "mongodb+srv://user:secret@nowhere.invalid/"]
)
def test_setting_up_connects_to_nothing(host: str) -> None:
    """F76: A project is set up without a reachable server or a DNS lookup of its name, and without a thread."""
    said = run(PROJECT, SAY, host=host)
    assert (said["network"], said["threads"]) == ([], ["MainThread"])
