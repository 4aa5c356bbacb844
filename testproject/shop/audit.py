"""The judge, which finds faults at the external service from the service's own records.

The functions on calls are pure. `judge` feeds them from the database.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

from testproject.external.models import Call, ShownAd
from testproject.shop.models import Ad, Order
from testproject.shop.services import wanted


@dataclass(frozen=True)
class Verdict:
    """The findings of the judge. All but *calls* should be empty."""

    calls: int
    wrong_exports: Sequence[Call]
    wrong_withdrawals: Sequence[Call]
    overlaps: Sequence[tuple[Call, Call]]
    wrong_finals: Sequence[str]
    double_charges: Sequence[int]

    @property
    def clean(self) -> bool:
        """Whether no fault was found."""
        return not any(value for name, value in self.counts().items() if name != "calls")

    def counts(self) -> dict[str, int]:
        """Return how many there are of each, by name."""
        found = {name: getattr(self, name) for name in asdict(self)}
        return {name: value if name == "calls" else len(value) for name, value in found.items()}


def judge(since: datetime | None = None) -> Verdict:
    """Judge all calls that ended after *since*, and the final state of each ad.

    The final states only mean something once every flow has ended.
    """
    calls = list(Call.objects.filter(ended_at__gt=since) if since else Call.objects.all())
    late = overtaken(calls)
    return Verdict(
        calls=len(calls),
        wrong_exports=[call for call in late if call.kind == Call.Kind.EXPORT],
        wrong_withdrawals=[call for call in late if call.kind == Call.Kind.WITHDRAW],
        overlaps=overlaps(calls),
        wrong_finals=wrong_finals(),
        double_charges=list(Order.objects.filter(charges__gt=1).order_by("pk").values_list("pk", flat=True)),
    )


def overtaken(calls: Iterable[Call]) -> list[Call]:
    """Return the calls that took effect although a newer version had taken effect before.

    An export among them is a wrong re-export. It shows again an ad that was deleted, opted out or replaced meanwhile. A
    deleted ad has its highest version. Any export after its withdrawal is therefore wrong.
    """
    newest: dict[str, int] = defaultdict(int)
    late = []
    for call in sorted(_applied(calls), key=lambda call: call.sequence or 0):
        if call.version < newest[call.ad_id]:
            late.append(call)
        newest[call.ad_id] = max(newest[call.ad_id], call.version)
    return late


def overlaps(calls: Iterable[Call]) -> list[tuple[Call, Call]]:
    """Return pairs of calls for one ad that were under way at the same time."""
    found = []
    longest: dict[str, Call] = {}
    for call in sorted(calls, key=lambda call: call.started_at):
        before = longest.get(call.ad_id)
        if before and call.started_at < before.ended_at:
            found.append((before, call))
        if before is None or call.ended_at > before.ended_at:
            longest[call.ad_id] = call
    return found


def wrong_finals() -> list[str]:
    """Return the ads that the external service does not have as they demand now."""
    shown = {ad.pk: ad.content for ad in ShownAd.objects.filter(shown=True)}
    return [str(ad.pk) for ad in Ad.objects.all() if shown.get(str(ad.pk)) != _demanded(ad)]


def _demanded(ad: Ad) -> dict[str, str | int] | None:
    content = wanted(ad)
    return None if content is None else asdict(content)


def _applied(calls: Iterable[Call]) -> Iterable[Call]:
    return (call for call in calls if call.sequence is not None)
