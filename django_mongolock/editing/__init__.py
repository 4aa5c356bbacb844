"""Edit locks: one browser tab at a time edits an object; the others read it, and see who edits.

For the admin it is `django_mongolock.admin.EditLockMixin`; for views of one's own, `EditLockViewMixin`, or `Editing` in
a function. `EditLock` is the lock itself.
"""

from .edit_lock import EditLock, Editor, Person, Standing, edit_key
from .requests import Editing
from .views import EditLockViewMixin

__all__ = ["EditLock", "EditLockViewMixin", "Editing", "Editor", "Person", "Standing", "edit_key"]
