"""Errors that come out of a function given to ``transaction.on_commit``: what they follow is committed."""

from __future__ import annotations

from traceback import walk_tb
from typing import Final

#: The methods of a connection that call such functions: after the commit, or at once where there is no transaction.
_CALLERS: Final = ("run_and_clear_commit_hooks", "on_commit")
_MODULES: Final = ("django.db.", "django_mongodb_backend.")


def out_of_commit_hook(error: BaseException) -> bool:
    """Return whether *error*, or an error of its group, was raised by such a function.

    The work before it must not be done again. Only what was called since the error is looked at: work that is itself
    called by such a function is not meant.
    """
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return any(map(out_of_commit_hook, inner)) or any(
        frame.f_code.co_name in _CALLERS and str(frame.f_globals.get("__name__")).startswith(_MODULES)
        for frame, _line in walk_tb(error.__traceback__)
    )
