"""The rule in short for the two cases that most commands are, and when it is tried.

That each form does what the whole rule does, on documents of all kinds, is a part of `test_rule`.
"""

import threading
from collections.abc import Callable

import pytest

from django_mongolock.engine.protocol.actions import Apply
from django_mongolock.engine.rule import short_forms
from django_mongolock.engine.rule.document import Step
from django_mongolock.engine.session.releases import (
    LOOK_EVERY,
    MAX_KEYS,
    NO_GUESS_FOR,
    REMEMBERED_FOR,
    FreeKeys,
    Releases,
    UnconfirmedRelease,
)
from django_mongolock.exceptions import LockBackendFailed, LockNotAcquired
from tests.engine.conftest import Document, Here, HoldUp, LockMaker
from tests.support.lock_fixtures import Commands
from tests.support.waiting import eventually

Entries = Callable[..., list[Document]]
InThread = Callable[..., threading.Thread]

NAMES = ("TAKE_FREE", "RELEASE_UNCONTENDED")


def sent(commands: Commands) -> list[str]:
    """The forms of the commands that were sent since this was asked last: short ones by their names."""
    forms = []
    for document in commands.sent:
        update = document.get("update") if "findAndModify" in document else document.get("updates", [{}])[0].get("u")
        if update is not None:
            forms.append(next((name for name in NAMES if getattr(short_forms, name) == update), "whole"))
    commands.clear()
    return forms


# When they are tried


@pytest.fixture(autouse=True)
def comes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has waited before is asked for in the whole form; here this is not so, however busy the machine is."""
    monkeypatch.setattr("django_mongolock.engine.session.commands.JUST_CAME", 60.0)


def test_a_key_that_was_left_free_is_taken_in_the_short_form(lock: LockMaker, commands: Commands) -> None:
    """P8: one command each; the first one makes the document."""
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


def test_a_key_that_is_not_known_is_taken_in_the_short_form_after_another(here: Here) -> None:
    """P8: one command, whether it makes the document or others have left it free."""
    with here.other("theirs"):
        pass
    with here.lock("first"):
        pass
    here.commands.clear()
    for key in ("new", "theirs"):
        with here.lock(key) as mine:
            assert mine.held
    assert sent(here.commands) == ["TAKE_FREE", "RELEASE_UNCONTENDED"] * 2


def test_a_wrong_guess_costs_one_command_and_is_not_made_again_soon(here: Here) -> None:
    with here.lock():
        pass
    theirs = here.other().acquire()
    here.commands.clear()
    with pytest.raises(LockNotAcquired):
        here.lock(wait=0).acquire()
    assert sent(here.commands) == ["TAKE_FREE", "whole"]
    theirs.release()
    for _ in range(NO_GUESS_FOR + 1):
        with here.lock():
            pass
    assert set(sent(here.commands)) - {"RELEASE_UNCONTENDED"} == {"whole"}
    with here.lock():
        pass
    assert sent(here.commands) == ["TAKE_FREE", "RELEASE_UNCONTENDED"]


def test_a_key_with_waiters_is_not_guessed(here: Here) -> None:
    """Whose release lets somebody in has not left a free key."""
    mine, theirs = here.lock().acquire(), here.other()
    thread = here.in_thread(lambda: theirs.acquire(10).release())
    assert eventually(lambda: len(here.entries()) == 2)
    mine.release()
    thread.join()
    here.commands.clear()
    with here.lock():
        pass
    assert sent(here.commands)[0] == "whole"


@pytest.mark.parametrize("is_new", [False, True])
def test_an_answer_that_is_lost_is_removed_as_ever(here: Here, hold_up: HoldUp, is_new: bool) -> None:
    """F17: the short command has taken the lock and nobody knows: the whole one finds the grant, whose id gets a
    tombstone. The same where it has made the document."""
    with here.lock("another" if is_new else "k"):
        pass
    hold_up(here.session.store, "take_free", late=True).fail(LockBackendFailed("gone", "k"))
    with here.lock() as mine:
        assert mine.held
        assert len(here.entries()) == 1
    assert here.entries() == []
    assert len(here.stored()["tombstones"]) == 1


# The guesses


#: What happens to keys: + it is released, - a guess was wrong, ? whether one is made, and is, ! and is not.
GUESSES = {
    "once for each release": "!k +k +k ?k !k",
    "once for a key that is not known": "+k ?new !new ?newer",
    "none for a while after a wrong one": f"-k{' +k !k' * NO_GUESS_FOR} +k ?k",
    "none for unknown keys, until one of these is free": "+k -busy +k !new +new ?newer",
}


@pytest.mark.parametrize("story", GUESSES.values(), ids=GUESSES)
def test_when_a_key_is_guessed_to_be_free(story: str) -> None:
    keys = FreeKeys()
    for act, key in ((each[0], each[1:]) for each in story.split()):
        if act == "+":
            keys.released(key)
        elif act == "-":
            keys.was_wrong(key)
        else:
            assert keys.guess(key) == (act == "?"), key


def test_those_that_were_given_back_last_are_remembered() -> None:
    keys = FreeKeys()
    for number in range(MAX_KEYS + 1):
        keys.released(f"k{number}")
    keys.was_wrong(f"k{MAX_KEYS}")
    assert not keys.guess("k0")  # not known any more
    assert keys.guess("k1")
    assert not keys.guess(f"k{MAX_KEYS}")


# What is remembered of releases until the majority has them


def release(number: int, primary: str = "one") -> UnconfirmedRelease:
    """The release of number *number*, made in that second."""
    return UnconfirmedRelease(Apply("k", Step(remove=(f"g{number}",), force=True)), primary, float(number))


@pytest.fixture
def releases() -> Releases:
    """Three that were made at the first primary, at 1, 2 and 3 seconds."""
    releases = Releases()
    for number in (1, 2, 3):
        releases.made(release(number))
    return releases


def test_after_a_failover_all_are_to_be_made_again_once(releases: Releases) -> None:
    """F7: those of the primary before."""
    assert releases.undone("two", 4) == [release(1), release(2), release(3)]
    assert releases.undone("two", 5) == []
    assert releases.look_at == float("inf")


def test_what_the_majority_has_cannot_be_undone(releases: Releases) -> None:
    """A write that was sent before a release was confirmed proves nothing about it, nor does one to another primary."""
    releases.confirmed("two", 9)
    releases.confirmed("one", 1.0)
    assert len(releases) == 3
    releases.confirmed("one", 2.5)
    assert releases.undone("two", 4) == [release(3)]


def test_while_there_is_no_primary_nothing_is_decided(releases: Releases) -> None:
    """Nor while it is the same."""
    assert releases.undone("one", 4) == []
    assert releases.undone("", 4 + REMEMBERED_FOR) == []
    assert releases.look_at == 4 + REMEMBERED_FOR + LOOK_EVERY
    assert len(releases.undone("two", 5)) == 3


def test_those_of_this_primary_stay(releases: Releases) -> None:
    releases.made(release(4, "two"))
    assert releases.undone("two", 5) == [release(1), release(2), release(3)]
    assert releases.undone("three", 5) == [release(4, "two")]


def test_they_are_forgotten_in_time(releases: Releases) -> None:
    assert releases.undone("one", 2 + REMEMBERED_FOR) == []
    assert releases.undone("two", 2 + REMEMBERED_FOR) == [release(3)]


def test_it_is_looked_soon_and_only_while_there_is_a_reason() -> None:
    releases = Releases()
    assert releases.look_at == float("inf")
    releases.made(release(7))
    releases.made(release(8))
    assert releases.look_at == 7 + LOOK_EVERY
