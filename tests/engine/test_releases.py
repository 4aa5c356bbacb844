"""What is remembered of releases until the majority has them. (That they are made again: `test_failover`.)"""

import pytest

from django_mongolock.engine.actions import Apply
from django_mongolock.engine.session.releases import LOOK_EVERY, REMEMBERED_FOR, Releases, UnconfirmedRelease
from django_mongolock.engine.step import Step


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
