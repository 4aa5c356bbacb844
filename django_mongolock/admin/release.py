"""Taking locks from their holders, or asking for them, exactly as they were shown to somebody who confirmed it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from django.core.exceptions import BadRequest

from ..conf import get_settings
from ..engine.document import check_text, tidy_fact
from ..engine.store import MongoStore
from ..exceptions import LockBackendFailed, LockDocumentDamaged
from ..inspect import operations
from ..signals import lock_forced, send

#: How many locks one confirmation may be about.
MAX_SELECTED = 100


@dataclass
class Outcome:
    """What became of each lock. done: the fencing tokens of the holders it was done to. gone: whoever had it when it
    was shown has it no more, and it was left alone. problem: why the rest was not even tried."""

    done: dict[str, list[int]] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    problem: str = ""


#: Does it to these grants of a key; returns how many of them there still were.
Act = Callable[[MongoStore, str, Sequence[str]], int]


def as_shown(key: str, tokens: Sequence[int]) -> str:
    """What a form carries of a lock and its holders. Fencing tokens name them as well as ids do, and are no secret."""
    return json.dumps([key, list(tokens)])


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
        shown.setdefault(key, []).extend(tokens)
    if len(shown) > MAX_SELECTED or not all(key.startswith(get_settings().KEY_PREFIX) for key in shown):
        raise BadRequest("not a lock of this site, or too many")
    return shown


def forcing(by: str, reason: str) -> Act:
    """Take the lock from them."""

    def act(store: MongoStore, key: str, grants: Sequence[str]) -> int:
        taken = operations.force_release(store, key, grants, by=by, reason=reason)
        if taken:
            send(lock_forced, key=key, using=get_settings().DATABASE, by=by, reason=reason)
        return len(taken)

    return act


def asking(by: str, where: str, reason: str) -> Act:
    """Ask them for the lock. What they are told is who asks, and why; where: that it is a person, in the admin."""
    requested_by = tidy_fact(f"{where}: {reason}" if reason else where)

    def act(store: MongoStore, key: str, grants: Sequence[str]) -> int:
        timeout = get_settings().COMMAND_TIMEOUT
        return operations.ask_to_release(store, key, requested_by, timeout, grants=grants, by=by, reason=reason)

    return act


def carry_out(store: MongoStore, shown: dict[str, list[int]], act: Act) -> Outcome:
    """Do it to the holders that were shown, and to nobody else. One lock that fails stops no other."""
    outcome = Outcome()
    try:
        grants = operations.find_grants(store, shown, get_settings().COMMAND_TIMEOUT)
        for key, tokens in shown.items():
            _carry_out(store, key, tokens, grants.get(key, []), act, outcome)
    except LockBackendFailed as error:
        outcome.problem = error.problem
    return outcome


def _carry_out(  # noqa: PLR0917 - one step of the loop above
    store: MongoStore, key: str, tokens: list[int], grants: list[str], act: Act, outcome: Outcome
) -> None:
    try:
        done = act(store, key, grants) if grants else 0
    except LockDocumentDamaged as error:
        outcome.damaged[key] = error.problem
        return
    if done:
        outcome.done[key] = tokens
    else:
        outcome.gone.append(key)
