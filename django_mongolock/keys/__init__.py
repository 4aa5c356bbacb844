"""Keys from model instances, and from templates such as ``"order:{order_id}"``."""

from .rows import model_key as model_key
from .rows import row_key as row_key
from .rows import row_template as row_template
from .sources import LockKey as LockKey
from .sources import as_key as as_key
from .sources import template_of as template_of
from .templates import KeyTemplate as KeyTemplate
from .templates import call_arguments as call_arguments
from .templates import lock_key as lock_key
from .templates import unexpected as unexpected
from .values import escape as escape

__all__ = ["lock_key"]
