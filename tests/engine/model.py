"""The grant rule once more, in plain Python: what the pipeline must do to a document, by a clock of its own."""

from dataclasses import dataclass, field, replace

from django_mongolock.engine.step import Limits, Step


@dataclass
class Entry:
    """A waiter or a holder; times in milliseconds."""

    grant: str
    mode: str
    capacity: int
    term: int
    patience: int
    hold: int
    owner: str | None
    until: int = 0
    acquired_at: int = 0
    token: int = 0
    beat: int = 0


@dataclass
class Model:
    """The document of one key, as it must be. `now` and all times are virtual."""

    limits: Limits
    now: int = 0
    exists: bool = False
    foreign: bool = False
    holders: list[Entry] = field(default_factory=list)
    waiters: list[Entry] = field(default_factory=list)
    graves: dict[str, int] = field(default_factory=dict)
    granted_now: list[Entry] = field(default_factory=list)
    given: int = 0
    changes: int = 0

    def apply(self, step: Step) -> None:
        """Do what the update does. Tokens count from 1 here."""
        self.granted_now = []
        if not self.exists and step.add is None and not step.bury:
            return
        self.exists = True
        self.changes += 1
        self.holders = self._living(self.holders, holding=True)
        self.waiters = self._living(self.waiters, holding=False)
        self.foreign = False
        owned = {entry.owner for entry in self.holders}
        if step.add and step.add.get("owner"):
            mine = step.add["owner"]
            self.holders = [e for e in self.holders if e.owner != mine or e.grant == step.add["grant"]]
            self.waiters = [e for e in self.waiters if e.owner != mine or e.grant == step.add["grant"]]
        self._remove(step)
        for entry in self.holders + self.waiters:
            if entry.grant in step.renew:
                length = entry.term if entry in self.holders else entry.patience
                entry.until = max(entry.until, self.now + max(length, step.term))
                entry.term = max(entry.term, step.term)
                entry.beat = step.beat
        if step.add:
            self._add(step.add, owned)
        self._grant(step)
        if step.trial and step.add:
            self.waiters = [entry for entry in self.waiters if entry.grant != step.add["grant"]]
        if step.bury:
            self.graves = {grant: until for grant, until in self.graves.items() if until > self.now}
            self.graves |= dict.fromkeys(step.remove, self.now + step.bury)

    def _living(self, entries: list[Entry], holding: bool) -> list[Entry]:
        living = []
        for entry in entries:
            whole = self.now + (entry.term if holding else entry.patience)
            if self.foreign or entry.until > self.now:
                living.append(replace(entry, until=whole if self.foreign else min(entry.until, whole)))
        return living

    def _remove(self, step: Step) -> None:
        kept = []
        for entry in self.holders:
            end = entry.acquired_at + entry.hold
            if entry.grant not in step.remove:
                kept.append(entry)
            elif entry.hold and end > self.now and not step.force:
                kept.append(replace(entry, until=end, term=entry.hold))
        self.holders = kept
        self.waiters = [entry for entry in self.waiters if entry.grant not in step.remove]

    def _add(self, new: dict[str, object], owned: set[str | None]) -> None:
        known = {entry.grant for entry in self.holders + self.waiters} | set(self.graves)
        if new["grant"] in known:
            return
        names = ("grant", "mode", "capacity", "term", "patience", "hold")
        entry = Entry(**{name: new[name] for name in names}, owner=new.get("owner"))  # type: ignore[arg-type]
        entry.until = self.now + entry.patience
        if entry.owner and entry.owner in owned:
            self.waiters.insert(0, entry)
        elif len(self.waiters) < self.limits.waiters:
            self.waiters.append(entry)

    def _grant(self, step: Step) -> None:
        while self.waiters:
            head = self.waiters[0]
            if self.holders and (self.holders[0].mode != head.mode or len(self.holders) >= head.capacity):
                return
            self.given += 1
            head.token, head.acquired_at = self.given, self.now
            if head.grant == step.ask:
                head.until = self.now + head.term
            self.holders.append(self.waiters.pop(0))
            self.granted_now.append(head)
