"""Keys of model instances and of rows."""

from __future__ import annotations

from django.db.models import Model, OneToOneField

from .values import escape


def model_key(instance: Model) -> str:
    """The key of a saved model instance: see `row_key`. Raises ValueError if it has no primary key."""
    return row_key(instance._meta.model, instance.pk)  # not its type: it may be a lazy object


def row_key(model: type[Model], pk: object) -> str:
    """The key of a row: ``"shop.order:<pk>"``, or ``"shop.line:<first>,<second>"`` for a composite primary key.

    A row has one key, through whichever model it is read: that of the concrete model for a proxy, and that of the
    topmost model for multi-table inheritance, where a child shares the primary key of its parent. Raises ValueError
    for None.
    """
    parts = pk if isinstance(pk, tuple) else (pk,)
    if None in parts:
        raise ValueError(f"{model.__name__} has no primary key yet: save it before you lock it")
    return f"{_topmost_model(model)._meta.label_lower}:{','.join(map(escape, parts))}"


def row_template(model: type[Model]) -> str:
    """The template of the keys of the rows of *model*."""
    return f"{_topmost_model(model)._meta.label_lower}:{{pk}}"


def _topmost_model(model: type[Model]) -> type[Model]:
    """The model whose table the primary key comes from."""
    concrete = model._meta.concrete_model or model
    link = concrete._meta.pk
    if isinstance(link, OneToOneField) and link.remote_field.parent_link:
        return _topmost_model(link.remote_field.model)
    return concrete
