"""A process that holds a lock and says what it hears: ``python -m tests.incident_holder DATABASE KEY MODE``."""

from __future__ import annotations

import os
import sys
import threading

import django


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(database: str, key: str) -> None:
    """Hold the lock until it is lost; a request to release it is granted."""
    os.environ |= {"DJANGO_SETTINGS_MODULE": "testproject.settings", "MONGODB_NAME": database}
    from django.conf import settings

    settings.MONGOLOCK = {**settings.MONGOLOCK, "HISTORY": 1, "LEASE": 1.5}  # before anything reads them
    django.setup()
    from django_mongolock import mongo_lock

    ended = threading.Event()

    def asked(lock: object) -> None:
        say(f"asked: {held.release_requested}")
        say(f"released: {held.release()}")
        ended.set()

    def lost(lock: object) -> None:
        say(f"lost: {held.lost}")
        ended.set()

    held = mongo_lock(key, label="the nightly import", on_release_requested=asked, on_lost=lost).acquire()
    say(f"holds: {held.fencing_token}")
    ended.wait(90)


if __name__ == "__main__":
    main(*sys.argv[1:3])
