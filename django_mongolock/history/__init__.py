"""What has happened to locks. An app of its own: "django_mongolock.history" in INSTALLED_APPS."""
