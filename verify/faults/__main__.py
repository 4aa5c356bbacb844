"""Run locks under faults, and have a checker say whether they kept their promises.

    python3 dev.py faults                                   60 s of all faults
    python3 dev.py faults --fault kill-primary --seconds 30

Ends with 1 if a promise was broken, with 2 if the servers did not come up, with 3 if a run never came to where a
promise could have been broken.
The same seed makes the same choices. How the processes interleave is up to them.
"""

import argparse
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from testproject.servers import ServerError
from verify.faults.run import NAMES, Outcome, Run


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    logging.getLogger("django_mongolock").setLevel(logging.ERROR)
    names = options.fault or list(NAMES)
    outcomes: list[Outcome] = []
    failed = 0
    for seed in range(options.seed, options.seed + options.seeds):
        outcome = _run(seed, names, options)
        if outcome is None:
            failed += 1
        else:
            outcomes.append(outcome)
    broken = sum(len(outcome.violations) for outcome in outcomes)
    idle = sum(outcome.proves_nothing for outcome in outcomes)
    grants = sum(outcome.grants for outcome in outcomes)
    print(f"{len(outcomes)} runs, {grants} grants, {broken} violations, {failed} without result, {idle} prove nothing")
    return 1 if broken else 2 if failed else 3 if idle else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dev.py faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1, help="what the choices come from (1)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="that many runs, with as many seeds (1)")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the faults of a run last (60)")
    parser.add_argument("--fault", action="append", choices=NAMES, metavar="NAME", help=f"only: {', '.join(NAMES)}")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep what the processes wrote down")
    return parser.parse_args(arguments)


def _run(seed: int, names: list[str], options: argparse.Namespace) -> Outcome | None:
    """Make one run, and a second one if the servers did not start or recover. Such a failure says nothing about the
    lock.
    """
    for attempt in (1, 2):
        with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
            folder = Path(options.keep or temporary) / f"{seed}-{'all' if len(names) > 1 else names[0]}-{attempt}"
            folder.mkdir(parents=True)
            began = time.monotonic()
            try:
                outcome = Run(folder, seed=seed, seconds=options.seconds, names=names)()
            except ServerError as error:
                print(f"seed {seed}: {error}", (folder / "workers.log").read_text()[-2000:], flush=True)
            else:
                _tell(outcome, time.monotonic() - began)
                return outcome
    return None


def _tell(outcome: Outcome, seconds: float) -> None:
    faults = ", ".join(f"{name} {count}" for name, count in sorted(outcome.injected.items()))
    print(
        f"seed {outcome.seed}: {sum(outcome.injected.values())} faults ({faults}), "
        f"{outcome.attempts} attempts, {outcome.grants} grants, {outcome.looks} looks, "
        f"{len(outcome.violations)} violations, {seconds:.0f} s"
    )
    print("  opportunities:", ", ".join(f"{name} {count}" for name, count in outcome.opportunities.items()))
    if outcome.missed:
        print("  never:", ", ".join(outcome.missed))
    if outcome.proves_nothing:
        print("  this run proves nothing: it never came to where a promise could have been broken")
    for name, why in outcome.skipped.items():
        print(f"  left out: {name}, {why}")
    rules = Counter(violation["rule"] for violation in outcome.violations)
    if rules:
        print("  violations:", ", ".join(f"{rule} {count}" for rule, count in rules.most_common()))
    for violation in outcome.violations[:10]:
        print(f"  {violation['at']:.3f} {violation['rule']}: {violation['text']}; during {violation['faults']}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
