from django.db import migrations, models
from django_mongodb_backend.fields import ObjectIdAutoField


class Migration(migrations.Migration):
    """The permissions of the models need it. Of models that are not managed, Django compares no fields."""

    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Entry",
            fields=[("id", ObjectIdAutoField(primary_key=True, serialize=False))],
            options={
                "managed": False,
                "default_permissions": (),
            },
        ),
        migrations.CreateModel(
            name="Lock",
            fields=[("key", models.CharField(db_column="_id", max_length=512, primary_key=True, serialize=False))],
            options={
                "verbose_name": "lock",
                "verbose_name_plural": "locks",
                "db_table": "mongolock_locks",
                "ordering": ("key",),
                "permissions": (
                    ("ask_release_lock", "Can ask for the release of a lock"),
                    ("force_release_lock", "Can force the release of a lock"),
                    ("clear_document_lock", "Can clear stale locks in documents"),
                    ("take_over_edit_lock", "Can take over a form that another user is editing"),
                    ("view_lock_status", "Can read the status of the locks, for monitoring"),
                ),
                "managed": False,
                "default_permissions": ("view",),
                "base_manager_name": "objects",
            },
        ),
        migrations.CreateModel(
            name="LockDashboard",
            fields=[],
            options={
                "verbose_name": "lock dashboard",
                "verbose_name_plural": "lock dashboard",
                "proxy": True,
                "default_permissions": (),
                "indexes": [],
                "constraints": [],
            },
            bases=("django_mongolock.lock",),
        ),
    ]
