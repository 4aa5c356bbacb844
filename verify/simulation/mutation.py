"""One change of one expression or statement of the engine's source, made when the module is imported.

Why not mutmut or cosmic-ray? Both are kept well. cosmic-ray 8.7 writes each mutant into the source file, which other
processes here import at the same time; it knows no change of an argument, a statement or a name, where most of the
holes were, and it needs a database and an HTTP library. mutmut 3.8 replaces whole functions, leaves every property
alone, and has pytest as its only judge. What is needed here is `ast` and an import hook.
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
#: The variable that says which mutant a process is.
VARIABLE: Final = "MONGOLOCK_MUTANT"
#: The modules that are changed, all that decide something and that a simulation runs; and of one, only this class.
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
    """One change. number: which one of its module. lines: those of its statement, the first and the last."""

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
    """Return the modules of the whole engine, without the servers in memory, which are for tests."""
    found = sorted(SOURCE.rglob("*.py"))
    names = [".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in found if path.stem != "__init__"]
    return [name for name in names if not name.startswith("memory_")]


def mutants(module: str) -> list[Mutant]:
    """All mutants of a module."""
    found = enumerate(changes(_parse(module), ONLY.get(module)))
    return [Mutant(module, number, _lines(place.statement), *_told(place, new)) for number, (place, new) in found]


def find(name: str) -> Mutant:
    """The mutant of that name. Raises KeyError."""
    module, _, number = name.partition(":")
    if module not in engine() or not number.isdecimal() or int(number) >= len(made := mutants(module)):
        raise KeyError(f"no mutant {name!r}")
    return made[int(number)]


def mutated(mutant: Mutant) -> ast.Module:
    """The source of its module with the change."""
    tree = _parse(mutant.module)
    place, new = list(changes(tree, ONLY.get(mutant.module)))[mutant.number]
    place.put(ast.copy_location(new, place.node))
    return ast.fix_missing_locations(tree)


def _parse(module: str) -> ast.Module:
    return ast.parse(file(module).read_text())


def file(module: str) -> Path:
    """Where its source is."""
    return SOURCE / f"{module.replace('.', '/')}.py"


def _lines(statement: ast.AST) -> tuple[int, int]:
    """Those that run whenever it does."""
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
    """Compiles the changed source; neither reads nor writes bytecode."""

    def __init__(self, name: str, path: str, mutant: Mutant) -> None:
        super().__init__(name, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        return compile(mutated(self._mutant), self.path, "exec")


class Import:
    """The import of one mutant's module, from now on."""

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
    """Have this process import the mutant of that name. Raises KeyError, or RuntimeError if it is too late."""
    hook = Import(find(name))
    if hook.module in sys.modules:
        raise RuntimeError(f"{hook.module} is imported already")
    sys.meta_path.insert(0, hook)
    return hook


def from_environment() -> None:
    """Have this process import the mutant that MONGOLOCK_MUTANT names, if it names one."""
    if name := os.environ.get(VARIABLE):
        install(name)
