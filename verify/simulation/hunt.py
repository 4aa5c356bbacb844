"""Look for seeds at which the engine, broken in one place, does what it must not.

    MONGOLOCK_MUTANT=grant:12 python -m verify.simulation.hunt --seconds 60
    python -m verify.simulation.hunt --defect no-deadline

It prints what was found as one line of JSON. Seconds are those of the processor, so that other programs of the machine
change nothing.
"""

import argparse
import contextlib
import itertools
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from verify.simulation import mutation

#: The virtual seconds of a run, and the real seconds after which it hangs. A run takes half a second.
VIRTUAL: Final = 60.0
HANGS_AFTER: Final = 20
#: A limit in bytes, since an endless loop must not take the memory of the machine.
MEMORY: Final = 4 * 2**30


def tell(found: str | None, seed: int, what: str = "") -> None:
    """Print the finding, or that there is none."""
    found_at = {"found": found, "what": what, "seed": seed, "seconds": round(time.process_time(), 1)}
    sys.stdout.write(json.dumps(found_at) + "\n")
    sys.stdout.flush()


def hunt(defect: str | None, seconds: float, first: int = 1) -> None:
    """Run the seeds from the *first* on for so many real seconds. Stop at the first seed that finds something."""
    # Import here, after the mutant's import is in place. An error of these imports is the mutant's.
    from verify.simulation.defects import broken
    from verify.simulation.run import simulate

    with broken(defect), _alarm() as set_alarm:
        for seed in itertools.count(first):
            if time.process_time() >= seconds:
                tell(None, seed - 1)
                return
            set_alarm(seed)
            try:
                outcome = simulate(seed, VIRTUAL)
            except Exception as error:  # noqa: BLE001 - raised by the servers: what is broken there fails
                tell("crash", seed, repr(error))
                return
            if found := outcome.violations:
                tell("violation", seed, str(found[0]))
                return
            if outcome.crashes:
                tell("crash", seed, outcome.crashes[0])
                return


@contextlib.contextmanager
def _alarm() -> Iterator[Callable[[int], None]]:
    """Yield a function that gives a seed its time. The process ends when the time is over."""

    def set_alarm(seed: int) -> None:
        def give_up(*_: Any) -> None:
            tell("hang", seed)
            os._exit(0)

        signal.signal(signal.SIGPROF, give_up)
        signal.setitimer(signal.ITIMER_PROF, HANGS_AFTER)

    try:
        yield set_alarm
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m verify.simulation.hunt")
    parser.add_argument("--defect")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    mutation.from_environment()
    try:
        hunt(options.defect, options.seconds, options.seed)
    except Exception as error:  # noqa: BLE001 - raised by the import
        tell("crash", 0, repr(error))


if __name__ == "__main__":
    main()
