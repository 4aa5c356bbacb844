"""Taking documents from their holders before they are stale, as a person decided who has seen who holds them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from ..engine.logs import INFO, WARNING, log
from . import updates
from .commands import Written, find_marked, write_many
from .lock_context import Context
from .rules import Rules
from .snapshot import DocumentSnapshot
from .steps import Steps, send
from .updates import Statement

#: How many documents one update releases.
FORCE_BATCH: Final = 500


def force_release(
    context: Context, name: str, shown: Iterable[DocumentSnapshot], by: str, reason: str
) -> Steps[list[DocumentSnapshot]]:
    """Set these documents to the failed state of their work, and release them; return those that were released.

    A document that has another holder than the one that was shown, or none, is left as it is.
    """
    taken: list[DocumentSnapshot] = []
    meant = [each for each in shown if each.holder]
    for start in range(0, len(meant), FORCE_BATCH):
        taken += yield from _force(context, name, meant[start : start + FORCE_BATCH])
    for each in taken:
        log(INFO, "document release forced", document=each.id, lock=name, holder=each.holder, by=by, reason=reason)
    return taken


def _force(context: Context, name: str, some: Sequence[DocumentSnapshot]) -> Steps[list[DocumentSnapshot]]:
    rules, attempt = context.rules, f"force.{updates.new_attempt()}"
    written: Written = yield from send(write_many([_forcing(rules, attempt, each) for each in some]))
    for id_, refusal in written.refused.items():
        log(WARNING, "document not released", document=id_, lock=name, error=refusal)
    # One whose answer was lost is known by its id; what it released cannot match a second time.
    mark = updates.has(rules.fields.attempt, [attempt])
    found = yield from send(find_marked([each.id for each in some], mark, whole=False))
    return [each for each in some if each.id in found]


def _forcing(rules: Rules, attempt: str, shown: DocumentSnapshot) -> Statement:
    """Release a document that still has the holder and the state that it had when it was shown."""
    fields = rules.fields
    same = [updates.has(fields.holder, [shown.holder]), updates.has(fields.state, [shown.state])]
    update = updates.writing(rules, attempt, {}, updates.releasing(rules, shown.failed))
    return Statement(shown.id, {"$and": [updates.is_whole(fields), *same]}, update)
