"""The tool that breaks the engine. A mutant runs in place of the code and leaves nothing, and the simulation finds a
defect."""

import ast
import importlib
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from django_mongolock.engine.rule.document import Step
from django_mongolock.engine.session.grant_registry import LocalQueue
from verify.simulation import hunt, mutants, mutation
from verify.simulation.defects import DEFECTS, ROWS, NothingToBreak, Patches, broken, named
from verify.simulation.invariants import elections, minimum_holds, places, tombstones
from verify.simulation.mutants import Book, Result, totals

MUTATED = "session.grant_registry"


@pytest.fixture
def unimported() -> Iterator[str]:
    """Yield a module of the engine that can be imported again. Afterwards the old module is restored."""
    name = f"{mutation.PACKAGE}.{MUTATED}"
    module = sys.modules.pop(name)
    package, _, attribute = name.rpartition(".")
    before = list(sys.meta_path)
    yield name
    sys.meta_path[:] = before
    sys.modules[name] = module
    setattr(sys.modules[package], attribute, module)


def test_a_mutant_is_what_is_imported(unimported: str) -> None:
    """The running module has one other line. The file stays as it is."""
    source = mutation.file(MUTATED).read_text()
    mutant = next(each for each in mutation.mutants(MUTATED) if each.before == "turn != 'now'")
    whole, changed = ast.unparse(ast.parse(source)), ast.unparse(mutation.mutated(mutant))
    lines = zip(whole.splitlines(), changed.splitlines(), strict=True)
    differing = [(one.strip(), other.strip()) for one, other in lines if one != other]
    assert differing == [("grant.reporting.busy = turn != 'now'", "grant.reporting.busy = turn == 'now'")]
    mutation.install(mutant.name)
    made = importlib.import_module(unimported)
    assert made.LocalQueue.join.__code__ != LocalQueue.join.__code__
    assert made.LocalQueue.turn.__code__ == LocalQueue.turn.__code__
    assert mutation.file(MUTATED).read_text() == source


def test_a_mutant_of_a_module_that_is_imported_is_refused() -> None:
    """Otherwise the whole engine would be taken for the broken one."""
    with pytest.raises(RuntimeError, match="is imported already"):
        mutation.install("session.grant:0")


@pytest.mark.parametrize("name", ["grant", "grant:99999", "grant:-1", "nothing:0", ""])
def test_an_unknown_mutant_is_an_error(name: str) -> None:
    with pytest.raises(KeyError, match="no mutant"):
        mutation.find(name)


@pytest.mark.long
def test_every_mutant_can_be_compiled_and_differs() -> None:
    for mutant in mutants.sample(60, seed=3):
        tree = mutation.mutated(mutant)
        compile(tree, "mutant", "exec")
        assert ast.dump(tree) != ast.dump(ast.parse(mutation.file(mutant.module).read_text()))


@pytest.mark.long
def test_a_larger_sample_begins_with_a_smaller_one() -> None:
    """Results of a smaller sample need not be repeated for a larger one."""
    assert mutants.sample(40, seed=1)[:20] == mutants.sample(20, seed=1)


def test_known_mutants_are_found_again(tmp_path: Path) -> None:
    """After a change of the engine, mutants are found by their text, and missing ones are dropped."""
    book, mutant = Book(tmp_path / "mutants.json"), mutation.mutants(MUTATED)[5]
    book.keep(Result(f"{MUTATED}:999", mutant.line + 1, mutant.before, mutant.after, test="a test"))
    book.keep(Result(f"{MUTATED}:1000", 1, "nothing like this", "nor this"))
    mutants.find_again(book)
    (found,) = Book(book.path).results.values()
    assert (found.name, found.line, found.test) == (mutant.name, mutant.line, "a test")


def test_the_rate_leaves_out_what_is_equivalent() -> None:
    known = [
        Result("a", 1, "", "", found="crash", test="both"),
        Result("b", 1, "", "", test="one"),
        Result("c", 1, "", "", note="equivalent: the same"),
        Result("d", 1, "", "", note="open"),
    ]
    assert totals(known) == "4 mutants: simulation 1, tests 1, equivalent 1: 66.7 %\n"


def engine() -> list[object]:
    """Return all attributes of the modules and classes of the engine and the simulation."""
    names = (f"{mutation.PACKAGE}.", "verify.simulation.")
    owners: list[Any] = [module for name, module in sorted(sys.modules.items()) if name.startswith(names)]
    owners += [each for module in owners for each in vars(module).values() if isinstance(each, type)]
    return [(id(owner), name, id(value)) for owner in owners for name, value in vars(owner).items()]


@pytest.mark.parametrize("name", sorted(DEFECTS))
def test_a_defect_is_put_back_and_undone(name: str) -> None:
    before = engine()
    with broken(name):
        assert engine() != before
    assert engine() == before


def test_the_table_in_the_docs() -> None:
    """Every defect has its row, and each row is of a defect. A misspelt name, and a patch that finds nothing to patch,
    are errors, and must not pass for a defect that nothing finds."""
    assert set(ROWS) == set(DEFECTS)
    assert (named("F111"), named("F107"), named("no-margin")) == ("stuck-renewed-first", "old-bells", "no-margin")
    with pytest.raises(KeyError), broken("no-such-defect"):
        pass
    with pytest.raises(NothingToBreak, match="has no nowhere"):
        Patches().set(mutants, "nowhere", None)


@pytest.mark.long
def test_a_defect_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    """A release that removes any holder is found by the first seeds."""
    hunt.hunt("release-by-key", 1e9)
    assert '"found": "violation"' in capsys.readouterr().out


BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def held(until: float, **facts: Any) -> dict[str, Any]:
    """Return a document held by one grant with a minimum hold of four seconds, written after two."""
    times = {"acquired_at": BEGIN, "until": BEGIN + timedelta(seconds=until), "min_hold": 4_000}
    holder = {"grant": "g", **times, **facts}
    return {"holders": [holder], "written_at": BEGIN + timedelta(seconds=2)}


def test_the_end_of_a_minimum_hold_is_not_moved() -> None:
    """F64: Nothing keeps a released lock for longer. A working holder may be renewed."""
    assert list(minimum_holds(held(4, released=BEGIN), held(4, released=BEGIN), Step())) == []
    assert list(minimum_holds(held(4), held(9), Step(renew=("g",)))) == []
    assert len(list(minimum_holds(held(4, released=BEGIN), held(5, released=BEGIN), Step(renew=("g",))))) == 1


def test_whom_another_command_grants_has_its_place_only() -> None:
    """P5, P6: A waiter that another command grants may be dead. The grant lasts only for its place, and the next waiter
    does not wait for a whole lease."""
    waits = {"waiters": [{"grant": "g", "until": BEGIN + timedelta(seconds=4)}], "holders": []}
    there = {**held(9), "holders": [{**held(9)["holders"][0], "waiter_lease": 5_000}]}
    assert len(list(places(waits, there, Step()))) == 1
    assert list(places(waits, there, Step(ask="g"))) == []
    there["holders"][0]["until"] = BEGIN + timedelta(seconds=7)
    assert list(places(waits, there, Step())) == []


def test_a_minimum_hold_is_not_ended_by_a_release() -> None:
    """A release before the end of a minimum hold leaves the holder. An operator's release does not, and neither does
    one after the lease."""
    free = {"holders": [], "written_at": BEGIN + timedelta(seconds=2)}
    assert len(list(minimum_holds(held(30), free, Step(remove=("g",))))) == 1
    assert list(minimum_holds(held(30), free, Step(remove=("g",), force=True))) == []
    assert list(minimum_holds(held(1), free, Step(remove=("g",)))) == []
    assert list(minimum_holds(held(30, min_hold=0), free, Step(remove=("g",)))) == []


def test_what_was_removed_for_good_does_not_come_back() -> None:
    """F17: A late command queues nothing. A lock that stays for its minimum hold has not come back."""
    gone = {"holders": [], "waiters": [], "tombstones": [{"grant": "g"}]}
    back = {"holders": [], "waiters": [{"grant": "g"}]}
    assert len(list(tombstones(gone, back))) == 1
    assert list(tombstones({**gone, **back}, back)) == []
    assert list(tombstones({**gone, "tombstones": []}, back)) == []


def test_an_election_ends_nobodys_place() -> None:
    """F21: A waiter has a whole place by the new clock, unless it leaves."""
    waits: dict[str, Any] = {"clock": "a", "holders": [], "waiters": [{"grant": "g"}]}
    free: dict[str, Any] = {"holders": [], "waiters": []}
    assert len(list(elections(waits, {**free, "clock": "b"}, Step()))) == 1
    for own in (Step(remove=("g",)), Step(ask="g", trial=True)):
        assert list(elections(waits, {**free, "clock": "b"}, own)) == []
    assert list(elections(waits, {**free, "clock": "a"}, Step())) == []
    assert list(elections(waits, {**waits, "clock": "b"}, Step())) == []
