"""Edit locks. One browser tab at a time edits an object. The others read it, and see who is editing.

Use `django_mongolock.admin.EditLockMixin` in the admin, `EditLockViewMixin` in other views, and `Editing` in functions.
`EditLock` is the lock itself.
"""

from .edit_lock import EditLock, EditLockStatus, Editor, Person, edit_key
from .page import Editing
from .views import EditLockViewMixin

__all__ = ["EditLock", "EditLockStatus", "EditLockViewMixin", "Editing", "Editor", "Person", "edit_key"]
