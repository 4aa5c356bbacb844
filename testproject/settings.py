"""Settings of the shop: accounts and orders in SQL, ads and locks in MongoDB.

Everything that differs between machines comes from the environment (django-environ).
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import environ

from testproject.broker import broker_url

BASE_DIR = Path(__file__).resolve().parent
env = environ.Env()

# The whole URI goes into HOST, because env.db() cannot read a URI that names several hosts.
MONGODB_URI = env.str("MONGODB_URI", default="mongodb://127.0.0.1:27017/").strip()
MONGODB_NAME = env.str("MONGODB_NAME", default="mongolock_shop")

DATABASES: dict[str, dict[str, Any]] = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": env.str("SQLITE_PATH", default=str(BASE_DIR / "db.sqlite3")),
        "OPTIONS": {
            "timeout": 20,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
        },
        # A file in tests too, because connections that share a database in memory fail at once instead of waiting.
        "TEST": {"NAME": str(Path(tempfile.gettempdir()) / f"mongolock-test-{os.getpid()}.sqlite3")},
    },
    "mongo": {
        "ENGINE": "django_mongodb_backend",
        "HOST": MONGODB_URI,
        "NAME": MONGODB_NAME,
    },
}
if RATES_URI := env.str("RATES_URI", default=""):  # another database for the rates, for comparison
    DATABASES["rates"] = env.db_url_config(RATES_URI)
    if RATES_URI.startswith("mysql:"):
        import pymysql

        pymysql.install_as_MySQLdb()  # a driver that needs no compiler
DATABASE_ROUTERS = [
    "testproject.router.MongoModelRouter",
    "django_mongolock.router.MongoLockRouter",
]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

MONGOLOCK: dict[str, Any] = {
    "DATABASE": "mongo",
    "LEASE": env.float("MONGOLOCK_LEASE", default=30.0),
    "WAIT": 10,
    "KEY_PREFIX": "",
    "HISTORY": env.int("MONGOLOCK_HISTORY", default=0),
}

# The alias that holds the ads, the sellers and the books of the external service.
SHOP_MONGO_ALIAS = "mongo"
# "off" runs the same code without a lock, to show the consequences.
SHOP_LOCKING = env.bool("SHOP_LOCKING", default=True)
# "on" keeps the locks of ads in the ads themselves, see `testproject.shop.ad_events`.
SHOP_DOCUMENT_LOCKS = env.bool("SHOP_DOCUMENT_LOCKS", default=False)
# With "on", the staff can begin the incidents of `testproject.shop.night`. These start programs.
SHOP_INCIDENTS = env.bool("SHOP_INCIDENTS", default=False)
# Seconds after which an ad that a flow holds by the lock in the ad itself is stuck.
SHOP_STALE_AFTER = env.float("SHOP_STALE_AFTER", default=60.0)
# The address of the slow external service. By default, this project answers there.
EXTERNAL_URL = env.str("EXTERNAL_URL", default="http://127.0.0.1:8000/external")
EXTERNAL_DELAY = (0.04, 0.2)  # seconds, from and to
EXTERNAL_FAILURES = env.float("EXTERNAL_FAILURES", default=0.03)  # share of calls answered with 503

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_mongolock",
    "django_mongolock.documents",
    "django_mongolock.versions",
    "django_mongolock.editing",
    "django_mongolock.history",
    "testproject.shop",
    "testproject.rates",
    "testproject.external",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    # After authentication, because the middleware writes the view and the user on each lock taken in a request.
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
ROOT_URLCONF = "testproject.urls"
WSGI_APPLICATION = "testproject.wsgi.application"
ASGI_APPLICATION = "testproject.asgi.application"
STATIC_URL = "/static/"
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "start"

# For a demo on the loopback interface only. A real project has no default here.
SECRET_KEY = env.str("SECRET_KEY", default="only-for-the-demo-on-127.0.0.1")
DEBUG = env.bool("DEBUG", default=False)
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
USE_TZ = True
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en"

LOGGING = {  # without this, an error under DEBUG = False would only be mailed
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "root": {"handlers": ["console"], "level": "WARNING"},
}

CELERY_BROKER_URL = broker_url(MONGODB_URI, f"{MONGODB_NAME}_broker")
CELERY_BROKER_TRANSPORT_OPTIONS = {"polling_interval": 0.05}
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_TASK_IGNORE_RESULT = True
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_ENABLE_REMOTE_CONTROL = False
CELERY_BEAT_SCHEDULE = {
    "retry-failed-exports": {"task": "testproject.shop.tasks.retry_exports", "schedule": 2.0},
}
if SHOP_DOCUMENT_LOCKS:  # for two runs at once, kept apart only by the locks in the ads
    CELERY_BEAT_SCHEDULE["retry-once-more"] = CELERY_BEAT_SCHEDULE["retry-failed-exports"]

if env.bool("MONGOLOCK_TEST_OLD_SERVER", default=False):
    # django-mongodb-backend 6.x asks for MongoDB 7. The server in the dependency group is a 6.0, which is enough for
    # the tests of this project. Never do this in production.
    from django_mongodb_backend.features import DatabaseFeatures

    DatabaseFeatures.minimum_database_version = (6, 0)
