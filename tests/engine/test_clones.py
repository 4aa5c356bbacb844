"""Clones of a process: a virtual machine that was paused, copied, and goes on twice (F79).

Everything in memory is the same in both: the session's id, its counter, the process's id, the state of `random`. What
the system gives (`os.urandom`) is not. That a clone goes on believing in what it held when the copy was made is the
limit that P9 names.
"""

import random
import secrets
from collections.abc import Callable
from typing import Any

import pytest

from django_mongolock.engine.session.session import Session
from tests.engine.conftest import make_lock
from tests.engine.faces import Face
from tests.engine.twins import CALM

Entries = Callable[..., list[Any]]
Clones = tuple[Session, Session]


@pytest.fixture
def clones(new_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch) -> Clones:
    """Two sessions with the same id and counter, as two clones of a machine have them."""
    with monkeypatch.context() as patch:
        patch.setattr(secrets, "token_hex", lambda length=32: "5a" * length)
        first, second = new_session(), new_session()
    assert first.id == second.id
    return first, second


def test_their_grants_have_different_ids(clones: Clones, face: Face, entries: Entries) -> None:
    """F79, F17, P1: the first grant after the copy was made, and those after it: none is taken for that of the clone,
    nor refused by its tombstone."""
    ids: list[set[str]] = []
    for session in clones:
        ids.append(set())
        for _ in range(5):
            random.seed(79)  # the state that `random` has in both
            with face.block(make_lock(session, terms=CALM)):
                ids[-1] |= {e["grant"] for e in entries()}
    assert [len(found) for found in ids] == [5, 5]
    assert ids[0] & ids[1] == set()
