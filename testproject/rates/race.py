"""Several processes set the same rate at once; then every value has to be in the history, or to be the latest."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import django

if TYPE_CHECKING:
    from multiprocessing.synchronize import Barrier

VALUES = 4  # that each writer sets in each run
PATIENCE = 60  # seconds for one run


def main(arguments: list[str] | None = None) -> int:
    """Race without versions, then with them; print as JSON what is missing. Return 1 if versions lost anything."""
    parser = argparse.ArgumentParser(prog="python -m testproject.rates", description=__doc__)
    parser.add_argument("--database", default="default", help="an alias of DATABASES")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--writers", type=int, default=5, help="processes that write at once")
    options = parser.parse_args(arguments)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")
    django.setup()
    report: dict[str, Any] = {"database": options.database, "runs": options.runs}
    for plain in (True, False):
        started = time.monotonic()
        lost = race(options.database, options.runs, options.writers, plain=plain)
        report["plain" if plain else "versioned"] = {
            "written": options.runs * options.writers * VALUES,
            "missing": sum(map(len, lost)),
            "runs_with_missing": sum(bool(missing) for missing in lost),
            "seconds": round(time.monotonic() - started, 1),
        }
    print(json.dumps(report))
    return int(report["versioned"]["missing"] > 0)


def race(alias: str, runs: int, writers: int, *, plain: bool) -> list[list[int]]:
    """Let *writers* processes race *runs* times, and return the lost values of each run."""
    from django.core.management import call_command
    from django.db import connections

    connections[alias].close()
    context = multiprocessing.get_context("fork")  # with Django at hand, and before there is a connection
    barrier = context.Barrier(writers + 1)
    arguments = [(barrier, alias, runs, number, plain) for number in range(writers)]
    processes = [context.Process(target=write, args=each, daemon=True) for each in arguments]
    for process in processes:
        process.start()
    try:
        call_command("migrate", "rates", database=alias, verbosity=0)
        return [run(barrier, alias, writers, plain=plain) for _ in range(runs)]
    finally:
        for process in processes:
            process.join(timeout=5)
            process.kill()
        getattr(connections[alias], "close_pool", connections[alias].close)()


def run(barrier: Barrier, alias: str, writers: int, *, plain: bool) -> list[int]:
    """Run one race, and return the lost values. The rate starts with 0, and the processes write."""
    from testproject.rates.models import PastRate, PlainRate, Rate

    latest = (PlainRate if plain else Rate)._default_manager.using(alias)
    past = PastRate.objects.using(alias)
    past.all().delete()
    latest.all().delete()
    latest.create(pk="EUR", value=0)
    barrier.wait(PATIENCE)
    barrier.wait(PATIENCE)
    found = Counter([*past.values_list("value", flat=True), latest.values_list("value", flat=True).get(pk="EUR")])
    expected = {0, *(value for number in range(writers) for value in values_of(number))}
    return sorted(expected - found.keys())


def write(barrier: Barrier, alias: str, runs: int, number: int, plain: bool) -> None:
    """Set the values of one process in each run, at the same time as the other processes."""
    from testproject.rates.services import set_rate, set_rate_plainly

    try:
        for _ in range(runs):
            barrier.wait(PATIENCE)
            for value in values_of(number):
                (set_rate_plainly if plain else set_rate)("EUR", value, using=alias)
            barrier.wait(PATIENCE)
    except BaseException:
        barrier.abort()
        raise


def values_of(number: int) -> list[int]:
    """The values that only this writer sets."""
    return [number * 1000 + step for step in range(1, VALUES + 1)]
