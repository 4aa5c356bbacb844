"""Defects that a simulation must find: old bugs, put back one at a time into the code that it runs.

Those of `verify.faults.broken` that patch this code are taken from there. What they patch in the pipeline and in the
driver has its twin, in the rule in Python and in the simulated connection. Left out are those of what is not simulated:
the journal, damaged documents, forks, and the net under signal handlers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from verify.faults.broken import VARIANTS, Patches
from verify.simulation import client_defects, rule_defects, session_defects


@dataclass(frozen=True)
class Defect:
    """breaks: the promises and rows of the failure table."""

    name: str
    text: str
    breaks: str
    patch: Callable[[Patches], None]


#: Variants of the fault tests that patch nothing but what is simulated.
_SHARED: Final = (
    "deadline-from-reply",
    "deadline-from-news",
    "place-as-lease",
    "look-as-renewal",
    "no-deadline",
    "no-tombstone",
    "taken-and-forgotten",
    "unknown-outcome-forgotten",
    "arrival-forgotten",
)
_TWINS: Final = {
    "w1-grants": client_defects.w1_grants,
    "hand-over-w1": client_defects.hand_over_w1,
    "client-clock": client_defects.client_clock,
    "release-by-key": client_defects.release_by_key,
    "renewal-without-grant": session_defects.renewal_without_grant,
    "counter-token": rule_defects.counter_token,
    "local-read-grant": client_defects.local_read,
    "no-op-as-proof": client_defects.no_op_as_proof,
    "old-time-cuts": rule_defects.old_time_cuts,
    "late-unnoticed": rule_defects.late_unnoticed,
    "set-back-unnoticed": rule_defects.set_back_unnoticed,
    "no-clock-stamp": rule_defects.no_clock_stamp,
    "waiters-never-pruned": rule_defects.waiters_never_pruned,
    "newest-first": rule_defects.newest_first,
    "released-renewed": rule_defects.released_renewed,
}
_OWN: Final = (
    Defect(
        "other-primary-never",
        "times of another clock are taken as they are",
        "F21, F23",
        rule_defects.other_primary_never,
    ),
    Defect(
        "end-of-another-clock",
        "a waiter that reads its place believes in its end there, whatever clock wrote it",
        "P1, F62",
        session_defects.end_of_another_clock,
    ),
    Defect(
        "longest-place",
        "a waiter believes in the longest place that it ever had, whatever its last command gave",
        "P1, F107",
        session_defects.longest_place,
    ),
    Defect("old-bells", "a bell is believed that tells of an earlier grant", "P1, P2, F107", session_defects.old_bells),
    Defect(
        "bell-before-majority",
        "a bell is rung before the majority has the grant",
        "P1, P3, F5",
        client_defects.bell_before_majority,
    ),
    Defect("minimum-hold-ignored", "a release ends a minimum hold", "F64", rule_defects.minimum_hold_ignored),
    Defect(
        "next-not-queued",
        "a waiter that leaves the queue names no next one of its line",
        "P5, F69",
        session_defects.next_not_queued,
    ),
    Defect(
        "tombstones-ignored",
        "an id that was removed for good can be queued",
        "P6, F17",
        rule_defects.tombstones_ignored,
    ),
    Defect(
        "heir-without-doubt",
        "after a hand-over without an answer the next waiter is taken for one that was never asked for",
        "P6, F15",
        session_defects.heir_without_doubt,
    ),
    Defect("all-in-one", "one command renews all, also after it has failed", "F66", session_defects.all_in_one),
    Defect(
        "without-limit",
        "a command may take a minute, however little is left of the wait",
        "F67",
        session_defects.without_limit,
    ),
    Defect("loss-untold", "a loss is not reported", "P7", session_defects.loss_untold),
    Defect(
        "undone-release-kept",
        "a release that an election has undone is not made again",
        "F7",
        session_defects.undone_release_kept,
    ),
)

DEFECTS: Final = {
    **{name: Defect(name, VARIANTS[name].defect, VARIANTS[name].breaks, VARIANTS[name].patch) for name in _SHARED},
    **{name: Defect(name, VARIANTS[name].defect, VARIANTS[name].breaks, patch) for name, patch in _TWINS.items()},
    **{defect.name: defect for defect in _OWN},
}


@contextlib.contextmanager
def broken(name: str | None) -> Iterator[None]:
    """Break what a simulation runs, for a block; leave it whole without a *name*. Raises KeyError."""
    patches = Patches()
    try:
        if name is not None:
            DEFECTS[name].patch(patches)
        yield
    finally:
        patches.undo()
