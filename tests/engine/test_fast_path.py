"""The short forms of the rule for the two most frequent commands, and the conditions for their use.

`test_rule` compares each form with the whole rule, on documents of all kinds.
"""

import pytest

from django_mongolock.engine.rule import short_forms
from django_mongolock.exceptions import LockNotAcquired
from tests.engine.conftest import Here, LockMaker
from tests.support.lock_fixtures import Commands
from tests.support.waiting import eventually

NAMES = ("TAKE_FREE", "RELEASE_UNCONTENDED")


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
    """A lock that had waiters at its last release is released in one command."""

    @staticmethod
    def released(here: Here, *, waited_for: bool) -> list[str]:
        """Return the forms of the commands that release a lock."""
        mine, waiters = here.lock().acquire(), []
        if waited_for:
            waiters = [here.waiter(here.other(wait=10))]
            assert eventually(lambda: len(here.entries()) == 2)
        here.commands.clear()
        mine.release()
        forms = sent(here.commands)
        for waiter in waiters:
            waiter.end().let_go().thread.join()
        return forms

    def test_the_last_release_counts(self, here: Here) -> None:
        """A wrong guess costs the confirmation by the majority, and no further command."""
        assert self.released(here, waited_for=True) == ["RELEASE_UNCONTENDED", "whole"]
        assert self.released(here, waited_for=True) == ["whole"]
        assert self.released(here, waited_for=False) == ["whole"]
        assert self.released(here, waited_for=False) == ["RELEASE_UNCONTENDED"]

    def test_the_next_acquisition_takes_the_key_for_free(self, here: Here) -> None:
        """P8: A release by the whole rule that finds nobody leaves a free key, too."""
        for waited_for in (True, False):
            self.released(here, waited_for=waited_for)
        with here.lock():
            assert sent(here.commands)[-1] == "TAKE_FREE"
