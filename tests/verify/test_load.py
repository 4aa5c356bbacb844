"""The short version of `python3 dev.py load`. The long one measures an hour's worth of locking."""

import pytest

from bench import load
from bench.load import Row


def bad(rows: list[Row]) -> list[Row]:
    return [row for row in rows if not row.ok]


@pytest.mark.long
@pytest.mark.parametrize("part", ["cycles", "pool"])
def test_nothing_grows(part: str, mongo_uri: str) -> None:
    """P6, F20: Some 1,600 acquisitions leave no threads, connections, cursors, memory, documents or grants. A client
    with a single connection loses no lock."""
    assert not bad(load.parts(mongo_uri, quick=True)[part]())


def test_what_grows_is_seen() -> None:
    """The judgement can fail for one thread, one document, or one grant too many, and for ten megabytes."""
    before = {"threads": 5.0, "documents": 7.0, "grants, waiting, removals": 0.0, "memory, bytes": 50e6}
    after = {"threads": 6.0, "documents": 8.0, "grants, waiting, removals": 1.0, "memory, bytes": 60e6}
    assert not bad(load.grown(before, before))
    assert [row.what for row in bad(load.grown(before, after))] == list(before)
    assert "TOO MUCH" in load.table("cycles", load.grown(before, after))
    assert "TOO MUCH" not in load.table("cycles", load.grown(before, before))
