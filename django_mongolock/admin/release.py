"""Taking locks from their holders, or asking for their release, exactly as a person saw and confirmed it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from django.core.exceptions import BadRequest

from ..backends.base import mongo_store
from ..conf import get_settings
from ..engine.store.mongo import MongoStore
from ..engine.text_checks import check_text, tidy_fact
from ..exceptions import LockBackendFailed, LockDocumentDamaged
from ..inspection import operations
from ..signals import lock_forced, send

#: How many locks one confirmation may be about.
MAX_SELECTED: Final = 100


@dataclass
class Outcome:
    """The result for each lock. done: the fencing tokens of the holders. changed: locks with other holders than those
    shown. problem: why the remaining locks were not processed."""

    done: dict[str, list[int]] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    problem: str = ""


#: Acts on these grants of a key; returns on how many of them.
Act = Callable[[MongoStore, str, Sequence[str]], int]


def as_shown(key: str, tokens: Sequence[int]) -> str:
    """A lock and its holders in a form. Fencing tokens identify holders as well as ids do, and are no secret."""
    return json.dumps([key, list(tokens)])


def read_shown(values: Iterable[str]) -> dict[str, list[int]]:
    """Read the keys and tokens of a form. Raises BadRequest for values that no form of ours has."""
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
    """Take the lock from its holders."""

    def act(store: MongoStore, key: str, grants: Sequence[str]) -> int:
        taken = operations.force_release(store, key, grants, by=by, reason=reason)
        if taken:
            send(lock_forced, key=key, using=get_settings().DATABASE, by=by, reason=reason)
        return len(taken)

    return act


def asking(by: str, where: str, reason: str) -> Act:
    """Ask the holders to release the lock. where: who asks and from where, which they learn with the reason."""
    requested_by = tidy_fact(f"{where}: {reason}" if reason else where)

    def act(store: MongoStore, key: str, grants: Sequence[str]) -> int:
        timeout = get_settings().COMMAND_TIMEOUT
        return operations.ask_to_release(store, key, requested_by, timeout, grants=grants, by=by, reason=reason)

    return act


def carry_out(shown: dict[str, list[int]], act: Act) -> Outcome:
    """Act on the holders that were shown, and on no others. A lock that fails does not stop the others."""
    outcome, store = Outcome(), mongo_store()
    try:
        grants = operations.find_grants(store, shown, get_settings().COMMAND_TIMEOUT)
        for key, tokens in shown.items():
            try:
                done = act(store, key, grants[key]) if grants.get(key) else 0
            except LockDocumentDamaged as error:
                outcome.damaged[key] = error.problem
                continue
            if done:
                outcome.done[key] = tokens
            else:
                outcome.changed.append(key)
    except LockBackendFailed as error:
        outcome.problem = error.problem
    return outcome
