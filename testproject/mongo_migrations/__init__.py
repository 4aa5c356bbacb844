"""Migrations of Django's own apps and of the shop for `settings_mongo`: ObjectId primary keys."""
