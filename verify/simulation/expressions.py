"""A small interpreter of the aggregation operators in the engine's pipelines. It runs exactly the pipelines that are
sent.

The interpreter knows no rule. A test compares it with MongoDB, on random documents and steps, damaged ones too. During
simulations it checks the rule in Python and carries out the short forms.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import lru_cache, partial
from typing import Any, Final

import bson
from bson.int64 import Int64
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp

Document = dict[str, Any]
Variables = dict[str, Any]
Pipeline = Sequence[RawBSONDocument]
Expression = Callable[[Variables], Any]

#: The value of a field that does not exist. This value is not stored.
MISSING: Final = type("Missing", (), {"__repr__": lambda self: "MISSING"})()
_MILLISECOND: Final = timedelta(milliseconds=1)
#: The names of types in MongoDB's sort order, and the place of each type among them.
_NAMES: Final = ("missing", "null", "number", "string", "object", "array", "bool", "date", "timestamp")
_KINDS: Final[dict[type, int]] = {
    type(MISSING): 0, type(None): 1, int: 2, float: 2, Int64: 2, str: 3, dict: 4, list: 5, bool: 6, datetime: 7,
    Timestamp: 8,
}  # fmt: skip
#: The kinds whose values compare as in Python.
_SIMPLE: Final = frozenset({2, 3, 6, 7, 8})


def run(pipeline: Pipeline, document: Document, variables: Variables, now: datetime) -> Document:
    """Return the document after the stages (`$set` and `$replaceWith`)."""
    for stage in pipeline:
        known = {"NOW": now, "ROOT": document, **variables}
        ((name, made),) = _stages(stage.raw)
        after = made(known)
        document = _stored({**document, **after} if name == "$set" else after)
    return document


def project(fields: RawBSONDocument, document: Document, variables: Variables, now: datetime) -> Document:
    """Return the projection of a document. The value 1 stands for an unchanged field."""
    known = {"NOW": now, "ROOT": document, **variables}
    shown = {name: f"${name}" if field == 1 else field for name, field in bson.decode(fields.raw).items() if field != 0}
    shown_fields: Document = _stored(_compiled(shown)(known))
    return shown_fields


def bound(arguments: Mapping[str, Any]) -> Variables:
    """Return the variables of a command's `let`."""
    return {name: _compiled(value)({}) for name, value in arguments.items()}


@lru_cache
def with_constants(stages: tuple[bytes, ...], constants: tuple[tuple[int, int], ...]) -> Pipeline:
    """Return the pipeline with some numbers replaced."""
    others = dict(constants)

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: changed(item) for name, item in value.items()}
        if isinstance(value, list):
            return [changed(item) for item in value]
        return others.get(value, value) if type(value) is int else value

    return [RawBSONDocument(bson.encode(changed(bson.decode(stage, _DATES)))) for stage in stages]


@lru_cache
def _stages(raw: bytes) -> list[tuple[str, Expression]]:
    stage = bson.decode(raw, _DATES).items()
    return [(name, _changes(given) if name == "$set" else _compiled(given)) for name, given in stage]


def _changes(fields: Document) -> Expression:
    """Return the fields of a `$set`. Fields that come out as missing are removed."""
    parts = {name: _compiled(field) for name, field in fields.items()}
    return lambda known: {name: part(known) for name, part in parts.items()}


_DATES: Final[Any] = bson.CodecOptions(tz_aware=True)


def _stored(value: Any) -> Any:
    """Return the stored form of a value, without missing fields and with null for missing array items."""
    if isinstance(value, dict):
        return {name: _stored(item) for name, item in value.items() if item is not MISSING}
    if isinstance(value, list):
        return [None if item is MISSING else _stored(item) for item in value]
    return value


def _compiled(expression: Any) -> Expression:
    match expression:
        case str() if expression.startswith("$"):
            name, *path = expression[2:].split(".") if expression[1] == "$" else ("ROOT", *expression[1:].split("."))
            return (lambda known: _at(known[name], path)) if path else lambda known: known[name]
        case list():
            items = [_compiled(item) for item in expression]
            return lambda known: [item(known) for item in items]
        case dict() if len(expression) == 1 and (name := next(iter(expression))).startswith("$"):
            given = expression[name]
            return _SPECIAL[name](given) if name in _SPECIAL else _called(_OPERATORS[name], given)
        case dict():
            parts = {name: _compiled(item) for name, item in expression.items()}
            return lambda known: {name: value for name, item in parts.items() if (value := item(known)) is not MISSING}
    return lambda known: expression


def _called(operator: Callable[..., Any], given: Any) -> Expression:
    """Return an operator with its arguments. A value that is no list is the only argument."""
    match [_compiled(item) for item in (given if isinstance(given, list) else [given])]:
        case [one]:
            return lambda known: operator(one(known))
        case [one, other]:
            return lambda known: operator(one(known), other(known))
        case arguments:
            return lambda known: operator(*[argument(known) for argument in arguments])


def _at(value: Any, path: Sequence[str]) -> Any:
    """Return the value at a path. For an array, return the values of its objects at the path."""
    for place, name in enumerate(path):
        if type(value) is dict:
            value = value.get(name, MISSING)
        elif type(value) is list:
            found = [_at(item, path[place:]) for item in value if type(item) in (dict, list)]
            return [item for item in found if item is not MISSING]
        else:
            return MISSING
    return value


# Values


def order(value: Any) -> Any:
    """Return a key that compares values of all types as MongoDB does."""
    kind = _KINDS[type(value)]
    if kind in _SIMPLE:
        return kind, value
    match value:
        case dict():
            return kind, [(_KINDS[type(item)], name, order(item)) for name, item in value.items()]
        case list():
            return kind, [order(item) for item in value]
    return (kind,)


def is_true(value: Any) -> bool:
    """Return whether a condition with this value is met."""
    return value is not MISSING and value is not None and value != 0


def _is_null(value: Any) -> bool:
    return value is None or value is MISSING


def type_of(value: Any) -> str:
    """Return the name of the value's type."""
    if isinstance(value, Int64):
        return "long"
    if isinstance(value, float):
        return "double"
    return "int" if type(value) is int else _NAMES[_KINDS[type(value)]]


def _add(*values: Any) -> Any:
    if any(map(_is_null, values)):
        return None
    numbers = [value for value in values if not isinstance(value, datetime)]
    total = _sum(*numbers)
    moments = [value for value in values if isinstance(value, datetime)]
    return moments[0] + int(total) * _MILLISECOND if moments else total


def _sum(*values: Any) -> Any:
    numbers = [item for item in _items(values) if _KINDS[type(item)] == 2]
    return Int64(sum(numbers)) if any(isinstance(item, Int64) for item in numbers) else sum(numbers)


def _subtract(one: Any, other: Any) -> Any:
    if _is_null(one) or _is_null(other):
        return None
    if isinstance(one, datetime):
        return Int64((one - other) // _MILLISECOND) if isinstance(other, datetime) else one - int(other) * _MILLISECOND
    return _sum(one, -other if not isinstance(other, Int64) else Int64(-other))


def _items(values: Sequence[Any]) -> Sequence[Any]:
    """Return the values to count. An array that stands alone stands for its items."""
    return values[0] if len(values) == 1 and isinstance(values[0], list) else values


def _extreme(choose: Callable[..., Any]) -> Callable[..., Any]:
    def of(*values: Any) -> Any:
        return choose((item for item in _items(values) if not _is_null(item)), key=order, default=None)

    return of


def _merged(*values: Any) -> Any:
    made: dict[str, Any] = {}
    for value in _items(values):
        made |= {} if _is_null(value) else {name: item for name, item in value.items() if item is not MISSING}
    return made


def _concatenated(*values: Any) -> Any:
    return None if any(map(_is_null, values)) else [item for value in values for item in value]


def _element(items: Any, place: int) -> Any:
    if _is_null(items):
        return None
    return items[place] if -len(items) <= place < len(items) else MISSING


def _slice(items: Any, *limits: int) -> Any:
    if _is_null(items):
        return None
    if len(limits) == 1:
        return items[: limits[0]] if limits[0] >= 0 else items[limits[0] :]
    return items[limits[0] : limits[0] + limits[1]]


def _is_in(value: Any, items: Any) -> bool:
    return any(order(value) == order(item) for item in items)


def _index(items: Any, value: Any) -> Any:
    if _is_null(items):
        return None
    return next((place for place, item in enumerate(items) if order(item) == order(value)), -1)


def _set(one: Any, other: Any, *, keep: bool) -> Any:
    if _is_null(one) or _is_null(other):
        return None
    return [item for place, item in enumerate(one) if _is_in(item, other) is keep and not _is_in(item, one[:place])]


def _to_long(value: Any) -> Any:
    return None if _is_null(value) else Int64(value.timestamp() * 1000 + 0.5 if isinstance(value, datetime) else value)


_OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "$add": _add,
    "$allElementsTrue": lambda items: all(map(is_true, items)),
    "$arrayElemAt": _element,
    "$concatArrays": _concatenated,
    "$eq": lambda one, other: order(one) == order(other),
    "$first": lambda items: _element(items, 0),
    "$isArray": lambda value: isinstance(value, list),
    "$gt": lambda one, other: order(one) > order(other),
    "$gte": lambda one, other: order(one) >= order(other),
    "$in": _is_in,
    "$indexOfArray": _index,
    "$last": lambda items: _element(items, -1),
    "$lt": lambda one, other: order(one) < order(other),
    "$lte": lambda one, other: order(one) <= order(other),
    "$max": _extreme(max),
    "$mergeObjects": _merged,
    "$min": _extreme(min),
    "$ne": lambda one, other: order(one) != order(other),
    "$not": lambda value: not is_true(value),
    "$range": lambda start, end: list(range(start, end)),
    "$setDifference": lambda one, other: _set(one, other, keep=False),
    "$setIntersection": lambda one, other: _set(one, other, keep=True),
    "$size": len,
    "$slice": _slice,
    "$subtract": _subtract,
    "$sum": _sum,
    "$toLong": _to_long,
    "$type": type_of,
}


# Operators that evaluate their arguments only if needed, or once for each item


def _joined(join: Callable[[Iterable[bool]], bool], given: Any) -> Expression:
    parts = [_compiled(item) for item in given]
    return lambda known: join(is_true(part(known)) for part in parts)


def _if(given: Any) -> Expression:
    condition, then, otherwise = map(_compiled, given)
    return lambda known: then(known) if is_true(condition(known)) else otherwise(known)


def _if_null(given: Any) -> Expression:
    *parts, last = map(_compiled, given)

    def first(known: Variables) -> Any:
        for part in parts:
            if not _is_null(value := part(known)):
                return value
        return last(known)

    return first


def _let(given: Any) -> Expression:
    variables = {name: _compiled(value) for name, value in given["vars"].items()}
    inside = _compiled(given["in"])
    return lambda known: inside(known | {name: value(known) for name, value in variables.items()})


def _map(given: Any) -> Expression:
    items, name, each = _compiled(given["input"]), given.get("as", "this"), _compiled(given["in"])

    def mapped(known: Variables) -> Any:
        found = items(known)
        return None if _is_null(found) else [each({**known, name: item}) for item in found]

    return mapped


def _filter(given: Any) -> Expression:
    items, name, condition = _compiled(given["input"]), given.get("as", "this"), _compiled(given["cond"])

    def filtered(known: Variables) -> Any:
        found = items(known)
        return None if _is_null(found) else [item for item in found if is_true(condition({**known, name: item}))]

    return filtered


_SPECIAL: Final[dict[str, Callable[[Any], Expression]]] = {
    "$and": partial(_joined, all),
    "$cond": _if,
    "$filter": _filter,
    "$ifNull": _if_null,
    "$let": _let,
    "$literal": lambda given: lambda known: given,
    "$map": _map,
    "$or": partial(_joined, any),
}
