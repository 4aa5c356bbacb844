"""Defects that a simulation must find: old bugs, put back one at a time into the code that it runs.

docs/evidence/mutants.md says what each of them is. What patches the pipeline or the driver has a twin here, in the rule
in Python and in the simulated connection.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

from verify.faults.broken import PATCHES, Patches
from verify.simulation import client_defects, rule_defects, session_defects

#: What patches nothing but code that the simulation runs is taken from there.
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
DEFECTS: Final[dict[str, Callable[[Patches], None]]] = {
    **{name: PATCHES[name] for name in _SHARED},
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
    "other-primary-never": rule_defects.other_primary_never,
    "end-of-another-clock": session_defects.end_of_another_clock,
    "longest-place": session_defects.longest_place,
    "old-bells": session_defects.old_bells,
    "bell-before-majority": client_defects.bell_before_majority,
    "minimum-hold-ignored": rule_defects.minimum_hold_ignored,
    "next-not-queued": session_defects.next_not_queued,
    "tombstones-ignored": rule_defects.tombstones_ignored,
    "heir-without-doubt": session_defects.heir_without_doubt,
    "all-in-one": session_defects.all_in_one,
    "without-limit": session_defects.without_limit,
    "loss-untold": session_defects.loss_untold,
    "undone-release-kept": session_defects.undone_release_kept,
}


@contextlib.contextmanager
def broken(name: str | None) -> Iterator[None]:
    """Break what a simulation runs, for a block; leave it whole without a *name*. Raises KeyError."""
    patches = Patches()
    try:
        if name is not None:
            DEFECTS[name](patches)
        yield
    finally:
        patches.undo()
