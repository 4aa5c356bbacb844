"""The way of a free lock through the files of the package: ``python -m bench.moves [--trace]``.

Counted are the calls of functions of `django_mongolock` while ``mongo_lock("free").acquire()``, and then its
`release()`, runs against a real MongoDB, after some pairs to warm up. It runs in a thread that is not the main one: for
the main thread another one sends the commands, and this counts what one thread does. A generator or coroutine that goes
on after a ``yield`` counts as called, since a reader jumps there too.

moves: how many of the calls are in another file than the call before. Going back by ``return`` is not counted.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType

import django

import django_mongolock
from django_mongolock.backends.base import close_backends
from testproject.servers.mongo import mongodb

PACKAGE = f"{Path(django_mongolock.__file__).parent}/"

#: A file of the package, and a function in it.
Place = tuple[str, str]


def traced(call: Callable[[], object]) -> list[Place]:
    """Where the calls go that *call* makes in this thread."""
    places: list[Place] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            places.append((code.co_filename.removeprefix(PACKAGE), code.co_qualname))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return places


def moves(places: list[Place]) -> int:
    """How often the next call is in another file."""
    return sum(before != after for (before, _), (after, _) in pairwise(places))


def pair() -> dict[str, list[Place]]:
    """The calls of one pair."""
    lock = django_mongolock.mongo_lock("free")
    return {"acquire()": traced(lock.acquire), "release()": traced(lock.release)}


def measure() -> dict[str, list[Place]]:
    """The calls of a pair when all is warm, in a thread of its own."""
    pairs: list[dict[str, list[Place]]] = []
    thread = threading.Thread(target=lambda: pairs.extend(pair() for _ in range(4)))
    thread.start()
    thread.join()
    return pairs[-1]


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--trace", action="store_true", help="print every call")
    wants_trace = parser.parse_args().trace
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")
    with mongodb() as uri:
        os.environ["MONGODB_URI"] = uri
        django.setup()
        found = measure()
        close_backends()
    for name, places in found.items():
        files = {file for file, _ in places}
        print(f"{name} {len(places)} calls, {len(set(places))} functions, {len(files)} files, {moves(places)} moves")
        for file, function in places if wants_trace else ():
            print(f"    {file:36} {function}")


if __name__ == "__main__":
    main()
