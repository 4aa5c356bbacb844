"""The history of the locks. This is an app of its own: add "django_mongolock.history" to INSTALLED_APPS."""
