"""A process that acquires locks and keeps them: ``python -m testproject.demo.holding LABEL KEY…``, until SIGTERM."""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack

import django


def main(label: str, *keys: str) -> None:
    """Acquire one key after the other, without a time limit, and hold them all."""
    django.setup()
    from django_mongolock import mongo_lock

    with ExitStack() as held:
        for key in keys:
            held.enter_context(mongo_lock(key, label=label, wait=None))
        signal.pause()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    main(*sys.argv[1:])
