"""A request that saves a page: its refusals, whether a form shows them, and its retries."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Final, TypeVar

from django.db import connections, models, transaction
from django.http import HttpRequest

from .checking import all_or_nothing
from .retry import is_conflict, open_transaction

R = TypeVar("R")

#: The attribute of a request for its `Saving`.
_SAVING: Final = "_mongolock_saving"
#: The number of attempts to save a page. The last attempt only shows the form.
ATTEMPTS: Final = 3


class Refused(Exception):
    """The error for a refusal that no form shows. The transaction rolls back, and the view gives the reason."""


class Saving:
    """The outcome of a sent page. The forms of the page record their refusals here.

    - refusals: reasons why nothing of the page may be saved, besides the errors of its forms.
    - refused: whether anything was refused.
    - shown: whether a form is shown, for the first time or again.
    - last: whether the page is only shown, and no longer saved.
    - deleted: whether the object of the page was deleted.
    - anew: whether rows are added, not changed.
    - restores: whether an old version is stored again.
    - notices: messages about rows that were left out.
    - problem_of: function that returns why a row of a list may not be saved, "" if it may.
    """

    def __init__(self, problem_of: Callable[[Any], str] = lambda _row: "") -> None:
        self.problem_of = problem_of
        self.refusals: list[str] = []
        self.notices: list[str] = []
        self.refused = self.shown = self.last = self.deleted = self.anew = self.restores = False

    def run(self, aliases: Iterable[str], attempt: Callable[[], R]) -> R | None:
        """Return the result of *attempt*, run in a transaction on each of the *aliases*.

        If another writer was faster, *attempt* runs again. If something was refused and no form shows it, nothing is
        written, and the result is None.
        """
        kept = list(self.refusals)
        for number in range(1, ATTEMPTS + 1):
            self.refusals, self.notices = list(kept), []
            self.refused, self.shown, self.last = bool(kept), False, number == ATTEMPTS
            try:
                with ExitStack() as block:
                    for alias in dict.fromkeys(aliases):
                        block.enter_context(all_or_nothing(alias))
                    result = attempt()
                    if self.refused and not self.shown:
                        raise Refused
                return result  # noqa: TRY300
            except Refused as refused:
                self.refusals += map(str, refused.args)
                return self._roll_back(aliases)
            except Exception as error:
                if self.refused and not self.shown:
                    return self._roll_back(aliases)  # the refused change could not have been saved
                if self.last or not is_conflict(error):
                    raise
        return None

    @staticmethod
    def _roll_back(aliases: Iterable[str]) -> None:
        """Roll back the writes of a view around the page, such as one that restores an old version."""
        for alias in aliases:
            if open_transaction(alias):
                transaction.set_rollback(True, using=alias)

    @classmethod
    def of(cls, request: HttpRequest) -> Saving:
        """Return the `Saving` of the request. A page that is only shown has one, too."""
        found: Saving | None = getattr(request, _SAVING, None)
        if found is None:
            found = Saving()
            found.begin(request)
        return found

    def begin(self, request: HttpRequest) -> None:
        """Let the forms of the request record their refusals here."""
        setattr(request, _SAVING, self)


def locked_row(model: type[models.Model], using: str, pk: object) -> Any:
    """Return a row as it is stored, locked where the database can, or None.

    The query joins no table. PostgreSQL locks no row that a nullable relation may lack.
    """
    rows: models.QuerySet[Any] = models.QuerySet(model, using=using)
    return next(iter(rows.select_for_update().filter(pk=pk)), None)  # not first(): Oracle locks no row of a slice


def lock_rows(rows: models.QuerySet[Any], **lookup: Any) -> None:
    """Lock rows of the model of *rows* until the transaction ends, where the database can."""
    connection = connections[rows.db]
    if connection.in_atomic_block and connection.features.has_select_for_update:
        found: models.QuerySet[Any] = models.QuerySet(rows.model, using=rows.db)
        list(found.filter(**lookup).select_for_update().values_list("pk"))
