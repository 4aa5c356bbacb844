"""The model of the protocol keeps its promises in every state, and each bug that is built into it is found."""

from pathlib import Path

import pytest

from verify.faults.model import BUGS, World
from verify.faults.search import HAUNTS, LARGER, WORLDS, hunt, search

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "evidence/proof.md").read_text()


SEARCHED = ((pytest.mark.long, WORLDS), (pytest.mark.program, LARGER))


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for mark, worlds in SEARCHED for name in worlds])
@pytest.mark.timeout(1_800)
def test_no_promise_is_broken_in_any_state(name: str) -> None:
    """P1, P2, P3, P5, P6, F61, F62, F64, F69: whatever happens in whatever order; the page says how many states there
    are."""
    found = search((WORLDS | LARGER)[name])
    assert not found.violation, str(found)
    assert f"| {name} | {found.states:,} |" in PAGE


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS)
def test_each_bug_is_found(bug: str) -> None:
    """The search is worth something: with the defence taken out there is a way to the harm, and it is shown."""
    found = hunt(bug)
    assert found.violation
    assert found.trace[0] == "A asks for the lock"


@pytest.mark.parametrize("bug", ["deadline from the reply", "taken and forgotten"])
def test_the_page_shows_what_the_search_finds(bug: str) -> None:
    """The traces in the docs are those of the model as it is."""
    assert str(hunt(bug)) in PAGE


@pytest.mark.long
def test_bugs_are_looked_for_where_the_healthy_protocol_was_searched() -> None:
    """What finds a bug is the bug, not the world: without it, the same world is searched to the end and clean."""
    assert not search(World()).violation
    larger = {bug for bug, world in HAUNTS.items() if world not in WORLDS.values()}
    assert larger == {"old news"}
    assert HAUNTS["old news"] in LARGER.values()
