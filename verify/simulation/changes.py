"""The possible changes to the source of a module, one expression or statement at a time."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

#: The replacements of each comparison, with a moved edge or the opposite meaning.
TURNED: Final[dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPPOSITE: Final = {"max": "min", "min": "max", "any": "all", "all": "any"}
#: Names of moments, any of which may be taken for another.
MOMENTS: Final = {"now", "sent", "started", "began", "since", "until", "deadline"}
#: Calls that only inform people.
TALK: Final = {"log", "log_exception", "warn"}


@dataclass(frozen=True)
class Place:
    """The place of a node in the tree.

    - statement: statement that contains the node.
    - known: names of moments in its function.
    """

    node: ast.AST
    parent: ast.AST
    field: str
    index: int | None
    statement: ast.AST
    known: frozenset[str]

    def put(self, new: ast.AST) -> None:
        """Put another node in this place."""
        if self.index is None:
            setattr(self.parent, self.field, new)
        else:
            getattr(self.parent, self.field)[self.index] = new


# The places of changes


def changes(tree: ast.Module, only: str | None) -> Iterator[tuple[Place, ast.AST]]:
    """Yield every place in the functions of a module, with each possible replacement."""
    for place in _places(tree, tree, frozenset(), inside=False, only=only):
        for new in _instead(place):
            yield place, new


def _places(
    node: ast.AST, statement: ast.AST, known: frozenset[str], *, inside: bool, only: str | None
) -> Iterator[Place]:
    for field, value in ast.iter_fields(node):
        if field in ("decorator_list", "annotation", "returns", "args") and not isinstance(node, ast.Call):
            continue
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST) or _is_talk(child) or _is_left_out(child, node, only):
                continue
            around = child if isinstance(child, ast.stmt) else statement
            if inside:
                yield Place(child, node, field, index if isinstance(value, list) else None, around, known)
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            names = _moments(child) if is_function else known
            yield from _places(child, around, names, inside=inside or is_function, only=only)


def _is_left_out(node: ast.AST, parent: ast.AST, only: str | None) -> bool:
    """Return whether to skip a node: other classes, texts for people, and code that no object can do without."""
    name = getattr(node, "name", "")
    if isinstance(parent, ast.Module) and only is not None:
        return bool(name != only)
    is_first = isinstance(parent, ast.FunctionDef) and parent.name == "__init__"
    return name in ("__repr__", "_calling_line") or (is_first and isinstance(node, ast.Assign | ast.AnnAssign))


def _is_talk(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return False
    function = node.value.func
    return getattr(function, "id", getattr(function, "attr", "")) in TALK


def _moments(function: ast.AST) -> frozenset[str]:
    names = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    names |= {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    return frozenset(names & MOMENTS)


# The replacements


def _instead(place: Place) -> Iterator[ast.AST]:
    """Yield the possible replacements of the node in a place."""
    match place.node:
        case ast.stmt():
            yield from _statements(place.node)
        case ast.Call():
            yield from _calls(place.node)
        case ast.Name(str(name), ast.Load()) if name in MOMENTS:
            yield from (ast.Name(other, ast.Load()) for other in sorted(place.known - {name}))
        case ast.Constant(int() | float() as value):
            yield ast.Constant(not value if isinstance(value, bool) else value + 1 if value in (0, 1) else value * 2)
        case ast.BinOp():
            yield from _sums(place.node)
        case ast.comprehension(target, over, [_, *_], is_async):
            yield ast.comprehension(target, over, [], is_async)
        case node:
            yield from _conditions(node)


def _conditions(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(left, [op], rest):
            yield from (ast.Compare(left, [other()], rest) for other in TURNED[type(op)])
        case ast.BoolOp(op, values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
            yield from (_joined(op, [*values[:left_out], *values[left_out + 1 :]]) for left_out in range(len(values)))
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.IfExp(_, body, orelse):
            yield from (body, orelse)


def _sums(sum_: ast.BinOp) -> Iterator[ast.AST]:
    """Yield each operand alone, where that has a meaning."""
    if isinstance(sum_.op, ast.Add | ast.Sub | ast.Mult | ast.Div):
        yield sum_.left
    is_list = isinstance(sum_.right, ast.Constant | ast.List | ast.Tuple | ast.JoinedStr)
    if isinstance(sum_.op, ast.Add | ast.Sub) and not is_list:
        yield sum_.right


def _statements(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the statement's omission, or a condition that is never true."""
    match statement:
        case ast.If(_, body, orelse) | ast.While(_, body, orelse) if not _is_forever(statement):
            yield ast.If(ast.Constant(False), body, orelse)
        case ast.Expr(ast.Call() | ast.Await() | ast.Yield() | ast.YieldFrom()) | ast.Raise():
            yield ast.Pass()
        case ast.AugAssign() | ast.Assign([ast.Attribute() | ast.Subscript()]) | ast.Delete():
            yield ast.Pass()


def _is_forever(node: ast.AST) -> bool:
    return isinstance(node, ast.While) and isinstance(node.test, ast.Constant)


def _joined(op: ast.boolop, values: Sequence[ast.expr]) -> ast.expr:
    return values[0] if len(values) == 1 else ast.BoolOp(op, list(values))


def _calls(call: ast.Call) -> Iterator[ast.AST]:
    """Yield the opposite function, calls without one keyword argument, and largest and smallest of fewer values."""
    name = getattr(call.func, "id", "")
    if name in OPPOSITE:
        yield ast.Call(ast.Name(OPPOSITE[name], ast.Load()), call.args, call.keywords)
        if len(call.args) > 2 or (len(call.args) == 2 and not isinstance(call.args[1], ast.Starred)):
            yield from (_fewer(call, left_out) for left_out in range(len(call.args)))
    for left_out in range(len(call.keywords)):
        yield ast.Call(call.func, call.args, [*call.keywords[:left_out], *call.keywords[left_out + 1 :]])


def _fewer(call: ast.Call, left_out: int) -> ast.expr:
    args = [*call.args[:left_out], *call.args[left_out + 1 :]]
    return args[0] if len(args) == 1 and not call.keywords else ast.Call(call.func, args, call.keywords)
