"""Keys from model instances and from templates. Different calls never share a key. Values that make no key are
refused."""

from __future__ import annotations

import enum
import inspect
import unicodedata
import uuid
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from typing import Any

import pytest
from bson import ObjectId
from django.contrib.auth.models import User
from django.db import models
from django.utils.functional import SimpleLazyObject
from django.utils.translation import gettext_lazy
from hypothesis import assume, example, given
from hypothesis import strategies as st

from django_mongolock.conf import SEPARATORS
from django_mongolock.engine.text_checks import check_key
from django_mongolock.keys import KeyTemplate, call_arguments, escape, lock_key, model_key
from testproject.shop.models import Ad, Order, Seller

#: Characters that could blur the borders of a value: separators, the escape, combining marks, characters that NFC
#: changes into others (U+037E becomes a semicolon, U+2126 an omega), and braces.
TRICKY = st.text(st.sampled_from([*SEPARATORS, "%", "3", "A", "{", "}", "e", "\u0301", "\u0338", "\u037e", "\u2126"]))
VALUES = st.one_of(TRICKY, st.text(st.characters(exclude_categories=["Cs", "Cc"])), st.integers(), st.uuids())
TEMPLATES = ["{a}:{b}", "{a}={b}={c}", "{a}:{{{b}", "x{a}#fixed,{b}|{c}y"]


def fill(template: str, /, **values: Any) -> str:
    return check_key(str(lock_key(template, **values)))


def meaning(values: tuple[Any, ...]) -> list[str]:
    """Return the meaning of *values*. 5 and "5" are the same order, and the two ways to write é are the same text."""
    return [unicodedata.normalize("NFC", str(value)) for value in values]


class TestTemplates:
    @pytest.mark.parametrize("template", TEMPLATES)
    @example(left=("x\u037ey", "z", ""), right=("x", "y\u037ez", ""))
    @example(left=("p", "\u0338q\u2260r", "s"), right=("p\u2260q", "\u0338r", "s"))
    @example(left=("a:b", "c", ""), right=("a", "b:c", ""))
    @example(left=("a%3Ab", "", ""), right=("a:b", "", ""))
    @given(left=st.tuples(VALUES, VALUES, VALUES), right=st.tuples(VALUES, VALUES, VALUES))
    def test_different_arguments_make_different_keys(
        self, template: str, left: tuple[Any, ...], right: tuple[Any, ...]
    ) -> None:
        """Two calls with different arguments never share a key, whatever their characters."""
        used = len(KeyTemplate(template).names)
        assume(meaning(left[:used]) != meaning(right[:used]))
        keys = [KeyTemplate(template).fill(dict(zip("abc", values, strict=True))) for values in (left, right)]
        assert unicodedata.normalize("NFC", keys[0]) != unicodedata.normalize("NFC", keys[1])

    def test_fields_reach_into_arguments(self) -> None:
        """Attributes, items, formats and conversions work as in str.format."""
        order = Order(pk=7, item="book")
        values: dict[str, Any] = {"order": order, "rows": [{"n": 3}], "day": date(2030, 1, 2), "n": 5, "width": 4}
        assert fill("a:{order.pk}:{order.item}", **values) == "a:7:book"
        assert fill("a:{rows[0][n]}", **values) == "a:3"
        assert fill("a:{day:%Y-%m}:{n:03d}:{n!r}", **values) == "a:2030-01:005:5"
        assert fill("a:{n:0{width}d}", **values) == "a:0005"
        assert fill("mail:{template}", template=5) == "mail:5"

    @pytest.mark.parametrize(
        ("template", "problem"),
        [
            ("{}", "name a parameter"),
            ("{0}", "name a parameter"),
            ("a:{ x}", "name a parameter"),
            ("{a:{0}}", "name a parameter"),
            ("{a}{b}", "put one of"),
            ("{a}-{b}", "put one of"),
            ("{a}{{{b}", "put one of"),
            ("order:{", "Single '{'"),
            ("order:}", "Single '}'"),
            ("{a", "expected '}'"),
        ],
    )
    def test_bad_template(self, template: str, problem: str) -> None:
        """A template that cannot work is refused when it is made, by name."""
        with pytest.raises(ValueError, match="key template .*" + problem):
            KeyTemplate(template)

    def test_unknown_parameter(self) -> None:
        """A field that is no parameter of the function is an error at once. The error names the parameters."""

        def pay(request: object, order_id: int) -> None: ...

        with pytest.raises(TypeError, match=r"pay has no parameter order; it has request, order_id"):
            KeyTemplate("order:{order.pk}").check(inspect.signature(pay), "pay")
        with pytest.raises(TypeError, match="no parameter width"):
            KeyTemplate("order:{order_id:{width}}").check(inspect.signature(pay), "pay")
        KeyTemplate("order:{order_id}").check(inspect.signature(pay), "pay")

    @pytest.mark.parametrize(
        ("template", "values", "problem"),
        [
            ("x:{a.nothing}", {"a": 1}, "no 'a.nothing' in this call"),
            ("x:{a[5]}", {"a": [1]}, r"no 'a\[5\]' in this call"),
            ("x:{a[b]}", {"a": 1}, r"no 'a\[b\]' in this call"),
            ("x:{a}", {}, "no 'a' in this call"),
        ],
    )
    def test_missing_value(self, template: str, values: dict[str, Any], problem: str) -> None:
        """A call without the named value is an error that names the field."""
        with pytest.raises(ValueError, match="key template .*" + problem):
            fill(template, **values)

    @pytest.mark.parametrize(
        ("value", "problem"),
        [
            (Order(pk=5), "use {a.pk}"),
            (SimpleLazyObject(lambda: User(pk=5)), "use {a.pk}"),
            (b"5", "type bytes"),
            ((1, 2), "type tuple"),
            ([1], "type list"),
            ({"$gt": ""}, "type dict"),
            ({1}, "type set"),
            (object(), "no text of its own"),
            (fill, "no text of its own"),
            ((number for number in range(3)), "no text of its own"),
        ],
    )
    def test_value_without_a_key(self, value: object, problem: str) -> None:
        """A value without a text that two processes agree on is refused. The message names the template."""
        with pytest.raises(TypeError, match="key template 'x:{a}'.*" + problem):
            fill("x:{a}", a=value)


class Color(enum.Enum):
    RED = 1


class TestEscape:
    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (5, "5"),
            (True, "True"),
            (1.5, "1.5"),
            (Decimal("1.50"), "1.50"),
            (uuid.UUID(int=5), "00000000-0000-0000-0000-000000000005"),
            (ObjectId("65f0c0ffee65f0c0ffee65f0"), "65f0c0ffee65f0c0ffee65f0"),
            (Order.State.PAID, "paid"),
            (Color.RED, "Color.RED"),
            (gettext_lazy("lock"), "lock"),
            ("$5 off {$gt: 1}.x", "$5 off {$gt%3A 1}.x"),
            ("100%", "100%25"),
            ("", ""),
        ],
    )
    def test_text(self, value: object, text: str) -> None:
        """F54: Values are literal. Only the separators and the escape itself are encoded."""
        assert escape(value) == text


def table(name: str, base: type[models.Model] = models.Model, *, proxy: bool = False, **columns: Any) -> Any:
    """Return a new model."""
    meta = type("Meta", (), {"app_label": "tests", "proxy": proxy})
    return type(name, (base,), {"Meta": meta, "__module__": __name__, **columns})


class TestModelKey:
    @pytest.mark.parametrize(
        ("instance", "key"),
        [
            (Order(pk=5), "shop.order:5"),
            (Seller(pk="a:b"), "mongo/shop.seller:a%3Ab"),
            (Ad(pk=ObjectId("65f0c0ffee65f0c0ffee65f0")), "mongo/shop.ad:65f0c0ffee65f0c0ffee65f0"),
            (SimpleLazyObject(lambda: User(pk=3)), "auth.user:3"),
        ],
        ids=["int", "str", "ObjectId", "lazy"],
    )
    def test_key(self, instance: models.Model, key: str) -> None:
        """The key has the concrete model's label and the escaped primary key of any type."""
        assert model_key(instance) == key

    def test_other_primary_keys(self) -> None:
        """UUIDs and composite keys make keys, too. A part of a composite key cannot pass for two."""
        parcel = table("Parcel", id=models.UUIDField(primary_key=True))
        line = table(
            "Line",
            pk=models.CompositePrimaryKey("order", "number"),
            order=models.CharField(max_length=9),
            number=models.CharField(max_length=9, null=True),
        )
        assert model_key(parcel(pk=uuid.UUID(int=5))) == f"tests.parcel:{uuid.UUID(int=5)}"
        assert model_key(line(order="a", number="b,c")) == "tests.line:a,b%2Cc"
        assert model_key(line(order="a,b", number="c")) == "tests.line:a%2Cb,c"
        with pytest.raises(ValueError, match="Line has no primary key yet"):
            model_key(line(order="a"))

    def test_proxy_is_its_model(self) -> None:
        """A row is the same lock through a proxy model, and another through another model."""
        assert model_key(table("Invoice", Order, proxy=True)(pk=5)) == model_key(Order(pk=5))
        assert model_key(User(pk=5)) != model_key(Order(pk=5))

    def test_inherited_tables(self) -> None:
        """A row of multi-table inheritance is one lock, whichever of its models it is looked at as."""
        shop = table("Shop", Seller)
        market = table("Market", shop)
        stall = table("Stall", market, proxy=True)
        assert {model_key(model(pk="a:b")) for model in (Seller, shop, market, stall)} == {"mongo/shop.seller:a%3Ab"}

    def test_a_table_with_a_key_of_its_own(self) -> None:
        """A child that does not share the primary key of its parent is a row of its own."""
        parent = models.OneToOneField(Order, on_delete=models.CASCADE, parent_link=True)
        depot = table("Depot", Order, number=models.UUIDField(primary_key=True), order=parent)
        order = models.OneToOneField(Order, on_delete=models.CASCADE, primary_key=True)
        assert model_key(depot(number=uuid.UUID(int=5))) == f"tests.depot:{uuid.UUID(int=5)}"
        assert model_key(table("Receipt", order=order)(order_id=5)) == "tests.receipt:5"

    @pytest.mark.parametrize("make", [Order, Ad, Seller])
    def test_unsaved(self, make: Callable[[], models.Model]) -> None:
        """An instance that has no key yet is refused with the cure."""
        instance = make()
        instance.pk = None
        with pytest.raises(ValueError, match="has no primary key yet: save it before you lock it"):
            model_key(instance)


class TestCallArguments:
    def test_every_kind(self) -> None:
        """Positional, keyword, defaults, *args and **kwargs all have their names."""

        def call(a: Any, /, b: Any, *rest: Any, c: Any = 3, **more: Any) -> None: ...

        found = call_arguments(inspect.signature(call), (1, 2, 8, 9), {"d": 4})
        assert found == {"a": 1, "b": 2, "rest": (8, 9), "c": 3, "d": 4}

    def test_parameter_wins(self) -> None:
        """A keyword of the name of a positional-only parameter does not change the key."""

        def call(a: Any, /, **more: Any) -> None: ...

        assert call_arguments(inspect.signature(call), (1,), {"a": 2}) == {"a": 1}
