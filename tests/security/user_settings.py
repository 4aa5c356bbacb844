"""The settings of a project, for a user of MongoDB with few rights."""

import os
from typing import Any

from tests.outside.settings import *  # noqa: F403
from tests.outside.settings import DATABASES, INSTALLED_APPS, MONGOLOCK

ROOT_URLCONF = "tests.outside.urls"
INSTALLED_APPS += ["django_mongolock.documents", "django_mongolock.history"]
DATABASES["default"]["NAME"] = ":memory:"
locks: Any = DATABASES["locks"]
locks |= {
    "USER": os.environ["LOCKS_USER"],
    "PASSWORD": os.environ["LOCKS_PASSWORD"],
    "OPTIONS": {"authSource": os.environ["MONGODB_NAME"]},
}
MONGOLOCK |= {"KEY_PREFIX": "shop:", "HISTORY": int(os.environ["LOCKS_HISTORY"])}  # type: ignore[dict-item]
