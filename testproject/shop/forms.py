"""The input of sellers and buyers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django import forms


class AdForm(forms.Form):
    """The fields of an ad. With *partial*, only the sent fields count."""

    title = forms.CharField(max_length=200)
    body = forms.CharField(required=False)
    price = forms.IntegerField(min_value=0)

    def __init__(self, data: Mapping[str, Any], *, partial: bool = False) -> None:
        super().__init__(data)
        if partial:
            for name in set(self.fields) - set(data):
                del self.fields[name]


class OrderForm(forms.Form):
    """A new order."""

    item = forms.CharField(max_length=200)
    price = forms.DecimalField(max_digits=8, decimal_places=2, min_value=0)


class OptForm(forms.Form):
    """The switch of one ad."""

    opted_in = forms.BooleanField(required=False)


class SellerForm(forms.Form):
    """The switch of all ads of a seller."""

    exports = forms.BooleanField(required=False)
