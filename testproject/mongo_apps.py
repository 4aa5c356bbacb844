"""Django's own apps with ObjectId primary keys, for `settings_mongo`."""

from django.contrib.admin.apps import AdminConfig
from django.contrib.auth.apps import AuthConfig
from django.contrib.contenttypes.apps import ContentTypesConfig


class MongoAdminConfig(AdminConfig):
    """The admin, with its log entries in MongoDB."""

    default_auto_field = "django_mongodb_backend.fields.ObjectIdAutoField"


class MongoAuthConfig(AuthConfig):
    """Users, groups and permissions in MongoDB."""

    default_auto_field = "django_mongodb_backend.fields.ObjectIdAutoField"


class MongoContentTypesConfig(ContentTypesConfig):
    """Content types in MongoDB."""

    default_auto_field = "django_mongodb_backend.fields.ObjectIdAutoField"
