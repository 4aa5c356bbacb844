"""Old and new processes at one document: fields are added as optional ones, with a default in the rule (F53).

So a release that does not know a field keeps it, in the document and in its entries, for as long as these last; and a
release that knows it works where it is missing.
"""

import datetime as dt
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from bson import Timestamp
from bson.int64 import Int64

from django_mongolock.engine.rule.document import DOCUMENT_FIELDS, HOLDER_FIELDS, UNLIMITED, WAITER_FIELDS, find_damage
from tests.engine.conftest import Document
from tests.engine.twins import CALM, Twin

OWNED = replace(CALM, owner="$bob")
READER = replace(CALM, mode="shared", capacity=UNLIMITED)

#: What the next version writes in addition, into a document and into each of its entries.
NEW: Document = {
    "next": {"list": [1, {"$name": "$$NOW"}], "empty": None},
    "next_time": Timestamp(1_900_000_000, 7),
    "next_number": Int64(2**40),
    "next_text": "$holders",
}

_LATER = dt.datetime(2100, 1, 1, tzinfo=dt.UTC)
#: What is done, one thing after the other; after each: the holders, and then those who wait.
STEPS: dict[str, list[tuple[Callable[[Twin], object], str, str]]] = {
    "taken and given back": [
        (lambda k: k.add("g1", new=NEW), "g1", ""),
        (lambda k: k.release("g1"), "", ""),
        (lambda k: k.take_free("g2", new=NEW), "g2", ""),
        (lambda k: k.store.release_uncontended(["k"], ["g2"], 5), "", ""),
    ],
    "renewed": [
        (lambda k: k.add("g1", new=NEW), "g1", ""),
        (lambda k: k.add("g2", new=NEW), "g1", "g2"),
        (lambda k: k.apply(ask="g1", renew=("g1", "g2"), beat=1), "g1", "g2"),
        (lambda k: k.renew("g1", "g2", beat=2), "g1", "g2"),
        (lambda k: k.apply(ask="g1", renew=("g1",), beat=3, lease=90_000, server_lease=99_000), "g1", "g2"),
        (lambda k: k.apply(request_release_of=("g1",), requested_by="somebody"), "g1", "g2"),
    ],
    "granted from the queue": [
        (lambda k: k.add("g1", new=NEW), "g1", ""),
        (lambda k: k.add("g2", new=NEW), "g1", "g2"),
        (lambda k: k.add("r1", READER, new=NEW), "g1", "g2 r1"),
        (lambda k: k.add("r2", READER, new=NEW), "g1", "g2 r1 r2"),
        (lambda k: k.release("g1"), "g2", "r1 r2"),
        (lambda k: k.release("g2"), "r1 r2", ""),
    ],
    "handed over, tried, and resumed": [
        (lambda k: k.add("g1", OWNED, new=NEW), "g1", ""),
        (lambda k: k.add("g2", new=NEW, remove=("g1",), given="g1", force=True), "g2", ""),
        (lambda k: k.add("g3", new=NEW, trial=True), "g2", ""),
        (lambda k: k.add("g4", OWNED, new=NEW, remove=("g2",), force=True, resumes=True), "g4", ""),
    ],
    "kept for a minimum hold, through a failover": [
        (lambda k: k.add("g1", replace(CALM, min_hold=30), new=NEW), "g1", ""),
        (lambda k: k.add("g2", new=NEW), "g1", "g2"),
        (lambda k: k.release("g1"), "g1", "g2"),
        (lambda k: k.write({**k.read(), "clock": "another election"}), "g1", "g2"),
        (lambda k: k.apply(), "g1", "g2"),
    ],
    "refused by a tombstone": [
        (lambda k: k.write({**k.read(), "tombstones": [{"grant": "dead", "until": _LATER, **NEW}]}), "", ""),
        (lambda k: k.add("dead", new=NEW), "", ""),
    ],
}


def entries(document: Document, name: str) -> str:
    return " ".join(e["grant"] for e in document[name])


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_what_is_not_known_is_kept(twin: Twin, steps: list[tuple[Callable[[Twin], object], str, str]]) -> None:
    """F53: whatever is done by this release, what the next one wrote stays in the document and in its entries."""
    twin.add("first", new=NEW)
    twin.release("first")
    twin.write({**twin.read(), **NEW})
    for act, holders, waiters in steps:
        act(twin)
        document = twin.read()
        assert find_damage(document) is None
        assert (entries(document, "holders"), entries(document, "waiters")) == (holders, waiters)
        for place in (document, document["last_holder"], *document["holders"], *document["waiters"]):
            assert {name: place.get(name) for name in NEW} == NEW


def reduced(document: Document) -> Document:
    """The document as a release has left it that knew only what every document must have."""
    lists = {
        name: [{field: e[field] for field in fields} for e in document[name]]
        for name, fields in (("holders", HOLDER_FIELDS), ("waiters", WAITER_FIELDS), ("tombstones", ("grant", "until")))
    }
    return {"_id": "k", **{name: document[name] for name in DOCUMENT_FIELDS}, **lists}


def test_what_is_optional_may_be_missing(twin: Twin) -> None:
    """F53: whatever a release adds, it works with what was written without it, at every step."""
    twin.add("first")
    twin.release("first")
    steps: list[tuple[Callable[[], Any], str]] = [
        (lambda: twin.add("g1").held, "g1"),
        (lambda: twin.add("g2").place == 0, "g1 g2"),
        (lambda: twin.renew("g1", "g2", beat=1).holders["g1"].number == 1, "g1 g2"),
        (lambda: twin.add("g3", remove=("g1",), given="g1").place == 0, "g2 g3"),
        (lambda: twin.release("g2"), "g3"),
        (lambda: twin.store.read("k", "g3", 5).held, "g3"),
        (lambda: not twin.store.release_uncontended(["k"], ["g3"], 5), ""),
        (lambda: twin.take_free("g4"), "g4"),
        (lambda: twin.apply(ask="g4", remove=("g4",), force=True, tombstone_ttl=60_000), ""),
        (lambda: not twin.add("g4", trial=True).held, ""),
    ]
    for act, left in steps:
        twin.write(reduced(twin.read()))
        assert find_damage(twin.read()) is None
        assert act()
        assert f"{entries(twin.read(), 'holders')} {entries(twin.read(), 'waiters')}".strip() == left
