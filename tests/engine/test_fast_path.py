"""The rule in short for the two cases that most commands are, and when it is tried.

That each form does what the whole rule does, on documents of all kinds, is a part of `test_rule`.
"""

import pytest

from django_mongolock.engine.protocol.actions import Apply
from django_mongolock.engine.rule import short_forms
from django_mongolock.engine.rule.document import Step
from django_mongolock.engine.session.releases import (
    FAILOVER_LOOK_EVERY,
    MAX_KEYS,
    NO_GUESS_FOR,
    REMEMBERED_FOR,
    FreeKeys,
    Releases,
    UnconfirmedRelease,
)
from django_mongolock.exceptions import LockNotAcquired
from tests.engine.conftest import Here, LockMaker
from tests.support.lock_fixtures import Commands
from tests.support.waiting import eventually

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


@pytest.mark.parametrize(
    ("confirmed", "primary", "undone"),
    [
        ((), "two", (1, 2, 3)),
        ((("one", 2.5),), "two", (3,)),
        ((("two", 9), ("one", 1.0)), "two", (1, 2, 3)),  # at another primary; sent before the first was made
        ((), "one", ()),
        ((), "", ()),
    ],
)
def test_what_an_election_has_undone(
    releases: Releases, confirmed: tuple[tuple[str, float], ...], primary: str, undone: tuple[int, ...]
) -> None:
    """F7: those of the primary before, unless the majority had them; each is to be made again once. While there is no
    primary, or it is the same, nothing is decided."""
    for each in confirmed:
        releases.confirmed(*each)
    assert releases.undone(primary, 4) == [release(number) for number in undone]
    assert releases.undone("two", 5) == ([] if undone else [release(1), release(2), release(3)])
    assert releases.look_at == float("inf")


def test_those_of_this_primary_stay(releases: Releases) -> None:
    releases.made(release(4, "two"))
    assert releases.undone("two", 5) == [release(1), release(2), release(3)]
    assert releases.undone("three", 5) == [release(4, "two")]


def test_they_are_forgotten_in_time(releases: Releases) -> None:
    assert releases.undone("one", 2 + REMEMBERED_FOR) == []
    assert releases.undone("two", 2 + REMEMBERED_FOR) == [release(3)]


def test_it_is_looked_soon_and_only_while_there_is_a_reason(releases: Releases) -> None:
    assert Releases().look_at == float("inf")
    assert releases.look_at == 1 + FAILOVER_LOOK_EVERY
    releases.undone("", 4 + REMEMBERED_FOR)
    assert releases.look_at == 4 + REMEMBERED_FOR + FAILOVER_LOOK_EVERY
