"""The errors: one way to name them."""

from __future__ import annotations

from django_mongolock import exceptions


def test_one_convention_of_names() -> None:
    """An error is named for what happened, as Django's are: only the base of all ends in Error."""
    assert [name for name in exceptions.__all__ if name.endswith("Error")] == ["LockError"]
