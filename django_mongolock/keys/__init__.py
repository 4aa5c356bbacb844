"""Keys from model instances, and from templates such as ``"order:{order_id}"``."""

from .templates import KeyTemplate as KeyTemplate
from .templates import call_arguments as call_arguments
from .templates import lock_key as lock_key
from .templates import unexpected as unexpected
from .values import LockKey as LockKey
from .values import as_key as as_key
from .values import escape as escape
from .values import model_key as model_key
from .values import row_key as row_key
from .values import row_template as row_template
from .values import template_of as template_of

__all__ = ["lock_key"]
