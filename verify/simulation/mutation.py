"""One change of one expression or statement of the engine's source, made when the module is imported.

mutmut and cosmic-ray are well maintained, but do not fit. cosmic-ray 8.7 writes each mutant into the source file, while
other processes here import that file. It changes no arguments, statements or names, where most of the holes were. It
also needs a database and an HTTP library. mutmut 3.8 replaces whole functions, leaves every property alone, and has
pytest as its only judge. An import hook with `ast` has none of these limits.
"""

import ast
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final

from verify.simulation.changes import Place, changes

PACKAGE: Final = "django_mongolock.engine"
SOURCE: Final = Path(__file__).parents[2] / "django_mongolock" / "engine"
#: The variable that names the mutant of a process.
VARIABLE: Final = "MONGOLOCK_MUTANT"
#: The changed modules. These decide something and run in a simulation. `ONLY` restricts one of them to a class.
MODULES: Final = (
    "protocol.procedures",
    "protocol.actions",
    "rule.in_python",
    "session.grant",
    "lock.grants",
    "rule.document",
    *(
        f"session.{name}"
        for name in (
            "commands",
            "ending",
            "grant_registry",
            "heartbeat",
            "releases",
            "renewals",
            "session",
            "waits",
        )
    ),
)
ONLY: Final = {"rule.document": "Terms"}


@dataclass(frozen=True)
class Mutant:
    """One change.

    - number: number of the change in its module.
    - lines: first and last line of its statement.
    """

    module: str
    number: int
    lines: tuple[int, int]
    before: str
    after: str

    @property
    def line(self) -> int:
        return self.lines[0]

    @property
    def name(self) -> str:
        return f"{self.module}:{self.number}"

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.before} -> {self.after}"


def engine() -> list[str]:
    """Return the modules of the whole engine, without the in-memory servers for tests."""
    found = sorted(SOURCE.rglob("*.py"))
    names = [".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in found if path.stem != "__init__"]
    return [name for name in names if not name.startswith("memory_")]


def mutants(module: str) -> list[Mutant]:
    """Return all mutants of a module."""
    found = enumerate(changes(_parse(module), ONLY.get(module)))
    return [Mutant(module, number, _lines(place.statement), *_told(place, new)) for number, (place, new) in found]


def find(name: str) -> Mutant:
    """Return the mutant of that name. Raises KeyError."""
    module, _, number = name.partition(":")
    if module not in engine() or not number.isdecimal() or int(number) >= len(made := mutants(module)):
        raise KeyError(f"no mutant {name!r}")
    return made[int(number)]


def mutated(mutant: Mutant) -> ast.Module:
    """Return the changed source of the mutant's module."""
    tree = _parse(mutant.module)
    place, new = list(changes(tree, ONLY.get(mutant.module)))[mutant.number]
    place.put(ast.copy_location(new, place.node))
    return ast.fix_missing_locations(tree)


def _parse(module: str) -> ast.Module:
    return ast.parse(file(module).read_text())


def file(module: str) -> Path:
    """Return the path of the module's source."""
    return SOURCE / f"{module.replace('.', '/')}.py"


def _lines(statement: ast.AST) -> tuple[int, int]:
    """Return the lines that run whenever the statement does."""
    first: int = statement.lineno  # type: ignore[attr-defined]
    body: list[ast.stmt] = getattr(statement, "body", [])
    return first, max(first, body[0].lineno - 1) if body else statement.end_lineno  # type: ignore[attr-defined]


def _told(place: Place, new: ast.AST) -> tuple[str, str]:
    return _short(place.node), "(removed)" if isinstance(new, ast.Pass) else _short(new)


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 90 else f"{text[:87]}..."


# The import


class _Loader(importlib.machinery.SourceFileLoader):
    """A loader that compiles the changed source. It neither reads nor writes bytecode."""

    def __init__(self, name: str, path: str, mutant: Mutant) -> None:
        super().__init__(name, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        return compile(mutated(self._mutant), self.path, "exec")


class Import:
    """The import hook for one mutant's module."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant
        self.module = f"{PACKAGE}.{mutant.module}"

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.module:
            return None
        spec: Any = importlib.machinery.PathFinder.find_spec(name, path, target)
        spec.loader = _Loader(name, spec.origin, self.mutant)
        return spec  # type: ignore[no-any-return]


def install(name: str) -> Import:
    """Make this process import the mutant of that name. Raises KeyError, or RuntimeError if the module is already
    imported.
    """
    hook = Import(find(name))
    if hook.module in sys.modules:
        raise RuntimeError(f"{hook.module} is imported already")
    sys.meta_path.insert(0, hook)
    return hook


def from_environment() -> None:
    """Make this process import the mutant that MONGOLOCK_MUTANT names, if any."""
    if name := os.environ.get(VARIABLE):
        install(name)
