"""Measured side by side, on this machine: this library, others, and what people write for themselves.

    python3 dev.py bench [NAME …] [--quick] [--json FILE]

A name is a question; without one, all are asked: about twenty minutes on two cores, during which the machine should
have nothing else to do. --quick looks whether everything works; its figures are worth nothing.
"""

import argparse
import contextlib
import json
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import bench.prepared  # noqa: F401 - before what uses Django's models
from bench import machine
from bench.bench import Bench
from bench.measure import Piece, Table, as_json, as_text
from bench.questions import QUESTIONS, Question
from bench.world import World


class TooLong(BaseException):
    """The time of a question is over. This is no Exception, so that waits and clean-ups do not swallow it."""


def main(arguments: list[str] | None = None) -> int:
    """Ask, print and write. Return 1 if a question did not end."""
    options = parse(arguments)
    answers: dict[str, Any] = {"machine": machine.facts(), "quick": options.quick, "questions": {}}
    print("\n".join(f"- {name}: {fact}" for name, fact in answers["machine"].items()))
    with World() as world:
        for name in options.names or QUESTIONS:
            answers["questions"][name] = answer(name, QUESTIONS[name], world, quick=options.quick)
            if options.json:
                options.json.write_text(json.dumps(answers, indent=1))
    return int(any("error" in found for found in answers["questions"].values()))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 dev.py bench", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    titles = "\n".join(f"  {name:<10}{question.title}" for name, question in QUESTIONS.items())
    parser.epilog = f"questions:\n{titles}"
    parser.add_argument("names", nargs="*", metavar="NAME", help="a question: see below")
    parser.add_argument("--quick", action="store_true", help="a small part of everything, in a minute or two")
    parser.add_argument("--json", type=Path, help="write the figures there, after each question")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - set(QUESTIONS)):
        parser.error(f"there is no question {', '.join(unknown)}, only {', '.join(QUESTIONS)}")
    return options


def answer(name: str, question: Question, world: World, *, quick: bool) -> dict[str, Any]:
    """Ask one question. Return its findings, whatever happens."""
    print(f"\n## {name}: {question.title}", flush=True)
    bench, pieces, started = Bench(world, quick), list[Piece](), time.monotonic()
    error = ""
    try:
        with at_most(question.limit):
            for piece in question.ask(bench):
                pieces.append(piece)
                if isinstance(piece, Table):
                    print(as_text(piece), flush=True)
    except TooLong:
        error = f"ended after {question.limit:.0f} s"
    except Exception as problem:  # noqa: BLE001 - the other questions are still to be asked
        traceback.print_exc()
        error = f"{type(problem).__name__}: {problem}"
    notes = [*bench.notes, *([f"not all of it: {error}"] if error else [])]
    seconds = round(time.monotonic() - started, 1)
    print(*(f"- {note}" for note in notes), f"({seconds:.0f} s)", sep="\n", flush=True)
    found = {"title": question.title, "seconds": seconds, **as_json(pieces), "notes": notes}
    return {**found, "error": error} if error else found


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TooLong in the block after so many seconds."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    sys.exit(main())
