"""Taking locks from their holders, exactly as they were shown to somebody who confirmed it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from django.core.exceptions import BadRequest

from ..conf import get_settings
from ..engine import upkeep
from ..engine.document import check_text
from ..engine.store import MongoStore
from ..engine.survey import Seen
from ..exceptions import LockBackendError, LockDocumentError
from ..signals import lock_forced, send

#: How many locks one confirmation may be about.
MOST = 100


@dataclass
class Outcome:
    """What became of each lock. gone: whoever had it when it was shown has it no more, and it was left alone.
    problem: why the rest was not even tried."""

    released: dict[str, int] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    problem: str = ""


def as_shown(seen: Seen) -> str:
    """What a form carries of a lock and its holders. Fencing tokens name them as well as ids do, and are no secret."""
    return json.dumps([seen.key, seen.tokens])


def read_shown(values: Iterable[str]) -> dict[str, list[int]]:
    """The keys and tokens that a form carried. Raises BadRequest for what no form of ours says."""
    shown: dict[str, list[int]] = {}
    for value in values:
        try:
            key, tokens = json.loads(value)
            check_text("a lock key", key)
        except (ValueError, TypeError, RecursionError):
            raise BadRequest("not a lock") from None
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise BadRequest("not a lock")
        shown[key] = tokens
    if len(shown) > MOST or not all(key.startswith(get_settings().KEY_PREFIX) for key in shown):
        raise BadRequest("not a lock of this site, or too many")
    return shown


def release(store: MongoStore, shown: dict[str, list[int]]) -> Outcome:
    """Take each lock from the holders that were shown, and from nobody else."""
    outcome = Outcome()
    try:
        grants = upkeep.find_grants(store, shown, get_settings().COMMAND_TIMEOUT)
        for key, tokens in shown.items():
            _release_one(store, key, tokens, grants.get(key, []), outcome)
    except LockBackendError as error:
        outcome.problem = error.problem
    return outcome


def _release_one(store: MongoStore, key: str, tokens: list[int], grants: list[str], outcome: Outcome) -> None:
    try:
        taken = upkeep.force_release(store, key, grants) if grants else []
    except LockDocumentError as error:
        outcome.damaged[key] = error.problem
        return
    if taken:
        send(lock_forced, key=key, using=get_settings().DATABASE)
        outcome.released[key] = max(tokens)
    else:
        outcome.gone.append(key)
