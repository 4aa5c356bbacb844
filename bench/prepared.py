"""The imports of the process from which workers are forked. Django is set up, and the modules of the workers are
loaded.

Otherwise a hundred processes would spend a minute on importing a database backend.
"""

import contextlib
import importlib
import os
from typing import Final

import django
from django.core.exceptions import ImproperlyConfigured

PEERS: Final = (
    "redis",
    "redis_lock",
    "kazoo.client",
    "pglock",
    "django.db.backends.postgresql.base",
    "filelock",
    "mongoelector",
)
OURS: Final = ("django_mongodb_backend.base", "django_mongolock.backends", "bench.questions")

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")
django.setup()

for name in PEERS:
    with contextlib.suppress(ImportError, ImproperlyConfigured):
        importlib.import_module(name)
for name in OURS:
    importlib.import_module(name)
