"""Tokens grow wherever the server can know: also where the document was removed, or restored from an older copy (F78).

The limit: where the document is gone, or an older one, *and* the server's clock is behind the last token that was
given, nobody is left who knows that token. docs/explanation/promises.md says so.
"""

import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from bson.int64 import Int64

from django_mongolock.engine.document import UNLIMITED
from tests.engine.twins import CALM, Twin

ROOT = Path(__file__).parents[2]
READER = replace(CALM, mode="shared", capacity=UNLIMITED)
OWNED = replace(CALM, owner="$bob")

Act = Callable[[Twin], object]

_numbers = count(1)


def tokens(twin: Twin) -> list[int]:
    """Those of its holders."""
    return [int(holder["token"]) for holder in twin.read()["holders"]]


def several(*acts: Act) -> Act:
    """Do them one after the other."""
    return lambda twin: [act(twin) for act in acts]


FREE = several(lambda twin: twin.add("g0"), lambda twin: twin.release("g0"))
HELD = several(lambda twin: twin.add("g0", OWNED))
QUEUED = several(*(partial(Twin.add, grant=grant) for grant in ("g0", "g1")))
READERS = several(lambda twin: twin.add("g0"), *(partial(Twin.add, grant=f"g{n}", terms=READER) for n in (1, 2, 3)))

#: How the lock may be granted: what prepares the document that is copied, and what gives it away then.
WAYS: dict[str, tuple[Act, Act]] = {
    "asked for": (FREE, lambda twin: twin.add("new")),
    "tried": (FREE, lambda twin: twin.add("new", trial=True)),
    "short form": (FREE, lambda twin: twin.take_free("new")),
    "handed over": (HELD, lambda twin: twin.add("new", remove=("g0",), force=True, given="g0")),
    "resumed": (HELD, lambda twin: twin.add("new", OWNED, remove=("g0",), force=True, resumes=True)),
    "from the queue": (QUEUED, lambda twin: twin.release("g0")),
    "three readers from the queue": (READERS, lambda twin: twin.release("g0")),
}


def use(twin: Twin) -> int:
    """Empty the key, and give it to somebody a few times more; return the last token."""
    token = 0
    for e in (*twin.read()["holders"], *twin.read()["waiters"]):
        twin.apply(remove=(e["grant"],), force=True)
    for _ in range(5):
        grant = f"more{next(_numbers)}"
        token = twin.add(grant).token
        twin.release(grant)
    return token


@pytest.mark.parametrize("way", WAYS)
def test_an_older_copy_of_the_document(twin: Twin, way: str) -> None:
    """F78, P2: a backup is restored: the next tokens are larger than all that were given since it was made."""
    prepare, give = WAYS[way]
    prepare(twin)
    copy = twin.read()
    last = use(twin)
    time.sleep(0.02)  # in memory, more than one grant fits into a millisecond
    twin.write(copy)
    give(twin)
    found = tokens(twin)
    assert found
    assert [last, *found] == sorted({last, *found})
    assert twin.read()["token"] == found[-1]


@pytest.mark.long
def test_a_document_that_was_removed(twin: Twin) -> None:
    """F78, F10, P2: as often as somebody removes it, in use or not."""
    given = []
    for number in range(12):
        given.append(twin.add(f"g{number}").token)
        given.append(use(twin))
        if number % 2:
            twin.add("held")
        time.sleep(0.02)
        twin.write(None)
    assert given == sorted(set(given))


@pytest.mark.parametrize("way", WAYS)
def test_a_clock_that_is_behind(twin: Twin, way: str) -> None:
    """F78, P2: the last token is an hour ahead of the clock, which was set back: the next are one more each."""
    prepare, give = WAYS[way]
    prepare(twin)
    ahead = round(time.time() * 1000) + 3_600_000
    twin.write({**twin.read(), "token": Int64(ahead)})
    give(twin)
    found = tokens(twin)
    assert found == list(range(ahead + 1, ahead + 1 + len(found)))
    assert found


def test_the_limit_is_said() -> None:
    """F78: in the promise itself: what is removed or restored while the clock is behind starts again lower."""
    promises = (ROOT / "docs/explanation/promises.md").read_text()
    (section,) = re.findall(r"## Order \(P2\)\n(.*?)\n## ", promises, re.DOTALL)
    limit = section.partition("*The limit.*")[2]
    assert "clock" in limit
    assert re.search(r"removed|restored", limit)
