"""The short forms of the rule for the three most frequent commands, and the conditions for their use.

`test_rule` compares each form with the whole rule, on documents of all kinds.
"""

from dataclasses import replace

import pytest

from django_mongolock.engine.rule import short_forms
from django_mongolock.engine.rule.document import UNLIMITED, Mode
from django_mongolock.exceptions import LockNotAcquired
from tests.engine.conftest import Here, LockMaker
from tests.engine.twins import CALM
from tests.support.lock_fixtures import Commands
from tests.support.waiting import eventually

NAMES = ("TAKE_FREE", "RELEASE_UNCONTENDED", "HAND_OVER")


def sent(commands: Commands) -> list[str]:
    """Return the forms of the commands sent since the last call, without renewals. Short forms have their names."""
    forms = []
    for document in commands.sent:
        update = document.get("update") if "findAndModify" in document else document.get("updates", [{}])[0].get("u")
        if update is not None and "renew" not in document.get("let", {}).get("c", {}).get("$literal", {}):
            forms.append(next((name for name in NAMES if getattr(short_forms, name) == update), "whole"))
    commands.clear()
    return forms


# The use of the short forms


@pytest.fixture(autouse=True)
def comes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every caller count as just come, however busy the machine is."""
    monkeypatch.setattr("django_mongolock.engine.session.commands.JUST_CAME", 60.0)


def test_a_key_that_was_left_free_is_taken_in_the_short_form(lock: LockMaker, commands: Commands) -> None:
    """P8: Acquiring and releasing take one command each, and the first one makes the document."""
    tokens = []
    for _ in range(3):
        with lock() as mine:
            assert mine.held
            tokens.append(mine.fencing_token)
    assert tokens == sorted(set(tokens))
    assert sent(commands) == [
        "whole",
        "RELEASE_UNCONTENDED",
        "TAKE_FREE",
        "RELEASE_UNCONTENDED",
        "TAKE_FREE",
        "RELEASE_UNCONTENDED",
    ]


def test_a_wrong_guess_costs_one_command_and_is_not_made_again_soon(here: Here) -> None:
    with here.lock():
        pass
    theirs = here.other().acquire()
    here.commands.clear()
    with pytest.raises(LockNotAcquired):
        here.lock(wait=0).acquire()
    assert sent(here.commands) == ["TAKE_FREE", "whole"]
    theirs.release()
    for form in ("whole", "whole"):
        with here.lock():
            assert sent(here.commands)[-1] == form


def test_a_key_with_waiters_is_not_guessed(here: Here) -> None:
    """A release that grants a waiter has not left a free key."""
    mine, theirs = here.lock().acquire(), here.other()
    thread = here.in_thread(lambda: theirs.acquire(10).release())
    assert eventually(lambda: len(here.entries()) == 2)
    mine.release()
    thread.join()
    here.commands.clear()
    with here.lock():
        pass
    assert sent(here.commands)[0] == "whole"


class TestHandOver:
    """A lock that had waiters at its last release is released in one command, and in the short form."""

    @staticmethod
    def released(here: Here, mode: Mode | None = None) -> list[str]:
        """Return the forms of the commands that release a lock, with a waiter in that *mode*."""
        mine, waiters = here.lock().acquire(), []
        if mode is not None:
            terms = replace(CALM, mode=mode, capacity=UNLIMITED if mode == "shared" else 1)
            waiters = [here.waiter(here.other(terms=terms, wait=10))]
            assert eventually(lambda: len(here.entries()) == 2)
        here.commands.clear()
        mine.release()
        forms = sent(here.commands)
        for waiter in waiters:
            waiter.end().let_go().thread.join()
        return forms

    def test_the_last_release_counts(self, here: Here) -> None:
        """A wrong guess costs a command that changes nothing, or the confirmation by the majority."""
        assert self.released(here, "exclusive") == ["RELEASE_UNCONTENDED", "HAND_OVER"]
        assert self.released(here, "exclusive") == ["HAND_OVER"]
        assert self.released(here) == ["HAND_OVER"]
        assert self.released(here) == ["RELEASE_UNCONTENDED"]

    def test_a_reader_is_let_in_by_the_whole_rule(self, here: Here) -> None:
        """While the first waiter is not exclusive, the wrong guess is not made again soon."""
        assert self.released(here, "shared") == ["RELEASE_UNCONTENDED", "HAND_OVER", "whole"]
        assert self.released(here, "shared") == ["whole"]
        assert self.released(here) == ["whole"]
        assert self.released(here) == ["RELEASE_UNCONTENDED"]
        assert self.released(here, "exclusive") == ["RELEASE_UNCONTENDED", "HAND_OVER"]

    def test_readers_are_released_by_the_whole_rule(self, here: Here) -> None:
        with here.lock(terms=replace(CALM, mode="shared", capacity=UNLIMITED)):
            here.commands.clear()
        assert sent(here.commands) == ["whole"]
