"""Run the engine under virtual time: `python3 dev.py simulate`.

    python3 dev.py simulate                       30 s of simulations, each of 60 virtual seconds, with seeds 1, 2, ...
    python3 dev.py simulate --seed 7              one of them, as it always is
    python3 dev.py simulate --seconds 3600        an hour of them, from a random seed on
    python3 dev.py simulate --defect NAME         with a defect put back, by its name or the row of the failure table
    python3 dev.py simulate --list                the defects

The first seed that breaks a promise is told. Ends with 1 then, with 0 otherwise.
"""

import argparse
import gc
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence

from verify.simulation.defects import ROWS, broken, named
from verify.simulation.run import simulate
from verify.simulation.schedule import schedule
from verify.simulation.story import story


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, and return the exit code."""
    options = _parser().parse_args(arguments)
    if options.list:
        for name, defect in ROWS.items():
            print(f"{name:<28}{defect.text} ({defect.breaks})")
        return 0
    with broken(options.defect and named(options.defect)):
        return int(_search(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="run this seed only")
    parser.add_argument("--length", type=float, default=60.0, help="how many virtual seconds a run lasts (60)")
    parser.add_argument("--seconds", type=float, default=30.0, help="for how many real seconds to go on (30)")
    parser.add_argument("--defect", help="break the engine with this defect first")
    parser.add_argument("--list", action="store_true", help="list the defects")
    return parser


def _search(options: argparse.Namespace) -> bool:
    """Run seed after seed. Return whether a seed broke a promise."""
    gc.freeze()  # collecting modules took a twentieth of the time
    started, runs, grants, counts = time.monotonic(), 0, 0, Counter[str]()
    first = 1 if options.defect or options.seconds <= 60 else random.randrange(10**6)
    seeds = [options.seed] if options.seed is not None else itertools.count(first)
    for seed in seeds:
        outcome = simulate(seed, options.length)
        runs, grants = runs + 1, grants + outcome.grants
        counts.update(outcome.counts)
        if not outcome.is_good:
            rules = {violation.rule for violation in outcome.violations} or {"crash"}
            print(f"seed {seed}: {', '.join(sorted(rules))}; found in {time.monotonic() - started:.1f} s")
            print(story(outcome, schedule(seed, options.length)))
            return True
        if time.monotonic() - started > options.seconds:
            break
    took = time.monotonic() - started
    print(
        f"{runs} runs of {options.length:g} s, {grants} grants, no promise broken, in {took:.1f} s: "
        f"{grants / took:.0f} grants a second, {runs * options.length / took:.0f} times as fast as time goes"
    )
    print(", ".join(f"{name} {count}" for name, count in counts.items()))
    return False


if __name__ == "__main__":
    sys.exit(main())
