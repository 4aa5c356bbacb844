"""What `check_locks` shows: the findings of the system checks, by subject, and the facts where nothing was found."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, Self

from django.core.checks import ERROR, CheckMessage

from ..conf import MEMORY, LockSettings, get_settings, raw_settings
from ..inspection.server_facts import ServerFacts
from .opt_in import check_kinds
from .project import project_rules
from .server import facts_of, server_rules

State = Literal["ok", "not asked", "warning", "error"]


@dataclass(frozen=True)
class Problem:
    """A finding of the system checks."""

    id: str
    level: Literal["warning", "error"]
    message: str
    cure: str

    @classmethod
    def of(cls, found: CheckMessage) -> Self:
        level: Literal["warning", "error"] = "error" if found.level >= ERROR else "warning"
        return cls(str(found.id), level, str(found.msg), str(found.hint or ""))

    def as_lines(self) -> Iterator[str]:
        """The finding, and below it its cure."""
        yield f"{self.message} ({self.id})"
        if self.cure:
            yield self.cure


@dataclass(frozen=True)
class Line:
    """What was found about one subject. fact: what is worth knowing where nothing was found; None: it was not asked."""

    name: str
    fact: str | None
    problems: list[Problem]

    @classmethod
    def of(cls, name: str, found: Iterable[CheckMessage], fact: str | None) -> Self:
        return cls(name, fact, [Problem.of(message) for message in found if not message.is_silenced()])

    @property
    def state(self) -> State:
        """The worst of its findings."""
        if self.problems:
            return "error" if any(problem.level == "error" for problem in self.problems) else "warning"
        return "ok" if self.fact is not None else "not asked"

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "name": self.name,
            "state": self.state,
            "fact": self.fact,
            "problems": [asdict(problem) for problem in self.problems],
        }


def diagnose() -> Iterator[Line]:
    """Everything that locks need, in the order in which it is to be put right. Never raises."""
    found = {name: list(messages) for name, messages in project_rules().items()}
    right = {name for name, messages in found.items() if not any(message.is_serious() for message in messages)}
    facts = _project_facts(right)
    for name, messages in found.items():
        yield Line.of(name, messages, facts.get(name))
    if right < found.keys():
        yield from (Line(name, None, []) for name in server_rules(ServerFacts(), ""))
    elif get_settings().BACKEND != MEMORY:
        yield from _server_lines(get_settings().DATABASE)


def _project_facts(right: set[str]) -> dict[str, str]:
    """Of the subjects without errors, as far as they need nothing of the others."""
    facts = {"apps": "django_mongolock is in INSTALLED_APPS"}
    if "settings" not in right:
        return facts
    settings = LockSettings(**raw_settings())
    prefix = f"KEY_PREFIX {settings.KEY_PREFIX!r}" if settings.KEY_PREFIX else "no KEY_PREFIX"
    facts["settings"] = f"LEASE {settings.LEASE:g} s, WAIT {settings.WAIT} s, {prefix}"
    if "database" in right:
        facts["database"] = "in memory" if settings.BACKEND == MEMORY else f"DATABASES[{settings.DATABASE!r}]"
        facts["router"] = "Lock.objects and migrate find this database"
    return facts


def _server_lines(alias: str) -> Iterator[Line]:
    facts = facts_of(alias)
    known = {} if facts.problem else _server_facts(facts)
    # `check` is silent about what the next `migrate` makes; here it is something to do.
    for name, messages in server_rules(replace(facts, new=False), alias).items():
        found = list(messages)
        if name == "collections" and not facts.problem:
            found += check_kinds(app_configs=None, databases=[alias])
        yield Line.of(name, found, known.get(name))


def _server_facts(facts: ServerFacts) -> dict[str, str]:
    return {
        "server": f"{facts.address} answers",
        "rights": "find, insert and update",
        "replica set": f"{facts.set_name!r}, members: {facts.members}",
        "bells": "wake waiters at their turn",
        "failover": f"takes up to {facts.failover:g} s, LEASE is longer" if facts.failover else "to no other member",
        "clock": "that of MongoDB and that of this machine agree",
        "collections": "all indexes are there",
        "versions": ", ".join(_versions(facts)),
    }


def _versions(facts: ServerFacts) -> Iterator[str]:
    yield f"MongoDB {facts.version}"
    yield f"Python {platform.python_version()}"
    for package in ("django-mongolock", "Django", "django-mongodb-backend", "PyMongo"):
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:  # it runs from its sources
            continue
