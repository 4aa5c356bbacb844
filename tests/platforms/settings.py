"""Settings of a small project with nothing but locks."""

import os
from typing import Any

SECRET_KEY = "tests"
DEBUG = False
ALLOWED_HOSTS = ["*"]
USE_TZ = True
DATABASES: dict[str, dict[str, Any]] = {
    "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ.get("PLATFORM_SQLITE", ":memory:")},
    "locks": {
        "ENGINE": "django_mongodb_backend",
        "HOST": os.environ.get("MONGODB_URI", "mongodb://127.0.0.1"),
        "NAME": "mongolock_platforms",
    },
}
DATABASE_ROUTERS = ["django_mongolock.router.MongoLockRouter"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["django_mongolock", *filter(None, os.environ.get("PLATFORM_APPS", "").split(","))]
MONGOLOCK = {"DATABASE": "locks", "WAIT": 60}
ROOT_URLCONF = "tests.platforms.site"
TASKS = {"default": {"BACKEND": os.environ.get("PLATFORM_TASKS", "django_tasks.backends.immediate.ImmediateBackend")}}
