"""The same project with MongoDB as its only database, for accounts, orders, ads and locks.

django-mongodb-backend has no AutoField. The apps of Django get ObjectId keys by `mongo_apps`, and `mongo_migrations`
has their migrations for that.
"""

from testproject.settings import *  # noqa: F403
from testproject.settings import DATABASES, INSTALLED_APPS, MONGOLOCK

DATABASES = {"default": DATABASES["mongo"]}
DATABASE_ROUTERS = ["django_mongodb_backend.routers.MongoRouter"]
MONGOLOCK = {**MONGOLOCK, "DATABASE": "default"}
SHOP_MONGO_ALIAS = "default"
DEFAULT_AUTO_FIELD = "django_mongodb_backend.fields.ObjectIdAutoField"

_MONGO_APPS = {
    "django.contrib.admin": "testproject.mongo_apps.MongoAdminConfig",
    "django.contrib.auth": "testproject.mongo_apps.MongoAuthConfig",
    "django.contrib.contenttypes": "testproject.mongo_apps.MongoContentTypesConfig",
}
INSTALLED_APPS = [_MONGO_APPS.get(app, app) for app in INSTALLED_APPS]
MIGRATION_MODULES = {app: f"testproject.mongo_migrations.{app}" for app in ("admin", "auth", "contenttypes", "shop")}
