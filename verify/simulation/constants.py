"""The constants of the engine, such as a threshold, a limit, or the size of a pool. In some runs each is so low that it
is reached.

A test lists the constants of the engine. Each is lowered here, or left alone for a reason.
"""

import ast
import importlib
import random
from collections.abc import Iterator
from typing import Final

from verify.simulation.mutation import SOURCE
from verify.simulation.shell import ENGINE, Constant

#: Constants in the pipelines. The pipelines are made once, and the constants are replaced when a server runs one.
IN_PIPELINES: Final = {"PURGE_STEP", "MAX_HOLDERS", "LEAP"}
#: The probability that a run has lower constants, and that each of them is lower in such a run.
OFTEN: Final = 0.5
EACH: Final = 0.3

LOW: Final[dict[str, float]] = {
    "rule.expressions.PURGE_STEP": 2_000,
    "rule.document.BRIEF_RETENTION": 1_000,
    "rule.document.MAX_HOLDERS": 3,
    "rule.document.LEAP": 50,
    "protocol.procedures.TOMBSTONE_TTL": 60_000,
    "protocol.procedures.SLACK": 0.0005,
    "protocol.procedures.DEADLOCK_CHECK_AFTER": 0.1,
    "protocol.procedures.PROMPT": 0.1,
    "protocol.procedures.LOCAL_HANDOVER_GRACE": 0.01,
    "protocol.procedures.DEAD_OWNER_CHECK": 0.05,
    "session.background.AT_EXIT_PAUSE": 0.02,
    "session.background.SHORTEST_COMMAND": 0.02,
    "session.commands.JUST_CAME": 0.005,
    "session.waits.LINGER": 0.05,
    "session.waits.SILENCE": 1.2,
    "session.waits.RETRY_FIRST": 0.1,
    "session.waits.LOOK_FIRST": 0.005,
    "session.waits.LOOK_LAST": 0.02,
    "session.waits.LONGEST_POLL": 0.1,
    "session.waits.RETRY_LAST": 0.5,
    "session.notifications.CALLBACK_THREADS": 4,
    "session.notifications.MOST_CALLBACKS": 8,
    "session.releases.FAILOVER_LOOK_EVERY": 0.1,
    "session.releases.REMEMBERED_FOR": 15.0,
    "session.releases.MAX_KEYS": 2,
    "session.releases.NO_GUESS_FOR": 1,
    "session.bulk.BATCH": 2,
    "session.bulk.PARTS": 4,
    "session.bulk.SHORT_LIMIT": 0.1,
    "session.renewals.SHORTEST_RENEWAL": 0.05,
    "session.core.COMMAND_THREADS": 8,
    "session.core.MOST_THREADS": 16,
    "session.waits.CANCELLED_WITHIN": 0.1,
    "session.waits.LONGEST_HANDOVER": 0.1,
    "session.worker_threads.OVERTIME": 0.1,
    "session.worker_threads.LEAST": 0.005,
    "session.lanes.PER_KEY": 1,
    "session.lanes.SLOW": 0.05,
}

_NAMES = "it names something, or stands for none: nothing can reach it"
_REAL_STORE = "no simulated process has a real store: tests/engine/test_store.py"
_DAMAGE = "it tells damage, which is not simulated: tests/engine/test_hostile.py"
_BY_DESIGN = "what is beyond it is given up by design: below what a run reaches it would only break what it bounds"
EXEMPT: Final[dict[str, str]] = {
    "protocol.actions.FOREVER": _NAMES,
    "rule.deadlock.MAX_DEPTH": _REAL_STORE,
    "rule.document.LAST_TOKEN": _DAMAGE,
    "rule.document.LONGEST_CLAIM": _BY_DESIGN,
    "rule.document.MAX_ENTRIES": _DAMAGE,
    "rule.document.MAX_TOMBSTONES": _BY_DESIGN,
    "rule.document.SAME_TIME": _BY_DESIGN,
    "rule.document.SCHEMA": _DAMAGE,
    "rule.document.UNLIMITED": _NAMES,
    "rule.options._LONGEST": "it bounds what a caller may ask for",
    "rule.expressions._ZERO": _NAMES,
    "session.commands.GIVE_BACK_LIMIT": _BY_DESIGN,
    "session.background.GIVE_UP_AFTER": "named locks give up after a time of their own",
    "session.releases.MAX_RELEASES": _BY_DESIGN,
    "session.ending.REMOVAL_PAUSES": "the virtual time of a run has many seconds",
    "session.background.LONGEST_EXIT": "an exit in the world has few locks",
    "session.flow.LOOKS": "no simulated worker calls through asgiref: tests/engine/test_flow.py",
    "session.flow.LOOK_EVERY": "no simulated worker calls through asgiref: tests/engine/test_flow.py",
    "session.session.LAST": _NAMES,
    "lock.detached.RELEASE_PAUSES": "no simulated lock is detached: tests/celery/test_enqueuing.py",
    "session.session.APART_THREADS": "no simulated process sends from its main thread, past a session",
    "session.lanes.BACKGROUND": _NAMES,
    "session.lanes.RELEASE": _NAMES,
    "session.lanes.RENEWAL": _NAMES,
    "session.core.SPARE_CONNECTIONS": "a simulated store has no connections",
    "session.lanes.REQUEST": _NAMES,
    "session.lanes.SHARES": "the sizes that they are parts of are lowered",
    "text_checks.MAX_FACT_LENGTH": "it bounds a text",
    "text_checks.MAX_KEY_BYTES": "it bounds a text",
    "text_checks.MAX_TEXT_LENGTH": "it bounds a text",
    "lock.transaction.COMMIT_LIMIT": "transactions are not simulated: tests/engine/test_fence.py",
}


def constants() -> Iterator[str]:
    """Yield the numbers that the engine's modules define in capitals, each with its module.

    The constants of the store are left out, because no simulated process has a real store.
    """
    for path in sorted(set(SOURCE.rglob("*.py")) - set(SOURCE.glob("store/*.py"))):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        values = vars(importlib.import_module(f"{ENGINE}.{module}"))
        for node in ast.parse(path.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None) or ast.Pass()]
            names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
            yield from (f"{module}.{name}" for name in names if name.isupper() and _is_number(values[name]))


def _is_number(value: object) -> bool:
    items = value if isinstance(value, tuple) else (value,)
    return bool(items) and all(isinstance(item, int | float) for item in items)


def lowered(seed: int) -> list[Constant]:
    """Return the constants that are lower in the run of a seed."""
    chance = random.Random(f"constants {seed}")
    if chance.random() >= OFTEN:
        chosen = ["rule.expressions.PURGE_STEP"]
    else:
        chosen = [name for name in LOW if chance.random() < EACH or name == "rule.expressions.PURGE_STEP"]
    return [_lower(name) for name in chosen]


def _value(name: str) -> float:
    module, _, attribute = name.rpartition(".")
    value: float = getattr(importlib.import_module(f"{ENGINE}.{module}"), attribute)
    return value


#: The original values in the engine, whatever a defect changes.
VALUES: Final = {name: _value(name) for name in LOW}


def _lower(name: str) -> Constant:
    return name.rpartition(".")[2], VALUES[name], LOW[name]
