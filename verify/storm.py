"""A storm over Celery: tasks that are enqueued once, and tasks under locks, on workers that are killed at random.

    python -m verify.storm [--broker rabbitmq] [--tasks 200] [--workers 4] [--seconds 60] [--seed 1]

The broker and a MongoDB of three members are real, and so are the workers. While the tasks run, workers are killed, and
the primary is paused or steps down. Afterwards each task that was sent must have ended at least once, no two runs of
one key may have overlapped, and one lease later no key may be held. Prints the figures, and exits with 1 for a
violation.

With Redis, a kill may lose a message: kombu pops a message first (BRPOP), and notes in a second step that it is not
acknowledged. Such a loss is counted apart: no worker has received the last message of that task.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

from pymongo.errors import PyMongoError

#: The lease of the tasks, in seconds, and the visibility timeout of the broker.
LEASE, VISIBILITY = 6.0, 8.0
#: How long the last task may take after the last fault, in seconds.
PATIENCE: Final = 240.0


def main(arguments: list[str] | None = None) -> int:
    """Run a storm, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--broker", choices=["rabbitmq", "redis"], default="rabbitmq")
    parser.add_argument("--tasks", type=int, default=200, help="of each of the two kinds")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0, help="of faults")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    from testproject.servers import RabbitMQ, Redis, ReplicaSet

    with ExitStack() as stack:
        mongo = stack.enter_context(ReplicaSet(3, election_timeout=2.0))
        broker: Any = stack.enter_context(RabbitMQ() if options.broker == "rabbitmq" else Redis())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ |= {"MONGODB_URI": mongo.uri, "DJANGO_SETTINGS_MODULE": "tests.celery.settings"}
        import django
        from django.core.management import call_command

        django.setup()
        call_command("migrate", database="mongo", verbosity=0)
        storm = Storm(directory, broker.uri, mongo, options)
        try:
            return storm.run()
        finally:
            storm.end()


class Storm:
    """The workers, the tasks that were sent, and the faults of one run."""

    def __init__(self, directory: Path, broker: str, mongo: Any, options: argparse.Namespace) -> None:
        from tests.celery.conftest import SOON
        from tests.celery.workers import placed

        self.options, self.mongo, self.random = options, mongo, random.Random(options.seed)
        transport = {"visibility_timeout": VISIBILITY, **SOON} if options.broker == "redis" else {}
        self._stack = ExitStack()
        self.place = self._stack.enter_context(placed(directory, broker, mongo.uri, broker_transport_options=transport))
        self.ids: dict[str, str] = {}
        self.faults: dict[str, int] = {}

    def end(self) -> None:
        """Kill the workers."""
        self._stack.close()

    def run(self) -> int:
        """Send the tasks, let it storm, wait for peace, and judge."""
        began = time.monotonic()
        self.place.start_all(self.options.workers, concurrency=2)
        self.send()
        while time.monotonic() < began + self.options.seconds:
            time.sleep(self.random.uniform(1.0, 3.0))
            self.strike()
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and (self.unfinished() or not self.place.is_quiet()):
            time.sleep(0.5)
        time.sleep(LEASE * 1.1 + 1)
        return self.judge(time.monotonic() - began)

    def send(self) -> None:
        """Send both kinds of tasks: each key of the one kind is asked for four times, of the other ten times."""
        from tests.celery import app as tasks

        for number in range(self.options.tasks):
            key = f"once-{number // 4}"
            self.ids[tasks.indexed.delay(key, key, self.random.uniform(0.2, 3.0)).id] = key
            key = f"lock-{number // 10}"
            self.ids[tasks.late.delay(key, key, self.random.uniform(0.2, 3.0)).id] = key

    def strike(self) -> None:
        """Do one thing that happens at night."""
        fault = self.random.choice(["kill", "kill", "pause", "step down"])
        self.faults[fault] = self.faults.get(fault, 0) + 1
        if fault == "kill":
            ready = [each for each in self.place.workers if each.process.poll() is None and each.is_ready()]
            if not ready:
                return
            victim = self.random.choice(ready)
            self.note_killed(victim)
            victim.kill()
            self.place.launch(concurrency=2)
        elif fault == "pause":
            primary = self.mongo.primary()
            primary.pause()
            time.sleep(self.random.uniform(0.5, 2.0))
            primary.resume()
        else:
            with self.mongo.primary().client() as client, suppress(PyMongoError):  # the command may end its connection
                client.admin.command("replSetStepDown", 5, force=True)

    def note_killed(self, worker: Any) -> None:
        """Write down which bodies end with a worker: they have no end of their own."""
        from tests.celery.app import killed

        for begin in self.place.story.of("begin"):
            with suppress(ProcessLookupError):
                if os.getpgid(begin["pid"]) == worker.process.pid:
                    killed(begin["pid"], self.place.directory)

    def unfinished(self) -> set[str]:
        """The tasks that were sent and have not ended yet."""
        return self.ids.keys() - {each["id"] for each in self.place.story.of("end")}

    def judge(self, seconds: float) -> int:
        """Print the figures, and return 1 for a violation."""
        from django_mongolock.backends import mongo_store

        story, lost = self.place.story, self.unfinished()
        by_broker = {each for each in lost if story.of_task(each)[-1]["what"] == "message"}
        overlaps = sum(story.overlaps(key) for key in set(self.ids.values()))
        left = [each["_id"] for each in mongo_store().collection.find({"holders.0": {"$exists": True}}, {"_id": 1})]
        figures = {
            "sent": len(self.ids),
            "runs": story.count("begin"),
            "ended": story.count("end"),
            "ignored": story.count("state", state="IGNORED"),
            "failed": story.count("state", state="FAILURE"),
            **self.faults,
            "lost by Redis": len(by_broker),
            "lost": len(lost - by_broker),
            "overlaps": overlaps,
            "keys left": len(left),
        }
        print(f"seed {self.options.seed}, {seconds:.0f} s:", ", ".join(f"{name} {n}" for name, n in figures.items()))
        for each in sorted(lost):
            print("lost", self.ids[each], *(f"\n    {record}" for record in story.of_task(each)))
        print(*(f"left: {key}" for key in left), sep="\n", end="")
        is_excused = self.options.broker == "redis"
        return int(bool(lost - by_broker if is_excused else lost) or bool(overlaps or left or figures["failed"]))


if __name__ == "__main__":
    sys.exit(main())
