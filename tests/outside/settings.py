"""The settings of the README, and nothing else, with SQL beside the locks' MongoDB."""

import os

SECRET_KEY = "only for this test"
USE_TZ = True
ROOT_URLCONF = "outside.urls"
ALLOWED_HOSTS = ["*"]
STATIC_URL = "/static/"
DATABASES = {
    "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "outside.sqlite3"},
    "locks": {
        "ENGINE": "django_mongodb_backend",
        "HOST": os.environ["MONGODB_URI"],
        "NAME": os.environ["MONGODB_NAME"],
    },
}
DATABASE_ROUTERS = ["django_mongolock.router.MongoLockRouter"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "django_mongolock",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django_mongolock.context.LockContextMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
MONGOLOCK = {"DATABASE": "locks"}
