from django.db import migrations
from django_mongodb_backend.fields import ObjectIdAutoField


class Migration(migrations.Migration):
    """The permissions of the model need it. Of a model that is not managed, Django compares no fields."""

    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="LockEvent",
            fields=[("id", ObjectIdAutoField(primary_key=True, serialize=False))],
            options={
                "verbose_name": "lock event",
                "verbose_name_plural": "lock events",
                "db_table": "mongolock_locks_history",
                "ordering": ("-at", "-id"),
                "managed": False,
                "default_permissions": ("view",),
                "base_manager_name": "objects",
            },
        ),
    ]
