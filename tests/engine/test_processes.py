"""Real processes on a barrier: nobody overlaps, nobody is passed over, no increment is lost."""

import contextlib
import itertools
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
from pymongo.collection import Collection

from tests.engine.conftest import Document, Here
from tests.engine.processes import processes
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(240)  # waiting is by polling: a hand-over costs up to 40 ms

Turn = tuple[int, int, float, float]


def assert_one_after_another(turns: Iterable[Turn], count: int) -> None:
    """In the order of the increments: each number once, tokens growing, and no turn begins before the last has ended.

    The times are by CLOCK_MONOTONIC, which all processes of a machine share.
    """
    ordered = sorted(turns)
    assert [number for number, *_ in ordered] == list(range(count))
    for (_, token, _, left), (_, next_token, entered, _) in itertools.pairwise(ordered):
        assert token < next_token
        assert left <= entered


@pytest.mark.long
def test_eight_processes_lose_no_increment(collection: Collection[Document], tmp_path: Path) -> None:
    """P1, P2: 8 × 200 increments by read, sleep(0), write end at 1600; tokens grow in the order of the increments."""
    file = tmp_path / "counter"
    file.write_text("0")
    with processes(8, "count", collection.name, file, 200) as workers:
        for worker in workers:
            worker.hear()
        for worker in workers:
            worker.say()
        turns = [tuple(turn) for worker in workers for turn in worker.hear()["done"]]
    assert file.read_text() == "1600"
    assert_one_after_another(turns, 1600)


def test_without_the_lock_increments_are_lost(tmp_path: Path) -> None:
    lost = [(0, 1, 1.0, 2.0), (0, 2, 1.5, 2.5)]
    overlapping = [(0, 1, 1.0, 2.0), (1, 2, 1.5, 2.5)]
    repeated = [(0, 2, 1.0, 2.0), (1, 1, 2.5, 2.6)]
    for turns in (lost, overlapping, repeated):
        with pytest.raises(AssertionError):
            assert_one_after_another(turns, 2)


@pytest.mark.long
def test_processes_are_served_in_order_of_arrival(here: Here) -> None:
    """P5: who came first gets it first, across processes."""

    def queue_is(length: int) -> bool:
        return len(here.entries()) == length

    with contextlib.ExitStack() as stack:
        (holder,) = stack.enter_context(processes(1, "hold", here.collection.name, 60))
        holder.hear()
        waiters = []
        for number in range(6):
            waiters += stack.enter_context(processes(1, "wait_for", here.collection.name))
            assert eventually(partial(queue_is, number + 2))
        holder.say()
        granted = [waiter.hear() for waiter in waiters for _ in range(2)][1::2]
    assert [turn["at"] for turn in granted] == sorted(turn["at"] for turn in granted)
    assert [turn["token"] for turn in granted] == sorted(turn["token"] for turn in granted)
