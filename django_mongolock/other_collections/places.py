"""The places of documents: any PyMongo collection, or a Django model on MongoDB."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextvars import copy_context
from datetime import datetime
from typing import Any

import bson
from bson.codec_options import CodecOptions
from bson.datetime_ms import DatetimeMS
from bson.errors import BSONError
from django.core.exceptions import FieldDoesNotExist, ImproperlyConfigured, ValidationError
from django.db import connections, router
from django.db.models import Field, Model
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.collection import Collection

from ..backends import MongoBackend, get_backend
from ..conf import LockSettings, get_settings
from ..engine.store.errors import bounded
from ..engine.store.mongo import MongoStore
from .courier import Courier
from .field_paths import Document, get_path, set_path

#: The values that a caller may pass as the place of documents.
Place = type[Model] | Collection[Document] | Callable[[], Collection[Document]]


def make_source(place: object, using: str | None) -> Source:
    """Return the source of a place. Raises TypeError for anything else."""
    if isinstance(place, type) and issubclass(place, Model):
        return ModelSource(place, using)
    if isinstance(place, AsyncCollection):
        raise TypeError("pass the collection of a MongoClient: the awaiting methods send their commands in threads")
    if using is not None:
        raise TypeError("using= names the database of a model; a collection has its own")
    if isinstance(place, Collection) or callable(place):
        return Source(place)
    raise TypeError(f"pass a model, a PyMongo collection or a function that returns one, not {type(place).__name__}")


class Source:
    """The documents of any collection.

    A place that is a function is called for each use. The function may return the client of this process after a fork.

    - name: name of the place, for people.
    """

    #: The model of the documents, if they have one.
    model: type[Model] | None = None
    #: The field by which a document is found.
    key_column = "_id"

    def __init__(self, place: Collection[Document] | Callable[[], Collection[Document]]) -> None:
        self._place = place
        #: The known collections or tables of the place. Two sources that share one have the same documents.
        self.places: set[Any] = {place} if isinstance(place, Collection) else set()
        self.name = place.full_name if isinstance(place, Collection) else getattr(place, "__name__", "collection")
        #: The identity of the place, the same for a module that is loaded again.
        self.identity: Any = (
            self.name,
            *(getattr(place, f"__{part}__", None) for part in ("code", "defaults", "closure")),
        )

    @property
    def alias(self) -> str | None:
        """The DATABASES alias. None if the place is not in a database of Django's."""
        return None

    def courier(self) -> Courier:
        """Return the sender of commands to the collection."""
        try:
            timeout = get_settings().COMMAND_TIMEOUT
        except ImproperlyConfigured:  # a program without Django's settings
            timeout = LockSettings().COMMAND_TIMEOUT
        sender = None if self.alias is None else get_backend(self.alias).session()

        def make() -> Courier:
            with bounded(timeout):  # a function may make its client just now
                return Courier(self.collection(), timeout, sender)

        return copy_context().run(make)  # a signal handler that strikes in there leaves its time limit to the copy

    def collection(self) -> Collection[Document]:
        """Return the collection, in a client that may be used from any thread."""
        # A Collection is callable, too. PyMongo uses that to report a method that does not exist.
        found = self._place if isinstance(self._place, Collection) else self._place()
        if not isinstance(found, Collection):
            raise TypeError(f"{self.name} returned {type(found).__name__}, not a PyMongo collection")
        self.places.add(found)
        return found

    def column(self, name: str, *, must_exist: bool = True) -> str:
        """Return the name that a field has in the documents. Raises ValueError."""
        return name

    def field(self, name: str) -> Field[Any, Any] | None:
        """Return the field of the model, by its name in the model or in the documents. Return None without a model."""
        return None

    def key(self, document: object) -> Any:
        """Return the key of a document, or of an id. Raises TypeError."""
        return check_id(document["_id"] if isinstance(document, Mapping) and "_id" in document else document)

    def checked_key(self, id: object) -> Any:  # noqa: A002
        """Return the `_id` for an id that comes from outside. Raises TypeError or ValueError for an impossible one."""
        try:
            key = self.key(id)
            bson.encode({"_id": key})
        except (ValidationError, ArithmeticError, BSONError):
            raise ValueError(f"{str(id)[:50]!r} is no id of a document of {self.name}") from None
        return key

    def read(self, document: object, column: str) -> Any:
        """Return the value that a document of the caller has in a column. Raises TypeError."""
        if not isinstance(document, Mapping):
            raise TypeError("pass the document with its _id and its version, or (id, version)")
        return get_path(document, column)

    def changes(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return changes as they are stored. Raises TypeError, ValueError."""
        return dict(changes)

    def changed(self, document: Any, changes: Mapping[str, Any]) -> Any:
        """Return a document of the caller with these changes applied. Raises TypeError for (id, version)."""
        if not isinstance(document, Mapping):
            raise TypeError("a function for pending= needs the document as you have read it")
        if not changes:
            return document
        changed = copy.deepcopy(dict(document))
        for name, value in changes.items():
            set_path(changed, name, value)
        return changed

    def filter(self, filter: Mapping[str, Any]) -> dict[str, Any]:  # noqa: A002
        """Return a filter of the caller as MongoDB takes it. Raises TypeError, ValueError."""
        return dict(filter)

    def instance(self, document: Mapping[str, Any]) -> Any:
        """Return a document as the caller's own kind of object."""
        return document


class ModelSource(Source):
    """The documents of a model on MongoDB.

    The commands use a client of the library's own, as those of locks do. Coroutines and threads may use that client, it
    follows a fork, and no pool of the application blocks it.
    """

    def __init__(self, model: type[Model], using: str | None) -> None:
        if model._meta.abstract or (model._meta.concrete_model or model)._meta.parents:
            raise TypeError(f"the documents of {model._meta.label} are not in one collection of its own")
        self._model = self.model = model
        self.key_column = str(self._concrete("pk").column)
        self.name, self.identity = model._meta.label, (model._meta.label, using or "")
        self.places = {(using, model._meta.db_table)}
        self._using = using

    @property
    def alias(self) -> str:
        return self._using or router.db_for_write(self._model)

    def collection(self) -> Collection[Document]:
        alias = self.alias
        store = get_backend(alias).session().store
        if not isinstance(store, MongoStore):  # the locks are elsewhere, but these documents are in MongoDB
            backend = _others.get(alias) or _others.setdefault(alias, MongoBackend(alias, get_settings()))
            store = backend.session().store
            assert isinstance(store, MongoStore)  # noqa: S101 - what this backend has
        # Dates without a zone, in UTC, as the fields' converters expect them.
        options: CodecOptions[Document] = CodecOptions(tz_aware=False)
        found = store.client[store.config.database].get_collection(self._model._meta.db_table, options)
        self.places.add(found)
        return found

    def column(self, name: str, *, must_exist: bool = True) -> str:
        if must_exist or self.field(name) is not None:
            return str(self._concrete(name).column)
        return name

    def key(self, document: object) -> Any:
        if isinstance(document, Model):
            self._check(document)
        value = document.pk if isinstance(document, Model) else document
        field = self._concrete("pk")
        return check_id(field.get_db_prep_value(value, connections[self.alias], prepared=False))

    def read(self, document: object, column: str) -> Any:
        self._check(document)
        field = self._concrete(column)
        if field.attname not in vars(document):  # reading the field now would be another reading than that of the rest
            raise ValueError(f"this instance of {self.name} was read without {field.name!r}: take it out of defer()")
        return vars(document)[field.attname]

    def changes(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        connection = connections[self.alias]
        return {
            f"{field.column}.{rest}" if rest else field.column: value
            if rest
            else field.get_db_prep_save(value, connection)
            for field, rest, value in self._plain(changes)
        }

    def changed(self, document: Any, changes: Mapping[str, Any]) -> Any:
        if not isinstance(document, Model):
            raise TypeError("a function for pending= needs the document as you have read it")
        changed = type(document).__new__(type(document))  # not by copy(): a model may not be in the registry of apps
        vars(changed).update(vars(document))
        changed._state = copy.copy(document._state)
        changed._state.fields_cache = dict(document._state.fields_cache)
        connection = connections[self.alias]
        for field, rest, value in self._plain(changes):
            if rest:  # change the stored value, where an embedded model is a document
                inside = copy.deepcopy(field.get_db_prep_save(getattr(changed, field.attname), connection))
                stored = {"inside": {} if inside is None else inside}
                set_path(stored, f"inside.{rest}", value)
                setattr(changed, field.attname, _convert(field, stored["inside"], connection))
            else:
                setattr(changed, field.attname, field.to_python(value))
        return changed

    def filter(self, filter: Mapping[str, Any]) -> dict[str, Any]:  # noqa: A002
        return {name: {"$eq": value} for name, value in self.changes(filter).items()}

    def _plain(self, values: Mapping[str, Any]) -> Iterator[tuple[Any, str, Any]]:
        """Yield the field of each of *values*, and the path inside of it. Raises TypeError for an expression."""
        for name, value in values.items():
            if hasattr(value, "resolve_expression"):
                raise TypeError(f"{name!r}: only plain values can be written here, no expressions")
            head, _, rest = name.partition(".")
            field = self._concrete(head)
            related = field.remote_field is not None and isinstance(value, Model)
            yield field, rest, value.prepare_database_save(field) if related else value

    def instance(self, document: Mapping[str, Any]) -> Model:
        # Make the instance from the very document that the server returned. A second read could find it changed.
        connection = connections[self.alias]
        fields = self._model._meta.concrete_fields
        values = [_convert(field, document.get(str(field.column)), connection) for field in fields]
        return self._model.from_db(self.alias, [field.attname for field in fields], values)

    def _concrete(self, name: str) -> Any:
        field = self._model._meta.pk if name == "pk" else self.field(name)
        if field is None:
            known = ", ".join(sorted(field.name for field in self._model._meta.concrete_fields))
            raise ValueError(f"{self.name} has no field {name!r}: it has {known}")
        return field

    def _check(self, document: object) -> None:
        if not isinstance(document, self._model._meta.concrete_model or self._model):
            raise TypeError(f"pass an instance of {self.name}, or (pk, version), not {type(document).__name__}")

    def field(self, name: str) -> Field[Any, Any] | None:
        try:
            found = self._model._meta.get_field(name)
        except FieldDoesNotExist:
            return next((field for field in self._model._meta.concrete_fields if field.column == name), None)
        return found if isinstance(found, Field) and found.concrete else None


_others: dict[str, MongoBackend] = {}


def check_id(value: object) -> Any:
    """Return *value* as MongoDB returns it, if it can be an `_id`. Raises TypeError.

    MongoDB returns a moment without a zone, in UTC, and with milliseconds.
    """
    if value is None:
        raise TypeError("a document without an id cannot be locked: save it first")
    try:
        hash(value)
    except TypeError:
        name = type(value).__name__
        raise TypeError(f"an id of type {name} cannot be locked: it cannot be the key of a dict") from None
    if isinstance(value, datetime):
        return DatetimeMS(value).as_datetime()
    return value


def _convert(field: Field[Any, Any], value: Any, connection: Any) -> Any:
    """Return a value in the form in which the ORM reads it."""
    column = field.get_col(field.model._meta.db_table)
    for convert in (*connection.ops.get_db_converters(column), *column.get_db_converters(connection)):
        value = convert(value, column, connection)
    return value
